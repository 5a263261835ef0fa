"""What is worth tuning: named sets of cases, those of any dense decoder, and recorded spaces to try a search on."""

from emmy.workloads.decoder_cases import DecoderCase, from_config
from emmy.workloads.gemma4_12b import Case
from emmy.workloads.sets import OPS, AnyCase, NamedOp, load, named_ops, op_texts

__all__ = ["OPS", "AnyCase", "Case", "DecoderCase", "NamedOp", "from_config", "load", "named_ops", "op_texts"]
