"""The pass over vLLM's compiled graphs that puts one op of the pack in the place of a chain, and what that op needs.

Gated pairs and norms (chains.py), in compiled ranges of rows of which the pack serves every size (coverage.py). Everything else
of a graph stays as it is. Knows torch.fx and packs, not vLLM.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import fx

from emmy.ir.ops import Op, parse_op
from emmy.pack import Case, Pack, Served
from emmy_vllm.chains import DTYPES, Chain, Form, Part, chains, form_of
from emmy_vllm.identity import sources_digest
from emmy_vllm.kernels import Kernels, Table
from emmy_vllm.ranges import Span, covers, cuts, spans, why_no_gain
from emmy_vllm.settings import Settings
from emmy_vllm.torch_made import made_by_torch

log = logging.getLogger("emmy.vllm")
_MOST_BYTES = 256 << 20  # of an input or output that a test makes


# ---------------------------------------------------------------- what a pack offers
@cache
def fusable(pack: Pack) -> Mapping[Form, Case]:
    """The pack's cases that chains become, as they are served here."""
    found = ((form_of(made.op), pack.case(made.op)) for made in pack.cases)
    return {form: case for form, case in found if form is not None and case is not None}


def why_left(settings: Settings, pack: Pack, case: Case, r: Served) -> str:
    """Why a range is not fused although some kernel of the pack serves it, or because none does; "" when it is."""
    if r.code is None:
        return r.why
    return "" if settings.unmeasured else why_no_gain(pack, case, r)


def range_ends(
    settings: Settings, width: int, dtype: torch.dtype, most: int, given: tuple[int, ...]
) -> tuple[int, ...]:
    """Where compiled ranges of a model should end beside `given`, for what the pack can fuse around layers `width` wide."""
    if not settings.uses("fusion"):
        return ()
    pack = settings.open()
    near = [c for f, c in fusable(pack).items() if f.sizes[-1] == width and f.dtype == DTYPES.get(dtype)]
    return cuts([spans(c, most, partial(why_left, settings, pack, c)) for c in near], most, given)


# ---------------------------------------------------------------- before graphs are made
def load(kernels: Kernels, rows: int) -> None:
    """Makes ready what may stand around the plain linears of the model: gated pairs of theirs, norms of what they read.

    Also in a process that takes its graphs from the cache, where no pass runs.
    """
    if not kernels.settings.uses("fusion"):
        return
    for form, case in fusable(kernels.pack).items():
        near = [
            (device, names) for (n, k, dtype, device), names in kernels.weights.items() if _is_near(form, n, k, dtype)
        ]
        for device, names in near:
            table = kernels.table(case)
            table.place = f"where graphs have it, by {len(names)} x {names[0]}"
            _load(kernels, table, rows, device)


def _is_near(form: Form, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether what a form names may stand beside a product with a weight (n, k)."""
    return form.dtype == DTYPES.get(dtype) and (form.sizes == (k,) or (2 * form.sizes[0], *form.sizes[1:]) == (n, k))


def _load(kernels: Kernels, table: Table, rows: int, device: torch.device) -> None:
    """Loads a table where it is not yet, tries its kernels, and leaves wrong ones and those that would not pay to the compiler."""
    if rows <= table.rows:
        return
    op = parse_op(table.case.op)
    for r in table.case.ranges:
        if why := why_left(kernels.settings, kernels.pack, table.case, r):
            table.refused[r.lo] = why
    kernels.load(table, rows)
    wrong = {r.lo: why for r in table.case.ranges if table.serves(r) and (why := _wrong(op, table, r, device))}
    for lo, why in wrong.items():
        log.error("%s from %d rows: WRONG ANSWER, left to the compiler: %s", op, lo, why)
    if wrong:
        table.refused |= wrong
        kernels.load(table, rows)
    table.counts.clear()  # of what the tests called


def _wrong(op: Op, table: Table, r: Served, device: torch.device) -> str:
    """What is wrong with a kernel at the ends of its range, tried on random numbers beside torch; "" where nothing is."""
    assert r.code is not None
    widest = max(a.shape[-1] for a in table.case.arguments if table.case.symbol in a.shape)
    assert isinstance(widest, int)
    most = max(r.lo, min(r.hi, table.rows, _MOST_BYTES // (4 * widest)))
    for m in sorted({r.lo, most}):
        x = _drawn(table.case, m, device)
        want = made_by_torch(op, x)
        got = dict(zip(want, torch.ops.emmy.fused(list(x.values()), table.number), strict=True))
        for name, right in want.items():
            error = _error(got[name], right, op.tolerance(r.code.accumulate, name))
            if not error <= 1:
                return f"at {m} rows the error of {name} is {error:.3g} times what is allowed"
    return ""


def _error(got: torch.Tensor, want: torch.Tensor, tolerance: tuple[float, float]) -> float:
    """The largest difference in units of what is allowed: twice the op's tolerance, for torch is off too, and four roundings, for
    torch rounds what lies between, which is near 1 on these numbers. inf for a NaN."""
    absolute, relative = (2 * t + 4 * torch.finfo(want.dtype).eps for t in tolerance)
    worst = 0.0
    for have, right in zip(got.split(1024), want.split(1024), strict=True):
        right = right.float()
        error = (have.float() - right).abs() / (absolute + relative * right.abs())
        worst = max(worst, float(error.nan_to_num(nan=float("inf")).max()))
    return worst


def _drawn(case: Case, m: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random inputs for m rows, scaled so that outputs are near 1."""
    dtypes = {short: d for d, short in DTYPES.items()}
    generator = torch.Generator(device=device).manual_seed(m)
    out = {}
    for a in case.arguments:
        if not a.is_output:
            shape = [m if isinstance(d, str) else d for d in a.shape]
            scale = shape[-1] ** -0.5 if len(shape) == 2 and case.symbol not in a.shape else 1.0
            x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * scale
            out[a.name] = x.to(dtypes[a.dtype])
    return out


# ---------------------------------------------------------------- the pass
class Fusion:
    """The pass, for one engine. Graphs name tables by number, which load() has filled in every process that runs them."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    @property
    def uuid(self) -> str:
        """What the pass does to a graph follows from this and the graph: the key of the compiler's cache."""
        served = sorted((op, t.rows, self.served(t)) for op, t in self.kernels.tables.items())
        return hashlib.sha256(f"{sources_digest()} {self.kernels.pack.digest} {served}".encode()).hexdigest()

    def __call__(self, graph: fx.Graph, lo: int, hi: int) -> None:
        """Replaces what the pack serves at every size lo..hi."""
        for chain in chains(graph):
            case = fusable(self.kernels.pack).get(chain.form)
            table = self.kernels.tables.get(case.op) if case else None
            why = "the pack has no such op" if case is None else self._why_not(table, lo, hi)
            if not why and table is not None:
                _replace(graph, chain, table)
            self._say(chain, lo, hi, why)

    def _why_not(self, table: Table | None, lo: int, hi: int) -> str:
        if table is None or not table.rows:
            return "its kernels were not loaded: no linear of this width is plain"
        served = self.served(table)
        if covers(served, lo, min(hi, table.rows)):
            return ""
        return f"the pack serves {', '.join(f'{a}..{b}' for a, b in served) or 'no size'} at a gain, not every size"

    def served(self, table: Table) -> tuple[Span, ...]:
        return spans(table.case, table.rows, table.why_left)

    def _say(self, chain: Chain, lo: int, hi: int, why: str) -> None:
        """One line for each kind of chain and range: pieces of a model are compiled one after another."""
        what = f"{chain.form.kind} {'x'.join(map(str, chain.form.sizes))} {chain.form.dtype}, rows {lo}..{hi}: " + (
            f"left to the compiler: {why}" if why else "fused"
        )
        self.kernels.graphs[what] += 1
        if self.kernels.graphs[what] == 1:
            log.info("emmy fusion: %s", what)


def _replace(graph: fx.Graph, chain: Chain, table: Table) -> None:
    """The chain's outputs as one call's, before the first of them; what then computes nothing that is read goes."""
    names = [a.name for a in table.case.arguments]
    outputs = [chain.outputs[n] for n in names if n in chain.outputs]
    first = next(node for node in graph.nodes if node in outputs)
    with graph.inserting_before(first):
        inputs = [_argument(graph, chain.inputs[n]) for n in names if n in chain.inputs]
        made = graph.call_function(torch.ops.emmy.fused.default, (inputs, table.number))
        made.meta["val"] = [node.meta["val"] for node in outputs]
        parts = [graph.call_function(operator.getitem, (made, i)) for i in range(len(outputs))]
    for node, part in zip(outputs, parts, strict=True):
        part.meta.update(node.meta)
        node.replace_all_uses_with(part)
    _erase(graph, outputs)


def _argument(graph: fx.Graph, x: fx.Node | Part) -> fx.Node:
    if isinstance(x, fx.Node):
        return x
    part = graph.call_function(torch.ops.aten.slice.Tensor, (x.of, 0, x.lo, x.hi))
    part.meta["val"] = x.of.meta["val"][x.lo : x.hi]
    return part


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Erases of these nodes, and of what they are made of, those that nothing reads any more."""
    doomed = set(nodes)
    for node in reversed(list(graph.nodes)):
        if node in doomed and not node.users and node.op == "call_function":
            doomed.update(node.all_input_nodes)
            graph.erase_node(node)
