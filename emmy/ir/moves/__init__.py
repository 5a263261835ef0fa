"""Moves: checked rewrites of plans. One file each; importing this package registers them all."""

from emmy.ir.moves.atom import BindAtom
from emmy.ir.moves.base import MOVES, OPEN, Move, Open, Site
from emmy.ir.moves.commute import Commute
from emmy.ir.moves.cut import Cut
from emmy.ir.moves.finish import Finish
from emmy.ir.moves.fuse import Fuse
from emmy.ir.moves.hint import Hint
from emmy.ir.moves.online import Online
from emmy.ir.moves.operand import Operand
from emmy.ir.moves.pdl import Pdl
from emmy.ir.moves.pipeline import Pipeline
from emmy.ir.moves.prefetch import Prefetch
from emmy.ir.moves.preload import Preload
from emmy.ir.moves.raster import Raster
from emmy.ir.moves.roles import Persist, PingPong, Specialize
from emmy.ir.moves.split import Split
from emmy.ir.moves.splitk import SplitK
from emmy.ir.moves.stage import Stage
from emmy.ir.moves.store import StoreBlock
from emmy.ir.moves.streamk import StreamK
from emmy.ir.moves.swap import Swap
from emmy.ir.moves.unroll import Unroll

__all__ = [
    "MOVES", "OPEN", "BindAtom", "Commute", "Cut", "Finish", "Fuse", "Hint", "Move", "Online", "Open", "Operand", "Pdl",
    "Persist", "PingPong", "Pipeline", "Prefetch", "Preload", "Raster", "Site", "Specialize", "Split", "SplitK", "Stage", "StoreBlock",
    "StreamK", "Swap", "Unroll",
]  # fmt: skip
