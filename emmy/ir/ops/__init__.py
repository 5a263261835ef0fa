"""Ops: what can be computed. `parse_op` reads an op's text."""

from emmy.ir.ops.attention import Attention
from emmy.ir.ops.bmm import Bmm
from emmy.ir.ops.formula import Formula, FormulaOp, formula
from emmy.ir.ops.glu import Geglu, Glu, Swiglu
from emmy.ir.ops.glu_linear import GegluLinear, GluLinear, SwigluLinear
from emmy.ir.ops.made_linear import MadeLinear
from emmy.ir.ops.matmul import Matmul, matmul
from emmy.ir.ops.norm_linear import NormLinear
from emmy.ir.ops.op import Accumulate, InputKind, Op, Storage, Work, parse_op
from emmy.ir.ops.paged_attention import PagedAttention
from emmy.ir.ops.positions import Embedding, Rope
from emmy.ir.ops.rows import RmsNorm, RowOp
from emmy.ir.ops.served_attention import ServedAttention

Products = Matmul | Glu | Bmm | MadeLinear  # ops of matrix products

__all__ = [
    "Accumulate",
    "Attention",
    "Bmm",
    "Embedding",
    "Formula",
    "FormulaOp",
    "Geglu",
    "GegluLinear",
    "Glu",
    "GluLinear",
    "InputKind",
    "MadeLinear",
    "Matmul",
    "NormLinear",
    "Op",
    "PagedAttention",
    "Products",
    "RmsNorm",
    "Rope",
    "RowOp",
    "ServedAttention",
    "Storage",
    "Swiglu",
    "SwigluLinear",
    "Work",
    "formula",
    "matmul",
    "parse_op",
]
