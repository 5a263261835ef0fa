"""What a compiled candidate tells of its time, as features beside those of its plan: the second stage of a prediction.

From the static facts that a row stores, as ratios: registers and shared memory against what a multiprocessor has, spills, and of
the hottest loop the mix of its instructions and the cycles to issue them. NaN = not known: a CPU's binaries tell nothing yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2, nan

import numpy as np
from numpy.typing import NDArray

from emmy.ir.target import Target

NAMES = (
    "built_registers", "built_spills", "built_stack", "built_log2_code", "built_log2_loop", "built_cycles_an_instruction",
    "built_arithmetic", "built_barriers", "built_loads_global", "built_loads_shared", "built_stores_shared",
    "built_log2_cycles_an_arithmetic", "built_smem", "built_matrix", "built_in_loop", "built_log2_instructions",
    "built_occupancy", "built_blocks",
)  # fmt: skip
_KIB = 1024.0


def built_features(static: Mapping[str, float], target: Target) -> NDArray[np.float64]:
    """float64 [len(NAMES)] of a candidate's static facts; all NaN when they do not name its registers."""
    if target.is_cpu or "registers" not in static:
        return np.full(len(NAMES), nan)

    def fact(name: str) -> float:
        return static.get(name, nan)

    loop, cycles, whole = (_positive(fact(x)) for x in ("loop_instructions", "loop_issue_cycles", "instructions"))
    arithmetic = fact("loop_mma") + fact("loop_fma")
    threads, registers, smem = (
        max(fact(x), least) for x, least in (("threads", 32.0), ("registers", 16.0), ("smem_bytes", _KIB))
    )
    together = min(
        target.regs_sm // (registers * threads),
        target.max_threads_sm // threads,
        target.smem_sm_bytes // smem,
        target.max_blocks_sm,
    )
    return np.array([
        fact("registers") / target.max_regs_thread, fact("spill_bytes") / _KIB, fact("stack_bytes") / _KIB,
        log2(_positive(fact("code_bytes")) / _KIB), log2(loop), cycles / loop,
        arithmetic / loop, fact("loop_barrier") / loop, fact("loop_load_global") / loop, fact("loop_load_shared") / loop,
        fact("loop_store_shared") / loop,
        log2(cycles / max(arithmetic, 1.0)), fact("smem_bytes") / target.smem_block_bytes, fact("sass_mma") / whole,
        loop / whole, log2(whole), together * threads / target.max_threads_sm, together,
    ])  # fmt: skip


def _positive(x: float) -> float:
    return max(x, 1.0)
