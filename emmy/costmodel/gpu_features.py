"""What a contraction asks of a GPU, as features: how its blocks share the device, what they move, which times that bounds.

Ratios to what the device has or the roofline takes. Called by `features` alone; knows no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2, nan, prod

from emmy.costmodel.masked import walked
from emmy.costmodel.multiprocessor import (
    LAUNCH_US,
    Residency,
    bounds,
    filled_by_clusters,
    traffic,
    wave_bytes,
)
from emmy.ir.gpu import WARP, cluster_size, computing_warps, in_turn, registers_allowed, sharers, sharing_blocks
from emmy.ir.ops.op import Work as Cost
from emmy.ir.plan import Atom, Launch, Loop, Plan, Work
from emmy.ir.program import upper
from emmy.ir.roofline import roofline_us
from emmy.ir.target import Target

_SHARING = (
    "by_tma", "by_ldg", "ahead", "stored_by_tma", "log2_raster", "log2_warps", "fill_warps", "in_turn", "dealt_registers",
    "registers_of_allowed", "blocks_together", "threads_of_limit", "log2_blocks_busy", "log2_tiles_a_worker",
    "log2_waves", "wave_idle", "log2_cluster", "cluster_idle", "log2_k_sharers", "launches_over_roof", "log2_wave_bytes",
)  # fmt: skip
# Known where two matrices come by way of slots, or straight to registers.
_MOVING = (
    "log2_load_bytes", "log2_turns", "log2_laps", "turns_under_way", "in_flight", "exchanged_of_fetched",
    "log2_asked_of_fetched", "log2_read_conflict", "log2_fill_conflict", "log2_store_conflict",
    "log2_arithmetic_over_roof", "log2_shared_over_roof", "log2_l2_over_roof", "log2_stores_over_roof",
    "log2_chain_over_roof", "log2_bound_over_roof",
)  # fmt: skip
NAMES = (*_SHARING, *_MOVING)

_EARLY = 0.5  # of what a launch adds, one that begins early: nominal
_NOTHING = 2.0**-20  # of the roofline: a time that does not matter, where there may be none


def gpu_features(
    plan: Plan, launch: Launch, work: Work, atom: Atom | None, r: Residency | None, cost: Cost, target: Target
) -> Mapping[str, float]:
    """Values of `NAMES` for the contraction that `work` makes by `atom`; all NaN where it is no such thing (r is None)."""
    if r is None or atom is None:
        return dict.fromkeys(NAMES, nan)
    roof = roofline_us(cost, target, plan.program.dtype)
    tile = launch.tile
    later_us = sum(LAUNCH_US * (_EARLY if la.early else 1.0) for la in plan.launches[1:])
    cluster = cluster_size(plan, tile.nest)
    blocks = float(prod(plan.count(tile.nest, i) for i in range(tile.n_block_loops)))
    transports = {c.transport for c in tile.channels}
    waves = blocks / r.places
    shared = tile.order.kind == "streamk"  # no wave has fewer blocks than there are places
    busy = r.places if shared else min(r.places, blocks)
    masked = walked(plan, launch, int(r.places))
    out = {
        "by_tma": float("tma" in transports),
        "by_ldg": float("ldg" in transports),
        "ahead": float(work.ahead),
        "stored_by_tma": float(any(x.space == "smem" and not tile.channel(x.value) for x in tile.placements)),
        "log2_raster": log2(tile.order.group),
        "log2_warps": log2(r.threads / WARP),
        "fill_warps": r.threads / WARP - computing_warps(plan, tile),
        "in_turn": float(in_turn(tile)),
        "dealt_registers": max((x.registers for x in tile.roles), default=0) / target.max_regs_thread,
        "registers_of_allowed": r.registers / registers_allowed(plan, launch, work, target),
        "blocks_together": float(r.blocks),
        "threads_of_limit": r.blocks * r.threads / target.max_threads_sm,
        "log2_blocks_busy": log2(busy / target.n_sms),
        "log2_tiles_a_worker": log2(blocks / min(blocks, tile.order.workers or blocks)),
        "log2_waves": log2(waves),
        "wave_idle": 0.0 if shared else 1.0 - (1.0 / masked.longest if masked else waves / ceil(waves)),
        "log2_cluster": log2(cluster),
        "cluster_idle": 1.0 - filled_by_clusters(cluster, r.blocks),
        "log2_k_sharers": log2(sharing_blocks(plan, tile) * sharers(plan, tile.nest, plan.program.stage(work.stage))),
        "launches_over_roof": later_us / roof.time_us,
        "log2_wave_bytes": log2(wave_bytes(plan, launch, work, r.places / cluster) / cost.bytes),
    }
    moved = traffic(plan, launch, work, atom, target)
    if moved is None:
        return out | dict.fromkeys(_MOVING, nan)
    compute_us = roof.compute_us * _padded(plan, tile.nest, plan.program.stage(work.stage).every)
    joined = tile.order.kind != "static" and bool(tile.roles)
    least = bounds(moved, r, target, compute_us, joined=joined, shared=shared, masked=masked)
    turns = moved.turns * (masked.share if masked else 1.0)
    out |= {
        "log2_load_bytes": log2(moved.load_bytes),
        "log2_turns": log2(turns),
        "log2_laps": log2(turns / moved.depth),
        "turns_under_way": float(moved.depth),
        # against what memory delivers in 1 us, which is about its latency
        "in_flight": busy * moved.in_flight_bytes / (target.dram_gbs * 1e3),
        "exchanged_of_fetched": moved.exchanged_bytes / moved.fetched_bytes,
        "log2_asked_of_fetched": log2(moved.asked_bytes / moved.fetched_bytes),
        "log2_read_conflict": log2(moved.reads.conflict),
        "log2_fill_conflict": log2(moved.fills.conflict),
        "log2_store_conflict": log2(moved.stores.conflict),
    }
    times = {
        "arithmetic": least.arithmetic_us,
        "shared": least.shared_us,
        "l2": least.l2_us,
        "stores": least.stores_us,
        "chain": least.chain_us,
        "bound": max(roof.time_us, least.time_us) + later_us,
    }
    return out | {f"log2_{name}_over_roof": log2(max(us / roof.time_us, _NOTHING)) for name, us in times.items()}


def _padded(plan: Plan, nest: tuple[Loop, ...], axes: tuple[str, ...]) -> float:
    """Products that whole tiles compute, for each of the problem's."""
    out = 1.0
    for a in axes:
        pieces = prod(plan.count(nest, i) for i, x in enumerate(nest) if x.axis == a)
        out *= max(1.0, pieces * plan.extent(nest, a) / upper(plan.program.dim(a)))
    return out
