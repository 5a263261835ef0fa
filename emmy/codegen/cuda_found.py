"""Filling slots with rows of a view, which lie in an input wherever numbers say that are loaded on the way.

Rows may lie in pages, `pages[table[b,t // 16],t % 16,d]`: so many follow one another, and a table says where the next ones are.
Of rows behind the last that anybody needs neither the table is asked nor anything read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from emmy.codegen.cuda_copy import Copied, Copier, tensor_map
from emmy.codegen.cuda_scope import Piece, Ring, Walk
from emmy.codegen.kernel import WHOLE, Int, IntOp, IntVar, LetInt, Whole, below, least, plus, times
from emmy.codegen.kernel_gpu import SMEM, Arg, Do, Further, LetFrom, MapRef, Ref, Stmt, TensorMap, counter, unrolled
from emmy.ir.expr import Apply, Axis, Const, Expr, Read
from emmy.ir.gpu import BOX_ROWS
from emmy.ir.pages import Paged, paged

Spot = Mapping[str, Whole]  # a position along each axis


def copier(w: Walk, ring: Ring) -> Copier:
    """What fills a ring."""
    view = w.plan.program.view(ring.value)
    if view is None:
        return Copier(w, ring)
    assert isinstance(view.body, Read)
    return FoundCopier(w, ring, found=view.body, page=paged(w.plan, w.launch.tile, ring.channel))


@dataclass(slots=True)
class FoundCopier(Copier):
    """Copies of one ring of a view. found: the read that its elements are; page: its pages, if rows lie in any."""

    found: Read = field(default_factory=lambda: Read("", ()))
    page: Paged | None = None
    base: IntVar | None = None  # where the rows of the page at hand begin in the input

    def _view(self, row: Whole, column: Whole) -> str:
        return self.found.value

    def _end(self, rows: Piece) -> Whole:
        """Where the rows end that anybody needs."""
        return self.w.shares[self.ring.rows][1] if self.ring.rows in self.w.shares else rows.end

    def _last(self, rows: Piece) -> Spot:
        """The last row that anybody needs, or the first where there is none."""
        end, axis = self._end(rows), self.ring.rows
        if isinstance(end, Int):
            return {axis: Int(end.value - 1)}
        return {axis: self.w.let(f"{axis}_last", IntOp("max", plus(end, Int(-1)), Int(0)))}

    def _corner(self, scope: dict[str, Piece], row: Whole, column: Whole) -> Spot:
        """A position in the view, so far from where its block begins."""
        rows, columns = self.ring.rows, self.ring.columns
        spot = {a: scope[a].lo for a in self.w.plan.program.value(self.ring.value).axes}
        return {**spot, rows: plus(spot[rows], row), columns: plus(spot[columns], column)}

    # ------------------------------------------------------------ by threads
    @property
    def _each(self) -> int:
        """Copies of a thread in one page, where a page is looked up once for several; else 0."""
        if self.share is None or self.page is None or not self.share.stride:
            return 0
        each, left = divmod(self.page.rows, self.share.stride)
        return each if each > 1 and not left else 0

    def _passes(self, one: Callable[[Whole], tuple[Stmt, ...]], scope: dict[str, Piece]) -> tuple[Stmt, ...]:
        each, share, page = self._each, self.share, self.page
        if not each or share is None or page is None:
            return Copier._passes(self, one, scope)
        loads, copies = list[Stmt](), list[Stmt]()
        for at in range(share.count // each):
            corner = self._corner(scope, Int(at * page.rows), share.column)
            there = element(self.w, self.found, corner, self._last(scope[self.ring.rows]), loads)
            self.base = IntVar(self.w.fresh(f"{self.ring.value}_page"))
            loads.append(LetInt(self.base.name, there.at))
            copies += unrolled("i", each, one(plus(Int(at * each), counter("i", each))))
        self.base = None
        return (*loads, *copies)

    def _piece(self, i: Whole, scope: dict[str, Piece], slot: Whole) -> Copied:
        spot, rows, loads = self._spot(i), scope[self.ring.rows], list[Stmt]()
        loads += spot.lets
        if self.base and self.page and self.share:
            inside = plus(self.share.row, times(counter("i", self._each), Int(self.share.stride)))
            source = Ref(
                self.found.value, plus(self.base, times(inside, self.w.stride(self.found.value, self.page.axis)))
            )
        else:
            source = element(self.w, self.found, self._corner(scope, spot.row, spot.column), self._last(rows), loads)
        end = self._end(rows)
        sure = rows.full and end == rows.end
        row_exists: Whole = Int(1) if sure else below(plus(rows.lo, spot.row), end)
        exists = self._exist(row_exists, spot.column, scope[self.ring.columns])
        return Copied(tuple(loads), Ref(SMEM, plus(spot.to, slot)), source, exists, spot.inside)

    # ------------------------------------------------------------ by the copy engine
    def _map(self) -> TensorMap:
        """Boxes of a page's rows."""
        w, s, page = self.w, self.ring.layout, self.page
        if page is None or s.pitch != s.panel * self.item:
            raise w.cannot(f"{self.ring.value} has no pages that tma could bring to layout {self.ring.channel.layout}")
        box = next(n for n in range(min(page.rows, BOX_ROWS), 0, -1) if page.rows % n == 0)
        axes = page.axis, w.plan.program.value(self.found.value).axes[-1]
        found = tensor_map(w, self.found.value, axes, (box, s.panel), s.swizzle)
        first, views = self.found.index[0], (x.body for x in w.plan.program.views)
        alone = sum(isinstance(x, Read) and x.value == found.value for x in views) == 1
        name = found.name if alone else f"{self.ring.value}_map"
        return replace(found, name=name, endless=isinstance(first, Read))

    def engine_fill(self, ahead: int, scope: dict[str, Piece], barrier: Whole) -> tuple[Stmt, ...]:
        """The same, a box of each page, which the thread finds that asks for it. All are found before the first is asked for."""
        w, s, m, page = self.w, self.ring.layout, self.map, self.page
        assert m is not None and page is not None
        more: tuple[Arg, ...] = (Further(self.policy, Int(0)),) if self.policy else ()
        helper = f"emmy_tma_load_{m.rank}d" + ("_hint" if self.policy else "")
        *others, last = w.plan.program.value(self.found.value).axes
        loads, copies = list[Stmt](), list[Stmt]()
        for first in range(0, s.rows, m.box_rows):
            there = place(
                w, self.found, self._corner(scope, Int(first), Int(0)), self._last(scope[self.ring.rows]), loads
            )
            outer = tuple(there[a] for a in reversed(others) if a != page.axis)
            for panel in range(s.columns // s.panel):
                to = Ref(SMEM, plus(self.ring.slot(ahead), Int(panel * s.panel_bytes + first * s.pitch)))
                where = (plus(there[last], Int(panel * s.panel)), there[page.axis], *outer)
                copies.append(Do(helper, (to, MapRef(m.name), Ref(SMEM, barrier), *where, *more)))
        return (*loads, *copies)


# ---------------------------------------------------------------- positions
def place(w: Walk, r: Read, spot: Spot, last: Spot, out: list[Stmt]) -> dict[str, Whole]:
    """The position along each axis of what `r` reads, for the element of the view at `spot`. Loads go to `out`.

    last: along some axes the last position; behind it numbers are not asked for, but those of that position
    """
    axes = w.plan.program.value(r.value).axes
    return {
        a: _at(w, Axis(x) if isinstance(x, str) else x, spot, last, out) for a, x in zip(axes, r.index, strict=True)
    }


def element(w: Walk, r: Read, spot: Spot, last: Spot, out: list[Stmt]) -> Ref:
    """The element of an input that `r` reads."""
    found = place(w, r, spot, last, out)
    return Ref(r.value, plus(*(times(x, w.stride(r.value, a)) for a, x in found.items())))


def _at(w: Walk, e: Expr, spot: Spot, last: Spot, out: list[Stmt]) -> Whole:
    match e:
        case Const(v):
            return Int(int(v))
        case Axis(name):
            return spot[name]
        case Apply(fn, (a, b)):
            return WHOLE[fn](_at(w, a, spot, last, out), _at(w, b, spot, last, out))
        case Read(value):
            there = {a: least(x, last[a]) if a in last else x for a, x in spot.items()}
            source, name = element(w, e, there, last, out), w.fresh(f"{value}_here")
            out.append(LetFrom(name, f"emmy_{w.how_to_load(value)}_index", (source,)))
            return IntVar(name)
        case Apply():
            raise w.cannot(f"{e} is no position")
