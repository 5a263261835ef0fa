"""Probes of barriers, clusters, bulk copies and warpgroup matrix instructions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from emmy.codegen.emulator.probe import Probe, constant, whole, words_in_out, zeros
from emmy.codegen.emulator.tensormap import TensorMap
from emmy.codegen.ptx import wgmma_name

if TYPE_CHECKING:
    from emmy.codegen.emulator.probe import Argument


# ---------------------------------------------------------------- barriers, clusters
def barriers() -> Iterator[Probe]:
    yield Probe(
        "named_barriers",
        """EMMY_KERNEL(96, 1) probe(const u32* in, u32* out) {
  EMMY_SMEM(smem);
  const int t = threadIdx.x, warp = t / 32;
  u32 r[1];
  emmy_ldg_b32(r, in + t);
  if (warp == 0) {
    emmy_sts_b32(smem + 4 * t, r);
    emmy_bar_arrive(1, 64);
  } else if (warp == 1) {
    emmy_bar_sync(1, 64);
    emmy_lds_b32(r, smem + 4 * (63 - t));
    emmy_sts_b32(smem + 4 * t, r);
    emmy_bar_sync(2, 64);
  } else {
    emmy_bar_sync(2, 64);
    emmy_lds_b32(r, smem + 4 * (t - 32));
  }
  emmy_stg_b32(out + t, r);
}""",
        partial(words_in_out, 96, 96),
        block=96,
        smem_bytes=256,
    )
    yield Probe(
        "mbarriers",
        """EMMY_KERNEL(64, 1) probe(const u32* in, u32* out) {
  EMMY_SMEM(smem);
  const int t = threadIdx.x, warp = t / 32;
  const u32 full = smem + 256, empty = full + 8;
  if (t == 0) { emmy_mbar_init(full, 32); emmy_mbar_init(empty, 1); emmy_mbar_fence_init(); }
  emmy_syncthreads();
  u32 r[1], sum = 0;
  for (int i = 0; i < 3; ++i) {
    if (warp == 0) {
      emmy_mbar_wait(empty, (i & 1) ^ 1);
      emmy_ldg_b32(r, in + i * 32 + t);
      emmy_sts_b32(smem + 4 * t, r);
      emmy_mbar_arrive(full);
    } else {
      emmy_mbar_wait(full, i & 1);
      emmy_lds_b32(r, smem + 4 * (63 - t));
      sum = sum * 3 + r[0];
      emmy_syncwarp();
      if (t == 32) emmy_mbar_arrive(empty);
    }
  }
  r[0] = sum;
  if (warp == 1) emmy_stg_b32(out + t - 32, r);
}""",
        partial(words_in_out, 96, 32),
        block=64,
        smem_bytes=272,
    )
    yield Probe(
        "registers",
        """EMMY_KERNEL(384, 1) probe(u32* out) {
  u32 r[1] = {threadIdx.x * 3u};
  if (threadIdx.x < 128) { emmy_setmaxnreg_dec<40>(); r[0] += 1u; }
  else { emmy_setmaxnreg_inc<232>(); r[0] += 2u; }
  emmy_stg_b32(out + threadIdx.x, r);
}""",
        lambda: [zeros(384)],
        block=384,
    )
    yield Probe(
        "cluster",
        """EMMY_KERNEL(32, 1) EMMY_CLUSTER(4, 1, 1) probe(const u32* in, u32* out) {
  EMMY_SMEM(smem);
  const u32 t = threadIdx.x, rank = emmy_cluster_rank(), next = (rank + 1) % 4;
  const u32 landed = smem + 2048, told = landed + 8;
  if (t == 0) { emmy_mbar_init(landed, 1); emmy_mbar_init(told, 3); emmy_mbar_fence_init(); }
  emmy_syncwarp();
  emmy_cluster_arrive_relaxed();
  emmy_cluster_wait();
  u32 r[4], x[4];
  emmy_ldg_b128(r, in + (blockIdx.x * 32 + t) * 4);
  if (t == 0) emmy_mbar_expect_tx(landed, 512);
  emmy_st_async_b128(emmy_mapa(smem + 16 * t, next), r, emmy_mapa(landed, next));
  emmy_st_cluster_b32(emmy_mapa(smem + 512 + 4 * t, next), r);
  emmy_st_cluster_b64(emmy_mapa(smem + 640 + 8 * t, next), r + 1);
  emmy_st_cluster_b128(emmy_mapa(smem + 896 + 16 * t, next), r);
  if (t < 4 && t != rank) emmy_mbar_arrive_cluster(told, t);
  emmy_mbar_wait(landed, 0);
  emmy_mbar_wait(told, 0);
  emmy_cluster_arrive();
  emmy_cluster_wait();
  u32* o = out + blockIdx.x * 512;
  emmy_lds_b128(x, smem + 16 * t);
  emmy_stg_b128(o + 4 * t, x);
  emmy_ld_cluster_b32(x, emmy_mapa(smem + 512 + 4 * t, (rank + 2) % 4));
  emmy_stg_b32(o + 128 + t, x);
  emmy_ld_cluster_b64(x, emmy_mapa(smem + 640 + 8 * t, (rank + 2) % 4));
  emmy_stg_b64(o + 160 + 2 * t, x);
  emmy_ld_cluster_b128(x, emmy_mapa(smem + 896 + 16 * t, (rank + 3) % 4));
  emmy_stg_b128(o + 224 + 4 * t, x);
  emmy_cluster_arrive();
  emmy_cluster_wait();
}""",
        partial(words_in_out, 512, 2048),
        grid=4,
        cluster=4,
        smem_bytes=2064,
    )
    yield Probe(
        "rank_loads",
        """EMMY_KERNEL(32, 1) EMMY_CLUSTER(4, 1, 1) probe(const u32* in, u32* out) {
  EMMY_SMEM(smem);
  const u32 t = threadIdx.x, rank = emmy_cluster_rank();
  u32 x[4];
  emmy_ldg_b128(x, in + (blockIdx.x * 32 + t) * 4);
  emmy_sts_b128(smem + 16 * t, x);
  emmy_cluster_arrive();
  emmy_cluster_wait();
  u32* o = out + blockIdx.x * 224;
  emmy_ld_rank_b32(x, smem + 16 * (31 - t), (rank + 1) % 4);
  emmy_stg_b32(o + t, x);
  emmy_ld_rank_b64(x, smem + 16 * t + 8, (rank + 2) % 4);
  emmy_stg_b64(o + 32 + 2 * t, x);
  emmy_ld_rank_b128(x, smem + 16 * t, t % 4);
  emmy_stg_b128(o + 96 + 4 * t, x);
  emmy_cluster_arrive();
  emmy_cluster_wait();
}""",
        partial(words_in_out, 512, 896),
        grid=4,
        cluster=4,
        smem_bytes=512,
    )


# ---------------------------------------------------------------- TMA
def tma() -> Iterator[Probe]:
    boxes = {2: (0, 16, 8), 3: (0, 16, 4, 2), 4: (0, 16, 2, 2, 2), 5: (0, 16, 2, 2, 1, 2)}
    for rank in (2, 3, 4, 5):
        for swizzle in (0, 32, 64, 128):
            width = swizzle // 2 if swizzle else 24  # elements of 2 bytes
            box = (width, *boxes[rank][2:])
            shape = (40, *(b + 1 for b in boxes[rank][2:]))
            n, hint = int(np.prod(box)), "_hint" if swizzle == 64 else ""
            policy = ", emmy_policy_evict_first() + 0 * emmy_policy_evict_last()" if hint else ""
            at = ", ".join(("8", *("1" for _ in box[1:])))
            edge = ", ".join(("32", *("-1" for _ in box[1:])))
            over = ", ".join(("32", *("1" for _ in box[1:])))  # an H200 faults at a store that begins below 0
            kernel = f"""EMMY_KERNEL(32, 1) probe(EMMY_TENSORMAP(map), EMMY_TENSORMAP(back), u32* out) {{
  EMMY_SMEM(smem);
  const int t = threadIdx.x;
  const u32 bar = smem + 16384;
  if (t == 0) {{ emmy_tma_prefetch(&map); emmy_mbar_init(bar, 1); emmy_mbar_fence_init(); }}
  emmy_syncthreads();
  if (t == 0) {{
    emmy_mbar_expect_tx(bar, {4 * n});
    emmy_tma_load_{rank}d{hint}(smem, &map, bar, {at}{policy});
    emmy_tma_load_{rank}d{hint}(smem + 8192, &map, bar, {edge}{policy});
  }}
  emmy_mbar_wait(bar, 0);
  for (int i = t; i < {n // 2}; i += 32) {{
    u32 r[1];
    emmy_lds_b32(r, smem + 4 * i);
    emmy_stg_b32(out + i, r);
    emmy_lds_b32(r, smem + 8192 + 4 * i);
    emmy_stg_b32(out + {n // 2} + i, r);
  }}
  emmy_syncthreads();
  if (t == 0) {{
    emmy_tma_store_{rank}d(&back, smem, {over});
    emmy_bulk_commit();
    emmy_bulk_wait_read<0>();
    emmy_bulk_wait<0>();
  }}
}}"""

            def make(
                shape: tuple[int, ...] = shape, box: tuple[int, ...] = box, swizzle: int = swizzle, n: int = n
            ) -> list[Argument]:
                values = constant(np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint16).reshape(shape[::-1]))
                back = np.zeros_like(values)
                return [TensorMap(values, box, swizzle), TensorMap(back, box, swizzle), zeros(n)]

            yield Probe(f"tma_{rank}d_swizzle{swizzle}", kernel, make, smem_bytes=16392)
        if rank == 2:
            yield Probe(  # a hint: boxes inside the tensor, over its edges and beyond it change nothing that is read
                "tma_prefetch_2d",
                """EMMY_KERNEL(32, 1) probe(EMMY_TENSORMAP(map), const u32* in, u32* out) {
  const int t = threadIdx.x;
  if (t == 0) {
    emmy_tma_prefetch_2d(&map, 8, 1);
    emmy_tma_prefetch_2d(&map, 32, 6);
    emmy_tma_prefetch_2d(&map, -8, -1);
    emmy_tma_prefetch_2d(&map, 48, 16);
  }
  emmy_syncwarp();
  u32 x[1];
  emmy_ldg_b32(x, in + t);
  emmy_stg_b32(out + t, x);
}""",
                _prefetched,
            )
        where = ", ".join(("(int)rank * 8", *("0" for _ in range(rank - 1))))
        for hint, policy in (("", ""), ("_hint", ", emmy_policy_evict_first()")):
            yield Probe(
                f"tma_{rank}d_multicast{hint}",
                f"""EMMY_KERNEL(32, 1) EMMY_CLUSTER(2, 1, 1) probe(EMMY_TENSORMAP(map), u32* out) {{
  EMMY_SMEM(smem);
  const u32 t = threadIdx.x, bar = smem + 2048, rank = emmy_cluster_rank();
  if (t == 0) {{ emmy_mbar_init(bar, 1); emmy_mbar_fence_init(); }}
  emmy_syncwarp();
  emmy_cluster_arrive_relaxed();
  emmy_cluster_wait();
  if (t == 0) {{
    emmy_mbar_expect_tx(bar, 512);
    emmy_tma_load_{rank}d_multicast{hint}(smem + rank * 1024, &map, bar, {where}, 3{policy});
  }}
  emmy_mbar_wait(bar, 0);
  for (int h = 0; h < 2; ++h)
    for (int i = t; i < 64; i += 32) {{
      u32 r[1];
      emmy_lds_b32(r, smem + h * 1024 + 4 * i);
      emmy_stg_b32(out + (rank * 2 + h) * 64 + i, r);
    }}
  emmy_cluster_arrive();
  emmy_cluster_wait();
}}""",
                partial(_multicast, rank),
                grid=2,
                cluster=2,
                smem_bytes=2056,
            )


def _prefetched() -> list[Argument]:
    values = constant(np.arange(40 * 9, dtype=np.uint16).reshape(9, 40))
    return [TensorMap(values, (24, 8)), values, zeros(32)]


def _multicast(rank: int) -> list[Argument]:
    box = {2: (16, 8), 3: (16, 4, 2), 4: (16, 2, 2, 2), 5: (16, 2, 2, 1, 2)}[rank]
    values = constant(np.arange(24 * 8, dtype=np.uint16).reshape((*box[:0:-1], 24)))
    return [TensorMap(values, box), zeros(256)]


# ---------------------------------------------------------------- wgmma
_FILL = """
  for (int i = t; i < 3072; i += 128) {
    u32 r[4];
    emmy_ldg_b128(r, in + 4 * i);
    emmy_sts_b128(smem + 16 * i, r);
  }
  emmy_fence_async();
  emmy_syncthreads();"""


def _wgmma_probe(
    name: str, helper_name: str, n: int, dtype: str, a: str, b: str, steps: int = 1, out: str = ""
) -> Probe:
    """Multiplies what lies in shared memory by descriptors `a` and `b`, expressions with `kk`, `steps` times."""
    registers = "_rs" in helper_name
    return Probe(
        name,
        f"""EMMY_KERNEL(128, 1) probe(const u32* in, float* out) {{
  EMMY_SMEM(smem);
  const u32 t = threadIdx.x;{_FILL}
  u32 fa[4];
  emmy_ldg_b128(fa, in + 4 * t);
  float d[{n // 2}];
  for (int i = 0; i < {n // 2}; ++i) {{ d[i] = (float)(i % 5); emmy_pin_f32(d[i]); }}
  {"emmy_pin_b32x4(fa);" if registers else "for (int i = 0; i < 4; ++i) emmy_pin_b32(fa[i]);"}
  emmy_wgmma_fence();
  for (u32 kk = 0; kk < {steps}u; ++kk)
    emmy_{helper_name}(d, {"fa" if registers else a}, {b}, {"true" if steps == 1 else "kk > 0"});
  emmy_wgmma_commit();
  emmy_wgmma_wait<0>();
  for (int i = 0; i < {n // 2}; ++i) {{
    u32 r[1] = {{__float_as_uint(d[i])}};
    emmy_stg_b32(out + i * 128 + t, r);
  }}
}}""",
        lambda: [whole(24576, dtype), zeros(64 * n, np.float32)],
        block=128,
        smem_bytes=49152,
    )


def wgmma() -> Iterator[Probe]:
    k128 = ("emmy_desc_k_sw128(smem)", "emmy_desc_k_sw128(smem + 8192)")
    for n in (8, 24, 64, 96, 128, 192, 240, 256):
        yield _wgmma_probe(f"wgmma_n{n}", wgmma_name(n, "f16", "smem"), n, "f16", *k128)
    yield _wgmma_probe("wgmma_bf16", wgmma_name(32, "bf16", "smem"), 32, "bf16", *k128)
    yield _wgmma_probe(
        "wgmma_steps", wgmma_name(64, "f16", "smem"), 64, "f16",
        "emmy_desc_step(emmy_desc_k_sw128(smem), 32 * kk)", "emmy_desc_step(emmy_desc_k_sw128(smem + 8192), 32 * kk)", 4,
    )  # fmt: skip
    yield _wgmma_probe("wgmma_rs", wgmma_name(64, "f16", "reg"), 64, "f16", *k128)
    yield _wgmma_probe("wgmma_rs_bf16", wgmma_name(40, "bf16", "reg"), 40, "bf16", *k128)
    yield _wgmma_probe(
        "wgmma_rs_mn", wgmma_name(128, "f16", "reg", b_mn=True), 128, "f16", "", "emmy_desc_mn_sw128(smem, 8192)"
    )
    for swizzle in (0, 32, 64, 128):
        k = f"emmy_desc_k_sw{swizzle}(smem{{}})" if swizzle else "emmy_desc_k(smem{}, 2048, 128)"
        mn = (
            f"emmy_desc_mn_sw{swizzle}(smem{{}}, {max(swizzle * 16, 256)})"
            if swizzle
            else "emmy_desc_mn(smem{}, 128, 512)"
        )
        other = " + 16384"
        yield _wgmma_probe(
            f"wgmma_k_sw{swizzle}", wgmma_name(64, "f16", "smem"), 64, "f16", k.format(""), k.format(other)
        )
        yield _wgmma_probe(
            f"wgmma_a_mn_sw{swizzle}",
            wgmma_name(64, "f16", "smem", a_mn=True),
            64,
            "f16",
            mn.format(""),
            k.format(other),
        )
        yield _wgmma_probe(
            f"wgmma_b_mn_sw{swizzle}",
            wgmma_name(128, "f16", "smem", b_mn=True),
            128,
            "f16",
            k.format(""),
            mn.format(other),
        )
