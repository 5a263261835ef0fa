"""Recorded spaces as samples: by their own parameters, to hold cards out; and CLBlast's GEMM by Emmy's features, as a donor.

For evaluation alone: no model that is deployed is trained on these. `emmy.search` has the same tables as search spaces.
"""

from __future__ import annotations

import hashlib
from math import ceil, log2, nan

import numpy as np

from emmy.costmodel.features import ROOF, FeatureSet, feature_set
from emmy.costmodel.fit import Samples
from emmy.errors import NoSuchDevice
from emmy.ir.ops import parse_op
from emmy.ir.roofline import roofline_us
from emmy.ir.target import Target, load_target
from emmy.workloads import recorded
from emmy.workloads.recorded import RecordedTable

_AMD = ("mi250x", "w6600")
_MOST = 2_000  # configurations of a card: all of a foreign card's count as few rows together
_N = 4096
_GEMM = f"matmul:{_N}x{_N}x{_N}:f32"  # what CLBlast's kernel computed in these tables


def device_of(name: str) -> str:
    return name.rpartition(".")[2]


def siblings_of(name: str) -> list[str]:
    """Recorded spaces of the same kernel on other cards of the same vendor."""
    kernel, _, device = name.rpartition(".")
    others = (n for n in recorded.names() if n != name and n.rpartition(".")[0] == kernel)
    return [n for n in others if (device_of(n) in _AMD) == (device in _AMD)]


def by_parameters(name: str) -> Samples:
    """The configurations of a recorded space that ran, as one problem whose features are the parameters, as log2 where positive."""
    table = recorded.load(name)
    ran = np.isfinite(table.time_ms)
    columns = table.values[ran].astype(np.float64)
    x = np.stack([np.log2(c) if c.min() > 0 else c for c in columns.T], axis=1)
    digest = hashlib.sha256("\n".join(table.parameters).encode()).hexdigest()[:16]
    keys = tuple(",".join(map(str, row)) for row in table.values[ran].tolist())
    return _samples(name, x, table.time_ms[ran] * 1000.0, keys, FeatureSet(table.parameters, digest), "")


def gemm_rows() -> tuple[tuple[str, Samples], ...]:
    """(target, samples) of each card that Emmy knows and whose GEMM was recorded, with Emmy's own features; some of many."""
    out = []
    for name in recorded.names():
        if not name.startswith("gemm."):
            continue
        try:
            target = load_target(device_of(name))
        except NoSuchDevice:
            continue
        table = recorded.load(name)
        ran = np.flatnonzero(np.isfinite(table.time_ms))
        ran = ran[:: -(-len(ran) // _MOST)]
        of_problem = _problem_features(target)
        x = np.stack([_gemm_features(table, int(i), target, of_problem) for i in ran])
        keys = tuple(",".join(map(str, table.values[i].tolist())) for i in ran)
        out.append((target.name, _samples(name, x, table.time_ms[ran] * 1000.0, keys, feature_set(), ROOF)))
    return tuple(out)


def _samples(
    name: str, x: np.ndarray, time_us: np.ndarray, keys: tuple[str, ...], features: FeatureSet, offset: str
) -> Samples:
    zeros = np.zeros(len(x), dtype=np.int64)
    ids = tuple(f"{name} {key}" for key in keys)
    return Samples(x, time_us, zeros, (name,), zeros, (name,), keys, ids, features, offset)


def _problem_features(target: Target) -> dict[str, float]:
    op = parse_op(_GEMM)
    work, roof = op.work(), roofline_us(op.work(), target, "f32")
    zeros = ("is_fma", "is_dot", "is_mma", "is_hybrid", "is_f16", "is_wgmma", "is_direct", "is_swapped", "b_along_k")
    none = ("workspace_share", "waste_m", "waste_n", "waste_k")
    ones = ("n_stages", "threads", "n_launches", "n_works", "is_simt")
    return {
        **dict.fromkeys((*zeros, *none), 0.0), **dict.fromkeys(ones, 1.0),
        "log2_m": log2(_N), "log2_n": log2(_N), "log2_k": log2(_N), "log2_block_k": log2(_N), "element_bytes": 4.0,
        "log2_flops": log2(work.flops), "log2_intensity": log2(work.intensity), ROOF: log2(roof.time_us),
        "log2_compute_over_dram": log2(roof.compute_us / roof.dram_us),
    }  # fmt: skip


def _gemm_features(table: RecordedTable, row: int, target: Target, of_problem: dict[str, float]) -> np.ndarray:
    """One configuration of CLBlast's GEMM as a plan would be described; what has no counterpart is NaN, as elsewhere.

    Parameters: Nugteren, "CLBlast: A Tuned OpenCL BLAS Library" (2018): a work-group makes MWG x NWG with MDIMC x NDIMC threads,
    KWG of the folded axis at a time, through local memory where SA, SB say so.
    """
    p = dict(zip(table.parameters, table.values[row].tolist(), strict=True))
    flops = 2.0 * _N**3
    blocks = (_N // p["MWG"]) * (_N // p["NWG"])
    per_unit = blocks / target.n_sms
    atom_m, atom_n = p["MWG"] // p["MDIMC"], p["NWG"] // p["NDIMC"]
    held = 4.0 * p["KWG"] * (p["SA"] * p["MWG"] + p["SB"] * p["NWG"])
    tile = 4.0 * (p["KWG"] * (p["MWG"] + p["NWG"]) + p["MWG"] * p["NWG"])
    moved = 4.0 * blocks * _N * (p["MWG"] + p["NWG"])
    known = of_problem | {
        "log2_blocks": log2(blocks), "blocks_per_unit": per_unit, "tail_idle": 1.0 - per_unit / ceil(per_unit),
        "log2_block_m": log2(p["MWG"]), "log2_block_n": log2(p["NWG"]),
        "log2_tile_m": log2(p["MWG"]), "log2_tile_n": log2(p["NWG"]), "log2_tile_k": log2(p["KWG"]),
        "tile_of_near": log2(tile / target.smem_block_bytes), "intensity_near": log2(flops / moved),
        "atom_m": float(atom_m), "atom_n": float(atom_n), "sums": float(atom_m * atom_n),
        "loads_per_fma": (atom_m + atom_n) / (atom_m * atom_n), "unroll": float(p["KWI"]),
        "log2_steps": log2(p["KWG"] / p["KWI"]), "a_staged": float(p["SA"]), "b_staged": float(p["SB"]),
        "depth": float(bool(p["SA"] or p["SB"])), "log2_staged_per_flop": log2(moved / flops),
        "staged_of_tile_memory": held / target.tile_bytes, "log2_warps": log2(p["MDIMC"] * p["NDIMC"] / 32),
    }  # fmt: skip
    return np.array([known.get(name, nan) for name in feature_set().names], dtype=np.float64)
