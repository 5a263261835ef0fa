"""Ops: what can be computed. `parse_op` reads an op's text."""

from emmy.ir.ops.matmul import Matmul, matmul
from emmy.ir.ops.op import Accumulate, InputKind, Op, Storage, Work, parse_op

__all__ = ["Accumulate", "InputKind", "Matmul", "Op", "Storage", "Work", "matmul", "parse_op"]
