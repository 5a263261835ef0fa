"""Ops: what can be computed. `parse_op` reads an op's text."""

from emmy.ir.ops.bmm import Bmm
from emmy.ir.ops.formula import Formula, FormulaOp, formula
from emmy.ir.ops.glu import Geglu, Glu, Swiglu
from emmy.ir.ops.matmul import Matmul, matmul
from emmy.ir.ops.op import Accumulate, InputKind, Op, Storage, Work, parse_op
from emmy.ir.ops.positions import Embedding, Rope
from emmy.ir.ops.rows import RmsNorm, RowOp

Products = Matmul | Glu | Bmm  # ops of matrix products

__all__ = [
    "Accumulate",
    "Bmm",
    "Embedding",
    "Formula",
    "FormulaOp",
    "Geglu",
    "Glu",
    "InputKind",
    "Matmul",
    "Op",
    "Products",
    "RmsNorm",
    "Rope",
    "RowOp",
    "Storage",
    "Swiglu",
    "Work",
    "formula",
    "matmul",
    "parse_op",
]
