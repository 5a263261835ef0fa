"""A plan on a target as numbers for the cost model, before anything is compiled. Computed from the IR, never stored.

Most are ratios (a tile's share of a cache, work an element, iterations against registers), because ratios carry over to
other shapes and devices where raw figures only name the device. Logarithms are base 2. NaN = does not apply.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, log2, nan, prod

import numpy as np
from numpy.typing import NDArray

from emmy.costmodel import gpu_features
from emmy.costmodel.multiprocessor import Residency, box_bytes, handed_bytes, residency
from emmy.costmodel.traffic import LoopNest, Operand, set_share, steps
from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Read, factors
from emmy.ir.ops.op import Op
from emmy.ir.ops.op import Work as Cost
from emmy.ir.plan import BLOCK_LEVELS, Atom, Channel, Launch, Plan, Work
from emmy.ir.program import swapped, upper
from emmy.ir.roofline import roofline_us
from emmy.ir.target import Target

# Raise it whenever a feature's meaning changes under the same name; a test holds the values of known plans.
VERSION = 6

ROOF = "log2_roof_us"
NAMES: tuple[str, ...] = (
    # the problem
    "log2_m", "log2_n", "log2_k", "log2_flops", "log2_intensity", ROOF, "log2_compute_over_dram", "element_bytes",
    "b_along_k", "n_stages", "threads",
    # launches and blocks
    "n_launches", "n_works", "workspace_share", "log2_blocks", "blocks_per_unit", "tail_idle", "log2_block_m",
    "log2_block_n", "log2_block_k",
    # loops in time
    "n_serial", "order_code", "k_depth", "log2_tile_m", "log2_tile_n", "log2_tile_k",
    # shares of the caches
    "tile_of_near", "tile_of_mid", "block_of_mid", "block_of_far", "a_tile_of_near", "b_tile_of_near", "b_tile_of_mid",
    "a_sliver_of_near", "b_sliver_of_near", "b_sliver_of_mid",
    # flops a byte that passes a cache
    "intensity_near", "intensity_mid", "intensity_far", "sums_moved",
    # the innermost tile
    "is_fma", "is_dot", "is_mma", "is_hybrid", "is_f16", "is_simt", "is_wgmma", "is_direct", "is_swapped", "atom_m", "atom_n",
    "vector_share", "sums", "registers_of_limit", "loads_per_fma", "unroll", "log2_steps",
    # padding
    "waste_m", "waste_n", "waste_k",
    # staging
    "a_staged", "b_staged", "depth", "log2_staged_per_flop", "a_repeats", "b_repeats", "staged_of_tile_memory",
    "a_stride_zeros", "b_stride_zeros",
    *gpu_features.NAMES,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """Names in column order, and a digest that differs whenever a model trained on others must not be used."""

    names: tuple[str, ...]
    digest: str


@cache
def feature_set() -> FeatureSet:
    """The features this Emmy computes."""
    digest = hashlib.sha256("\n".join((str(VERSION), *NAMES)).encode()).hexdigest()[:16]
    return FeatureSet(NAMES, digest)


def feature_names() -> tuple[str, ...]:
    """Column names of `features`."""
    return NAMES


def features(op: Op, plan: Plan, target: Target, threads: int = 1) -> NDArray[np.float64]:
    """float64 [n_features] of a plan that `threads` cores of a CPU run; columns follow `feature_names`."""
    launch, work = dominant_work(plan)
    view = _View(op, plan, target, threads, launch, work)
    groups = (_problem, _blocks, _loops, _caches, _atom, _padding, _staging, _multiprocessors)
    values = {name: value for group in groups for name, value in group(view).items()}
    return np.array([values[name] for name in NAMES], dtype=np.float64)


def dominant_work(plan: Plan) -> tuple[Launch, Work]:
    """The work with the most iterations, the first of equals: the contraction, where there is one."""
    best: tuple[float, Launch, Work] | None = None
    for launch in plan.launches:
        for work in launch.tile.works:
            stage = plan.program.stage(work.stage)
            axes = stage.axes if work.combine else stage.every
            size = float(prod(upper(plan.program.dim(a)) for a in axes))
            if best is None or size > best[0]:
                best = (size, launch, work)
    assert best is not None, "a plan has a work"
    return best[1], best[2]


@lru_cache(256)
def _cost_of(op: Op) -> Cost:
    return op.work()


class _View:
    """One plan as the feature groups need it: the dominant work's axes by role, its operands and its loops."""

    def __init__(self, op: Op, plan: Plan, target: Target, threads: int, launch: Launch, work: Work) -> None:
        self.plan, self.target, self.threads, self.cost = plan, target, threads, _cost_of(op)
        self.launch, self.tile, self.work = launch, launch.tile, work
        self.stage = plan.program.stage(work.stage)
        self.nest = LoopNest(plan, launch.tile, work)
        own = self.stage.axes
        self.role: dict[str, str] = {}  # "m", "n", "k" -> axis
        if own:
            self.role["n"] = own[-1]
        if len(own) > 1:
            self.role["m"] = own[-2]
        if self.stage.folded and not work.combine:
            self.role["k"] = self.stage.folded[-1]
        named = {o.name: o for o in self.nest.operands}
        reads = [named[f.value] for f in factors(self.stage.body) if isinstance(f, Read)]
        reads = reads or list(self.nest.operands[:-1])
        self.swapped = swapped(self.stage)
        if self.swapped:  # a and b are the operands of rows and of columns, whichever is the instruction's first
            reads.reverse()
        self.a: Operand | None = reads[0] if reads else None
        self.b: Operand | None = reads[1] if len(reads) > 1 else None
        self.tile_depth = sum(x.axis in self.nest.axes for x in self.tile.nest)
        self.block_depth = sum(x.axis in self.nest.axes for x in self.tile.nest[: self.tile.n_block_loops])
        self.residency: Residency | None = None
        self.atom = next((a for a in work.atoms if a.stage == work.stage), work.atoms[0] if work.atoms else None)
        cpu = target.is_cpu
        if not cpu and self.atom is not None and self.atom.stage == work.stage and "k" in self.role:
            self.residency = residency(plan, launch, work, self.atom, target)
        # near: what feeds the arithmetic; mid: one agent's share of the next level; far: of the last one.
        self.near = float(target.l1d_bytes if cpu else target.smem_block_bytes)
        self.mid = float(target.l2_bytes if cpu else target.l2_bytes / max(target.n_sms, 1))
        self.far = float(target.l3_bytes / self.threads if cpu else target.l2_bytes)

    def step(self, atom: Atom, role: str) -> int:
        """What the atom takes of the axis of a role at once."""
        turned = {"m": "n", "n": "m"}.get(role, role) if self.swapped else role
        return {"m": atom.m, "n": atom.n, "k": atom.k}[turned]

    def extent(self, depth: int, role: str) -> int:
        return self.nest.extent(depth, self.role[role]) if role in self.role else 1


def _log(x: float) -> float:
    return log2(x) if x > 0 else nan


def _problem(v: _View) -> Mapping[str, float]:
    work, program = v.cost, v.plan.program
    dtype = program.dtype
    roof = roofline_us(work, v.target, dtype, v.threads)
    b_axes = v.b.axes if v.b else ()
    return {
        "log2_m": _log(v.extent(0, "m")),
        "log2_n": _log(v.extent(0, "n")),
        "log2_k": _log(v.extent(0, "k")),
        "log2_flops": _log(work.flops),
        "log2_intensity": _log(work.intensity),
        ROOF: _log(roof.time_us),
        "log2_compute_over_dram": _log(roof.compute_us / roof.dram_us),
        "element_bytes": float(size_bytes(dtype)),
        "b_along_k": float(bool(b_axes) and b_axes[-1] == v.role.get("k")),
        "n_stages": float(len(program.stages)),
        "threads": float(v.threads),
    }


def _blocks(v: _View) -> Mapping[str, float]:
    blocks = prod(v.plan.count(v.tile.nest, i) for i in range(v.tile.n_block_loops))
    units = v.threads if v.target.is_cpu else max(v.target.n_sms, 1)
    if v.tile.order.kind != "static" and v.tile.order.workers:
        units = min(units, v.tile.order.workers)
    waves = ceil(blocks / units)
    state = sum(
        4.0 * (1 + w.marked) * w.parts * prod(upper(v.plan.program.dim(a)) for a in v.plan.program.stage(w.value).axes)
        for w in v.plan.workspaces
    ) + sum(handed_bytes(v.plan, la) for la in v.plan.launches)
    shared = v.tile.order.kind == "streamk"
    return {
        "n_launches": float(len(v.plan.launches)),
        "n_works": float(len(v.tile.works)),
        "workspace_share": state / v.cost.bytes,
        "log2_blocks": _log(blocks),
        "blocks_per_unit": blocks / units,
        "tail_idle": 0.0 if shared else 1.0 - blocks / (waves * units),
        "log2_block_m": _log(v.extent(v.block_depth, "m")),
        "log2_block_n": _log(v.extent(v.block_depth, "n")),
        "log2_block_k": _log(v.extent(v.block_depth, "k")),
    }


def _loops(v: _View) -> Mapping[str, float]:
    """`order_code` reads as digits, outermost first: 1 m, 2 n, 3 k, 4 another axis."""
    digit = {axis: {"m": 1, "n": 2, "k": 3}[role] for role, axis in v.role.items()}
    serial = [digit.get(x.axis, 4) for x in v.tile.nest if x.level not in BLOCK_LEVELS]
    code = 0
    for d in serial[:6]:
        code = code * 5 + d
    return {
        "n_serial": float(len(serial)),
        "order_code": float(code),
        "k_depth": float(serial.index(3)) if 3 in serial else nan,
        "log2_tile_m": _log(v.extent(v.tile_depth, "m")),
        "log2_tile_n": _log(v.extent(v.tile_depth, "n")),
        "log2_tile_k": _log(v.extent(v.tile_depth, "k")),
    }


def _caches(v: _View) -> Mapping[str, float]:
    tile, block = v.nest.footprint(v.tile_depth), v.nest.footprint(v.block_depth)
    a = v.nest.block_bytes(v.a, v.tile_depth) if v.a else nan
    b = v.nest.block_bytes(v.b, v.tile_depth) if v.b else nan
    out = {
        "tile_of_near": _log(tile / v.near),
        "tile_of_mid": _log(tile / v.mid),
        "block_of_mid": _log(block / v.mid),
        "block_of_far": _log(block / v.far),
        "a_tile_of_near": _log(a / v.near),
        "b_tile_of_near": _log(b / v.near),
        "b_tile_of_mid": _log(b / v.mid),
        "a_sliver_of_near": _log(_sliver_share(v, v.a, v.near)) if v.a else nan,
        "b_sliver_of_near": _log(_sliver_share(v, v.b, v.near)) if v.b else nan,
        "b_sliver_of_mid": _log(_sliver_share(v, v.b, v.mid)) if v.b else nan,
    }
    for name, size in (("near", v.near), ("mid", v.mid), ("far", v.far)):
        out[f"intensity_{name}"] = _log(v.cost.flops / sum(v.nest.moved_bytes(size)))
    out["sums_moved"] = _log(v.nest.moved_bytes(v.near)[-1] / v.nest.blocks[0][-1])
    return out


def _sliver_share(v: _View, operand: Operand, cache_bytes: float) -> float:
    """The share of a cache that the operand's part of one innermost tile needs, all of the tile's k long."""
    if v.atom is None:
        return nan
    size = {"m": v.step(v.atom, "m"), "n": v.step(v.atom, "n"), "k": v.extent(v.tile_depth, "k")}
    of_axis = {axis: size[role] for role, axis in v.role.items()}
    extents = [of_axis.get(axis, 1) for axis in operand.axes]
    rows, row_bytes = prod(extents[:-1]), float(extents[-1] * operand.element_bytes)
    if v.tile.channel(operand.name) or not v.target.is_cpu:
        return rows * row_bytes / cache_bytes  # a copy lies dense
    stride = operand.element_bytes * upper(v.plan.program.dim(operand.axes[-1]))
    return set_share(rows, row_bytes, stride, cache_bytes)


def _atom(v: _View) -> Mapping[str, float]:
    atom, kinds = v.atom, ("fma", "dot", "mma", "hybrid", "f16", "simt", "wgmma", "direct")
    kind_of = atom.name.removesuffix("_rs") if atom else ""  # a model sees what is read from where in the traffic
    flags = {f"is_{kind}": float(kind_of == kind) for kind in kinds}
    flags["is_swapped"] = float(v.swapped)
    if atom is None:
        rest = (
            "atom_m",
            "atom_n",
            "vector_share",
            "sums",
            "registers_of_limit",
            "loads_per_fma",
            "unroll",
            "log2_steps",
        )
        return flags | dict.fromkeys(rest, nan)
    lanes = v.target.vector_bits // 32
    inner = atom.name == "dot"  # its vectors run along k: one vector of partial sums an element
    vectors = atom.m * atom.n if inner else atom.m * atom.n / atom.width
    rows, columns = float(atom.m), float(atom.n if inner else atom.n / atom.width)
    used, registers = vectors, v.target.vector_registers
    if v.residency is not None:
        used, registers = float(v.residency.registers), v.target.max_regs_thread
    k_left = v.nest.extent(v.tile_depth, v.role["k"]) if "k" in v.role else 1
    return flags | {
        "atom_m": float(atom.m),
        "atom_n": float(atom.n),
        "vector_share": atom.width / lanes if lanes else nan,
        "sums": float(vectors),
        "registers_of_limit": used / registers if registers else nan,
        "loads_per_fma": (rows + columns * _loads_a_vector(v, atom)) / (rows * columns),
        "unroll": float(v.work.unroll),
        "log2_steps": _log(k_left / (atom.k * v.work.unroll)),
    }


def _loads_a_vector(v: _View, atom: Atom) -> int:
    """How many loads bring one vector of B: one, or one a lane where its elements are not neighbours in memory."""
    if atom.name != "fma" or v.b is None or v.tile.channel(v.b.name):
        return 1
    return 1 if v.b.axes[-1] == v.role["n"] else atom.width


def _padding(v: _View) -> Mapping[str, float]:
    """How much more than the problem the innermost tiles compute, per axis, as a fraction."""
    out: dict[str, float] = {}
    for role in ("m", "n", "k"):
        axis = v.role.get(role)
        pieces = tuple(x.step for x in v.nest.loops if x.axis == axis)
        if axis is None or v.atom is None:
            out[f"waste_{role}"] = nan
            continue
        size = v.step(v.atom, role)
        extent = v.nest.extent(0, axis)
        pieces = (*pieces[:-1], size) if pieces else (size,)
        out[f"waste_{role}"] = steps(extent, pieces) * size / extent - 1.0
    return out


def _staging(v: _View) -> Mapping[str, float]:
    channels = {c.value: c for c in v.tile.channels}
    held = sum(c.depth * v.plan.slot_bytes(v.tile, c) for c in v.tile.channels)
    if v.residency is not None:
        held = v.residency.smem_bytes
    copied = {c.value: _copied_bytes(v, c) for c in v.tile.channels}
    if v.atom is not None and v.atom.name == "direct":  # lanes bring what a copy would
        copied |= {x.name: _loaded_bytes(v, x) for x in (v.a, v.b) if x}
    out = {
        "depth": float(max((c.depth for c in v.tile.channels), default=0)),
        "log2_staged_per_flop": _log(sum(copied.values()) / v.cost.flops),
        "staged_of_tile_memory": held / v.target.tile_bytes,
    }
    for name, operand in (("a", v.a), ("b", v.b)):
        staged = operand is not None and operand.name in channels
        whole = v.nest.block_bytes(operand, 0) if operand else nan
        out[f"{name}_staged"] = float(staged)
        out[f"{name}_repeats"] = _log(copied[operand.name] / whole) if operand and operand.name in copied else nan
        out[f"{name}_stride_zeros"] = _stride_zeros(v, operand) if operand and not staged else nan
    return out


def _copied_bytes(v: _View, c: Channel) -> float:
    """Bytes that all fills of a channel copy."""
    fills = prod(v.plan.count(v.tile.nest, i) for i in range(c.at + 1))
    return float(fills * (v.plan.slot_bytes(v.tile, c) if v.target.is_cpu else box_bytes(v.plan, v.launch, c)))


def _loaded_bytes(v: _View, operand: Operand) -> float:
    """Bytes of an operand that warps load, each what it needs itself."""
    walks = prod(v.plan.count(v.tile.nest, i) for i, x in enumerate(v.tile.nest) if x.axis not in operand.axes)
    return walks * v.nest.block_bytes(operand, 0)


def _stride_zeros(v: _View, operand: Operand) -> float:
    """Trailing zero bits of the byte distance between rows, up to a page: long strides of a power of two share cache sets."""
    if len(operand.axes) < 2:
        return nan
    stride = operand.element_bytes * upper(v.plan.program.dim(operand.axes[-1]))
    return float(min((stride & -stride).bit_length() - 1, 12))


def _multiprocessors(v: _View) -> Mapping[str, float]:
    return gpu_features.gpu_features(v.plan, v.launch, v.work, v.atom, v.residency, v.cost, v.target)
