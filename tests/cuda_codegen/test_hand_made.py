"""Schedules that no search offers: each gives the right answer, or is refused with the reason."""

from __future__ import annotations

import pytest

from emmy.errors import EmmyError
from tests.cuda_codegen.emulated import Run, nothing_but_numbers

RIGHT = {
    "rings by registers, filled once a tile": (
        "matmul:16x32x32:f16",
        "k0/split(m,grid,16) k0/split(n,grid,32) k0/stage(A,ldg,1) k0/stage(B,ldg,1) k0.C/atom(mma,16,8,16)",
    ),
    "one of them by registers": (
        "matmul:16x32x32:f16",
        "k0/split(m,grid,16) k0/split(n,grid,32) k0/stage(A,ldg,1) k0/stage(B,tma,1) k0.C/atom(mma,16,8,16)",
    ),
    "shares of a cluster that are folded at once": (
        "matmul:64x32x64:f16",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,cluster,32) k0/stage(A,tma,1) k0/stage(B,tma,1) k0.C/atom(mma,16,8,16)",
    ),
    "shares of a cluster of no multiple of 16 bytes": (
        "matmul:16x32x40:f16",
        "k0/split(m,grid,16) k0/split(n,grid,32) k0/split(k,cluster,20) k0/stage(A,cp_async,1) k0/stage(B,cp_async,1) "
        "k0.C/atom(simt,8,8,4)",
    ),
    "few rows by one warp, in clusters": (
        "matmul:8x64x256:bf16:nk",
        "k0/split(m,grid,8) k0/split(n,grid,32) k0/split(k,cluster,128) k0.C/atom(direct,8,16,32)",
    ),
}
REFUSED = {
    "an instruction of warpgroups by warps": (
        "matmul:64x64x64:f16:nk",
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,32) k0/stage(A,tma,2) k0/stage(B,tma,2) k0.C/atom(wgmma,64,64,16)",
        "among warps, wgmma is made by a warpgroup",
    ),
    "an instruction of warps by warpgroups": (
        "matmul:16x64x64:f32",
        "k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,16) k0/split(n,warpgroup,32) "
        "k0/stage(A,cp_async,1) k0/stage(B,cp_async,1) k0.C/atom(simt,8,16,4)",
        "among warpgroups, simt is made by a warp",
    ),
    "rows shorter than a copy": (
        "matmul:8x1x8:bf16",
        "k0/split(m,grid,8) k0/split(k,serial,8) k0/stage(A,ldg,1) k0/stage(B,ldg,1)",
        "a row of its block has 2 bytes",
    ),
    "columns that no direct tile has": (
        "matmul:8x64x64:bf16", "k0/split(m,grid,8) k0/split(n,grid,32) k0.C/atom(direct,8,4,32)", "no shape 8x4x32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", [0, 3])
@pytest.mark.parametrize("what", RIGHT)
def test_it_is_right(what: str, order: int):
    op, schedule = RIGHT[what]
    error, stats = Run(op, "h200", schedule, (), "integer", order).error_norm()
    assert error <= 1 and nothing_but_numbers(stats)


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_the_reason(what: str):
    op, schedule, reason = REFUSED[what]
    with pytest.raises(EmmyError, match=reason):
        Run(op, "h200", schedule).error_norm()
