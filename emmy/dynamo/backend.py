"""The backend "emmy" of torch.compile, and `emmy.compile`: what Emmy has ops for runs in its kernels, the rest in torch.

Inference only. A graph that Dynamo captured is brought to ATen operators; groups of them become ops of Emmy's (`linears`,
`chains`); whatever is no group stays, and the report says why. Winners that are stored are used; otherwise default schedules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node

from emmy.dynamo.attentions import find_attentions
from emmy.dynamo.chains import find_chains
from emmy.dynamo.check import check
from emmy.dynamo.graph import aten
from emmy.dynamo.group import Group
from emmy.dynamo.linears import find_linears
from emmy.dynamo.ops import INFERENCE, TorchOp, torch_op
from emmy.dynamo.report import Fallback, GraphReport, KernelUse
from emmy.dynamo.rewriting import rewritten
from emmy.dynamo.sizes import BySize, has_open_sizes
from emmy.errors import EmmyError, NoSuchDevice, UsageError
from emmy.ir.target import load_target, target_names
from emmy.lookup import winner

log = logging.getLogger("emmy.dynamo")
Call = Callable[..., object]
RESTS, ATTENTIONS = ("torch", "inductor"), ("tuned", "always", "never")
_VIEWS = {
    "view", "reshape", "_unsafe_view", "permute", "t", "transpose", "expand", "unsqueeze", "squeeze", "slice", "select", "split",
    "split_with_sizes", "alias", "detach", "getitem", "unbind", "as_strided",
}  # fmt: skip
_reports: list[GraphReport] = []


@dataclass(frozen=True, slots=True)
class Options:
    """How graphs are compiled.

    gpu:     target; None = the CPU, or the card that the tensors are on
    threads: of a CPU; None = as many as torch uses
    check:   the first call runs torch beside every kernel; one whose answer is off by more than its op allows is torch's again
    attention: "tuned" = where a measured schedule of the op is stored, since torch has good kernels of its own; "always"; "never"
    rest:    who runs what is no kernel of Emmy's: "torch", operator by operator, or "inductor", which fuses it
    sizes:   how many sizes of a graph that Dynamo left open (dynamic=None or True) get kernels of their own, each when it
             first comes; further ones are torch's
    home:    folder of measurements
    on_report: is given the report of each graph
    """

    gpu: str | None = None
    threads: int | None = None
    check: bool = False
    attention: str = "tuned"
    rest: str = "torch"
    sizes: int = 16
    home: Path | None = None
    on_report: Callable[[GraphReport], None] = field(default=_reports.append)


def backend(
    gm: GraphModule, example_inputs: Sequence[torch.Tensor], *, options: Mapping[str, object] | None = None
) -> Call:
    """What torch.compile(backend="emmy", options={"gpu": ..., "check": True}) calls with each graph. Raises UsageError."""
    try:
        chosen = Options(**dict(options or {}))  # type: ignore[arg-type]
    except TypeError:
        known = ", ".join(f for f in Options.__slots__)
        raise UsageError(f"options of the backend are {known}; got {', '.join(options or ())}") from None
    for name, allowed in (("rest", RESTS), ("attention", ATTENTIONS)):
        if getattr(chosen, name) not in allowed:
            raise UsageError(f"{name} is {getattr(chosen, name)!r}; allowed are {', '.join(allowed)}")
    if not isinstance(chosen.sizes, int) or chosen.sizes < 0:
        raise UsageError(f"sizes is {chosen.sizes!r}; a whole number of at least 0 is needed")
    return compile_graph(gm, example_inputs, chosen)


def reports() -> tuple[GraphReport, ...]:
    """Reports of the graphs that torch.compile(backend="emmy") has compiled in this process."""
    return tuple(_reports)


def compile_graph(gm: GraphModule, example_inputs: Sequence[torch.Tensor], options: Options) -> Call:
    """A callable for Dynamo's graph. Raises UsageError when a gradient could be asked for."""
    if torch.is_grad_enabled():
        tensors = (*example_inputs, *gm.parameters())
        if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
            raise UsageError(f"a parameter or an input of the compiled function requires a gradient. {INFERENCE}")
    with torch.no_grad():
        made: Call = aot_autograd(
            fw_compiler=partial(_compile_aten, options=options), decompositions=_decompositions()
        )(gm, example_inputs)
    return made


@cache
def _decompositions() -> dict[object, Call]:
    """Operators that are brought to simpler ones: only norms, whose parts are what is looked for."""
    table = torch._decomp.core_aten_decompositions()
    wanted = ("_fused_rms_norm", "rms_norm")
    return {
        op: f
        for op, f in table.items()
        if isinstance(op, torch._ops.OpOverload) and op._schema.name.partition("::")[2] in wanted
    }


def _compile_aten(gm: GraphModule, example_inputs: Sequence[torch.Tensor], *, options: Options) -> Call:
    if has_open_sizes(gm):
        known = partial(_compile_known, options=options)
        return BySize(gm, known, partial(known, gm), options.sizes)
    return _compile_known(gm, options)


def _compile_known(gm: GraphModule, options: Options) -> Call:
    """A callable for a graph; what of its sizes is open nevertheless is torch's."""
    gpu, device = _target(gm, options)
    report = GraphReport(gpu)
    ops: dict[Group, TorchOp] = {}
    left: dict[Node, str] = {}
    groups = _groups(gm, left)
    made = {key: _made(key, gpu, device, options) for key in dict.fromkeys(g.op.key for g in groups)}
    for group in groups:
        op = made[group.op.key]
        if isinstance(op, TorchOp):
            ops[group] = op
        else:
            left |= dict.fromkeys(group.nodes, f"no kernel of {group.op}: {op}")
    out = _Compiled(gm, ops, left, report, options)
    options.on_report(report)
    log.info("%s", report)
    return out


def _made(key: str, gpu: str, device: torch.device, options: Options) -> TorchOp | EmmyError:
    """The operator of an op, compiled; or why there is none. What a near problem's schedule cannot do, the default may."""
    why = EmmyError()
    if key.startswith("attention:") and options.attention != "always":
        tuned = options.attention == "tuned" and winner(key, gpu=gpu, threads=options.threads or 1, home=options.home)
        if not tuned:
            return EmmyError(
                "no measured schedule is stored, and torch has good kernels of its own (attention='always')"
            )
    for near in (True, False):
        try:
            op = torch_op(key, gpu=gpu, threads=options.threads, near=near, home=options.home)
            op.prepare(device)
        except EmmyError as e:
            why = e
        else:
            return op
    return why


def _target(gm: GraphModule, options: Options) -> tuple[str, torch.device]:
    """The target of a graph's tensors, and their device. Raises NoSuchDevice when none describes it."""
    found = {v.device for n in gm.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}
    device = next((d for d in found if d.type == "cuda"), torch.device("cpu"))
    if device.type == "cpu":
        return (options.gpu if options.gpu and load_target(options.gpu).is_cpu else "cpu"), device
    if options.gpu is not None:
        return options.gpu, device
    product = torch.cuda.get_device_name(device)
    name = next((t for t in target_names() if load_target(t).product == product), None)
    if name is None:
        raise NoSuchDevice(f"no target describes {product}. Name the nearest one: options={{'gpu': 'h200'}}")
    return name, device


def _groups(gm: GraphModule, left: dict[Node, str]) -> list[Group]:
    """Groups that share no node; `left` gets the nodes that are in none, where there is more to say than that."""
    out: list[Group] = []
    for found in (*find_linears(gm.graph), *find_attentions(gm.graph)):
        if isinstance(found, Group):
            out.append(found)
        else:
            left[found[0]] = found[1]
    taken = frozenset(n for g in out for n in g.nodes)
    for found in find_chains(gm.graph, taken):
        if isinstance(found, Group):
            out.append(found)
        else:
            left[found[0]] = found[1]
    return out


class _Compiled:
    """A graph ready to run. The first call checks the kernels, where that was asked for."""

    run: Call | None  # None until the kernels are checked

    def __init__(
        self,
        gm: GraphModule,
        ops: dict[Group, TorchOp],
        left: Mapping[Node, str],
        report: GraphReport,
        options: Options,
    ) -> None:
        self.gm, self.ops, self.left, self.report = gm, ops, left, report
        self.rest, self.is_to_be_checked = options.rest, options.check
        self.run = None if self.is_to_be_checked else self._made()
        self._say()

    def __call__(self, *args: torch.Tensor) -> object:
        if self.run is not None:
            return self.run(*args)
        found = check(self.gm, self.ops, args)
        for v in found:
            if v.error <= 1:
                self.report.checked[f"{v.group.op} at {v.group.outputs[0]}"] = v.error
                continue
            what = f"{v.group.op} at {v.group.outputs[0]}: off by {v.error:.3g} times what is allowed"
            log.error("wrong answer, torch computes it from now on: %s", what)
            self.report.wrong.append(what)
            del self.ops[v.group]
            self.left = {**self.left, **dict.fromkeys(v.group.nodes, "its kernel's answer was wrong")}
        self.run = self._made()
        self._say()
        return self.run(*args)

    def _made(self) -> Call:
        module = rewritten(self.gm, self.ops)
        return module if self.rest == "torch" else _by_inductor(module)

    def _say(self) -> None:
        """Writes into the report what runs where."""
        self.report.kernels = [
            KernelUse(
                g.op.key,
                op.schedules,
                op.origin,
                tuple(_name(n) for n in self.gm.graph.nodes if n in g.nodes and not _is_view(n)),
            )
            for g, op in self.ops.items()
        ]
        inside = {n for g in self.ops for n in g.nodes}
        rest = [n for n in self.gm.graph.nodes if n.op == "call_function" and n not in inside]
        self.report.n_views = sum(map(_is_view, rest))
        self.report.fallbacks = [
            Fallback(_name(n), n.name, self.left.get(n) or _reason(n)) for n in rest if not _is_view(n)
        ]


def _by_inductor(module: GraphModule) -> Call:
    """The graph compiled by Inductor, to which Emmy's operators are opaque."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with torch._guards.detect_fake_mode(inputs):
        traced = make_fx(module, decomposition_table=select_decomp_table(), _allow_non_fake_inputs=True)(*inputs)
    code = compile_fx_inner(traced, inputs)
    return lambda *args: code(list(args))


def _name(n: Node) -> str:
    if isinstance(n.target, torch._ops.OpOverload):
        return str(n.target._schema.name).replace("::", ".")
    return str(getattr(n.target, "__name__", n.target))


def _is_view(n: Node) -> bool:
    return _name(n).rpartition(".")[2] in _VIEWS


def _reason(n: Node) -> str:
    """Why an operator that nothing looked at is torch's."""
    if n.target in (aten.bmm.default, aten.baddbmm.default):
        return "products in batches are not looked for"
    if any(not isinstance(s, int) for x in (n, *n.all_input_nodes) for s in getattr(x.meta.get("val"), "shape", ())):
        return "its sizes are open: kernels are made for the first `sizes` of them that come"
    return "no op of Emmy's computes it"


# ---------------------------------------------------------------- a module at once
class CompiledModule:
    """A module whose calls run without gradients through Emmy's kernels and torch. `reports`: one a graph, oldest first."""

    def __init__(self, module: torch.nn.Module | Call, options: Options, dynamic: bool | None) -> None:
        self.reports: list[GraphReport] = []
        given = {name: getattr(options, name) for name in Options.__slots__} | {"on_report": self.reports.append}
        self._call: Call = torch.compile(module, backend=partial(backend, options=given), dynamic=dynamic)

    def __call__(self, *args: object, **named: object) -> object:
        with torch.no_grad():
            return self._call(*args, **named)

    def __str__(self) -> str:
        return "\n".join(map(str, self.reports))


def compile(
    module: torch.nn.Module | Call,
    inputs: Sequence[object] = (),
    *,
    gpu: str | None = None,
    threads: int | None = None,
    check: bool = False,
    attention: str = "tuned",
    rest: str = "torch",
    sizes: int = 16,
    home: Path | None = None,
    dynamic: bool | None = False,
) -> CompiledModule:
    """The module compiled for calls like `module(*inputs)`, which is made once; with no inputs, when it is first called.

    Options as in `Options`; dynamic as torch.compile takes it. Raises UsageError, NoSuchDevice, or what torch raises.
    """
    out = CompiledModule(module, Options(gpu, threads, check, attention, rest, sizes, home), dynamic)
    if inputs:
        out(*inputs)
    return out
