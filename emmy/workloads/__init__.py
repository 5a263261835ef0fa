"""What is worth tuning: named sets of cases, and recorded spaces to try a search on."""

from emmy.workloads.gemma4_12b import Case
from emmy.workloads.sets import OPS, load, op_texts

__all__ = ["OPS", "Case", "load", "op_texts"]
