"""The emulator against what a GPU did with the same probes, kept in a file; and that every helper has a probe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emmy.codegen.emulator import conformance
from emmy.codegen.emulator.conformance import PROBES, Golden, disagreement, on_emulator
from emmy.codegen.emulator.probe import Probe
from emmy.codegen.ptx import HELPERS, helper, used
from emmy.errors import DataError
from tests.tiers import some

MEASURED = Path(__file__).parents[1] / "golden" / "conformance_h200.npz"
NAMES = [p.name for p in PROBES]
# Probes that the file has not yet: run it on a GPU, and take them off here.
NOT_MEASURED: frozenset[str] = frozenset()


# Each costs a compilation: a fifth of them in every run, the others in the slow tier.
IN_TIERS = some(PROBES, 5, lambda p: p.name)


@pytest.mark.skipif(
    not MEASURED.exists(), reason="not made yet: python -m emmy.codegen.emulator.conformance --out FILE"
)
@pytest.mark.parametrize("probe", IN_TIERS)
def test_the_emulator_does_what_the_gpu_did(probe: Probe) -> None:
    golden = Golden.load(MEASURED)
    if probe.name in NOT_MEASURED:
        assert probe.name not in golden.digests, f"{probe.name} has been measured: take it off NOT_MEASURED"
        pytest.skip(f"{probe.name} is not measured yet: run it on a GPU")
    assert golden.digests.get(probe.name) == probe.digest(), f"{probe.name} has changed since: run it on a GPU again"
    assert disagreement(probe, on_emulator(probe, golden.arch), golden.results[probe.name]) is None


@pytest.mark.parametrize("probe", IN_TIERS)
def test_a_probe_gives_the_same_whatever_the_schedule(probe: Probe) -> None:
    late = on_emulator(probe, probe.archs[-1])
    assert disagreement(probe, on_emulator(probe, probe.archs[-1], 1, eager=True), late) is None
    assert any(r.any() for r in late)


def test_every_helper_has_a_probe_but_for_plain_c_over_those_that_have() -> None:
    probed = {name for p in PROBES for name in used(p.kernel)}
    probed |= {other for name in probed for other in helper(name).uses}
    for h in (
        HELPERS.values()
    ):  # the emulator executes the very text of plain C++, so a GPU can differ in what it calls only
        plain = h.emu is None and h.uses and all(helper(u).emu is None or u in probed for u in h.uses)
        assert h.name in probed or plain, h.name
    assert len(set(NAMES)) == len(NAMES) and set(NAMES) >= NOT_MEASURED


def test_a_probe_that_differs_is_reported_with_its_first_element() -> None:
    probe = next(p for p in PROBES if p.name == "ldmatrix_x1")
    good = on_emulator(probe, "sm_80")
    other = [r.copy() for r in good]
    other[0][3] += 1
    assert disagreement(probe, good, good) is None
    assert "ldmatrix_x1: result 0 differs in 1 of 32 elements, first [3]" in str(disagreement(probe, good, other))


def test_a_rounded_probe_may_differ_within_its_tolerance_only() -> None:
    probe = next(p for p in PROBES if p.name == "mma_f32_f16_rounded")
    good = on_emulator(probe, "sm_80")
    assert disagreement(probe, good, [r * np.float32(1 + 1e-7) for r in good]) is None
    assert disagreement(probe, good, [r * np.float32(1 + 1e-4) for r in good]) is not None
    assert disagreement(probe, good, [r * np.float32(np.nan) for r in good]) is not None


def test_kept_results_survive_a_round_trip_and_a_changed_probe_is_stale(tmp_path: Path) -> None:
    probes = [p for p in PROBES if p.name.startswith("mma_")]
    golden = Golden(
        "a card",
        13000,
        "sm_90a",
        "13.0",
        {p.name: p.digest() for p in probes},
        {p.name: on_emulator(p, "sm_90a") for p in probes},
    )
    golden.save(tmp_path / "kept.npz")
    loaded = Golden.load(tmp_path / "kept.npz")
    assert (loaded.product, loaded.digests) == (golden.product, golden.digests)
    stale = [line.split(":")[0] for line in conformance.check(loaded)]
    assert set(stale) == {p.name for p in PROBES} - {p.name for p in probes}


def test_a_file_that_is_none_of_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"x\.npz is no file of conformance results"):
        Golden.load(tmp_path / "x.npz")


def test_the_command_line_checks_a_file(tmp_path: Path) -> None:
    empty = Golden("a card", 13000, "sm_90a", "13.0", {}, {})
    empty.save(tmp_path / "kept.npz")
    assert conformance.main(["--check", str(tmp_path / "kept.npz")]) == 1


@pytest.mark.gpu
def test_this_gpu_agrees_with_the_emulator(tmp_path: Path) -> None:
    assert conformance.main(["--out", str(tmp_path / "here.npz")]) == 0
