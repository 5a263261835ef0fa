"""Kernel packs: measured winners with sources, binaries and evidence in one file, that a server opens without the tuner."""

from emmy.pack.building import Built, Choice, Offer
from emmy.pack.machine import Machine
from emmy.pack.opening import Pack, PackedPlan
from emmy.pack.schema import Case, Code, Evidence, Manifest, Served

__all__ = [
    "Built", "Case", "Choice", "Code", "Evidence", "Machine", "Manifest", "Offer", "Pack", "PackedPlan", "Served",
]  # fmt: skip
