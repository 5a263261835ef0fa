"""Probes of memory accesses, warp-level matrix instructions, conversions and exchange between lanes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from emmy.codegen.emulator.probe import Probe, bits16, constant, whole, words, words_in_out, zeros

if TYPE_CHECKING:
    from emmy.codegen.emulator.probe import Argument


# ---------------------------------------------------------------- memory
def memory() -> Iterator[Probe]:
    for nbytes in (2, 4, 8, 16):
        bits, kind, n = 8 * nbytes, "u16" if nbytes == 2 else "u32", max(1, nbytes // 4)
        yield Probe(
            f"global_b{bits}",
            f"""EMMY_KERNEL(32, 1) probe(const u8* in, u8* out) {{
  const int t = threadIdx.x;
  {kind} r[{n}];
  emmy_ldg_b{bits}(r, in + t * {nbytes});
  emmy_stg_b{bits}(out + t * {nbytes}, r);
  emmy_ldg_b{bits}_nc(r, in + (31 - t) * {nbytes});
  emmy_stg_b{bits}(out + (32 + t) * {nbytes}, r);
  emmy_ldg_b{bits}_if(r, in + t * {nbytes}, t % 3 == 0);
  emmy_stg_b{bits}_if(out + (64 + t) * {nbytes}, r, t % 2 == 0);
}}""",
            partial(words_in_out, 8 * nbytes, 96 * nbytes, np.uint8),
        )
        yield Probe(
            f"global_b{bits}_l1",
            f"""EMMY_KERNEL(32, 1) probe(const u8* in, u8* out) {{
  const int t = threadIdx.x;
  {kind} r[{n}];
  emmy_ldg_b{bits}_nc_l1(r, in + (t * 5 % 32) * {nbytes});
  emmy_stg_b{bits}(out + t * {nbytes}, r);
}}""",
            partial(words_in_out, 8 * nbytes, 32 * nbytes, np.uint8),
        )
        yield Probe(
            f"shared_b{bits}",
            f"""EMMY_KERNEL(32, 1) probe(const {kind}* in, {kind}* out) {{
  EMMY_SMEM(smem);
  const int t = threadIdx.x;
  {kind} r[{n}];
  emmy_ldg_b{bits}(r, in + t * {n});
  emmy_sts_b{bits}(smem + (t * 7 % 32) * {nbytes}, r);
  emmy_syncwarp();
  emmy_lds_b{bits}(r, smem + t * {nbytes});
  emmy_stg_b{bits}(out + t * {n}, r);
}}""",
            partial(words_in_out, 8 * nbytes, 32 * nbytes, np.uint8),
            smem_bytes=32 * nbytes,
        )
        if nbytes == 2:
            continue
        yield Probe(
            f"cp_async_b{bits}",
            f"""EMMY_KERNEL(32, 1) probe(const u8* in, u32* out) {{
  EMMY_SMEM(smem);
  const int t = threadIdx.x;
  emmy_cp_async_b{bits}(smem + t * {nbytes}, in + (31 - t) * {nbytes});
  emmy_cp_async_commit();
  emmy_cp_async_b{bits}_zfill(smem + (32 + t) * {nbytes}, in + t * {nbytes}, t % {nbytes // 4 + 1} * 4);
  emmy_cp_async_commit();
  emmy_cp_async_wait<1>();
  emmy_cp_async_wait<0>();
  emmy_syncthreads();
  for (int i = t; i < 64 * {n}; i += 32) {{
    u32 r[1];
    emmy_lds_b32(r, smem + 4 * i);
    emmy_stg_b32(out + i, r);
  }}
}}""",
            partial(words_in_out, 32 * n, 64 * n),
            smem_bytes=64 * nbytes,
        )
    yield Probe(
        "atomic_add",
        "EMMY_KERNEL(128, 1) probe(float* sums) { emmy_atomic_add_f32(sums + threadIdx.x % 7, (float)(int)threadIdx.x); }",
        lambda: [zeros(7, np.float32)],
        block=128,
        grid=3,
    )


# ---------------------------------------------------------------- matrices
def matrices() -> Iterator[Probe]:
    for n in (1, 2, 4):
        for trans in ("", "_trans"):
            yield Probe(
                f"ldmatrix_x{n}{trans}",
                f"""EMMY_KERNEL(32, 1) probe(const u32* in, u32* out) {{
  EMMY_SMEM(smem);
  const int t = threadIdx.x;
  u32 r[4];
  emmy_ldg_b128(r, in + t * 4);
  emmy_sts_b128(smem + t * 16, r);
  emmy_syncwarp();
  emmy_ldmatrix_x{n}{trans}(r, smem + t * 11 % 32 * 16);
  for (int i = 0; i < {n}; ++i) emmy_stg_b32(out + t * {n} + i, r + i);
}}""",
                partial(words_in_out, 128, 32 * n),
                smem_bytes=512,
            )
            yield Probe(
                f"stmatrix_x{n}{trans}",
                f"""EMMY_KERNEL(32, 1) probe(const u32* in, u32* out) {{
  EMMY_SMEM(smem);
  const int t = threadIdx.x;
  u32 r[4], zero[4] = {{0u, 0u, 0u, 0u}};
  emmy_sts_b128(smem + t * 16, zero);
  emmy_syncwarp();
  emmy_ldg_b128(r, in + t * 4);
  emmy_stmatrix_x{n}{trans}(smem + t * 11 % 32 * 16, r);
  emmy_syncwarp();
  emmy_lds_b128(r, smem + t * 16);
  emmy_stg_b128(out + t * 4, r);
}}""",
                partial(words_in_out, 128, 128),
                smem_bytes=512,
            )
    for name, dtype, sums in (("mma_f32_f16", "f16", 4), ("mma_f32_bf16", "bf16", 4), ("mma_f16_f16", "f16", 2)):
        kind, d = ("float", "__uint_as_float(r[0])") if sums == 4 else ("u32", "r[0]")
        back = "__float_as_uint(d[i])" if sums == 4 else "d[i]"
        kernel = f"""EMMY_KERNEL(32, 1) probe(const u32* in, const u32* c, u32* out) {{
  const int t = threadIdx.x;
  u32 a[4], b[2], r[1];
  {kind} d[{sums}];
  emmy_ldg_b128(a, in + t * 4);
  emmy_ldg_b64(b, in + 128 + t * 2);
  for (int i = 0; i < {sums}; ++i) {{ emmy_ldg_b32(r, c + t * {sums} + i); d[i] = {d}; }}
  emmy_{name}(d, a, b);
  for (int i = 0; i < {sums}; ++i) {{ r[0] = {back}; emmy_stg_b32(out + t * {sums} + i, r); }}
}}"""

        def exact(dtype: str = dtype, sums: int = sums) -> list[Argument]:
            c = np.arange(128, dtype=np.float32) if sums == 4 else whole(128, most=8, seed=2)
            return [whole(384, dtype, most=8), constant(c), zeros(32 * sums)]

        def rounded(dtype: str = dtype, sums: int = sums) -> list[Argument]:
            x = bits16(np.random.default_rng(5).standard_normal(384), dtype)
            out = zeros(128, np.float32 if sums == 4 else np.float16)
            return [x, constant(zeros(32 * sums)), out]

        yield Probe(name, kernel, exact)
        yield Probe(f"{name}_rounded", kernel, rounded, tolerance=1e-6 if sums == 4 else 1e-3)
    yield Probe(
        "promote_f16",
        """EMMY_KERNEL(32, 1) probe(const u32* in, float* out) {
  const int t = threadIdx.x;
  u32 part[2];
  float sum[4] = {1.f, 2.f, 3.f, 4.f};
  emmy_ldg_b64(part, in + t * 2);
  emmy_promote_f16(sum, part);
  emmy_promote_f16(sum, part);
  for (int i = 0; i < 4; ++i) { u32 r[1] = {__float_as_uint(sum[i])}; emmy_stg_b32(out + t * 4 + i, r); }
}""",
        lambda: [whole(128, most=100), zeros(128, np.float32)],
    )


_FLOATS = {4: np.float32, 2: np.float16}


# ---------------------------------------------------------------- numbers and lanes
def numbers() -> Iterator[Probe]:
    special = [0.0, -0.0, 1.0, -1.5, 65504.0, 65519.9, 65520.0, 1e30, -1e30, np.inf, -np.inf, 6e-8, 3e-8, 2.9e-8, -5e-5]

    def floats() -> list[Argument]:
        x = np.random.default_rng(1).standard_normal(128) * np.exp2(np.random.default_rng(2).integers(-20, 20, 128))
        x[: len(special)] = special
        return [constant(x.astype(np.float32)), zeros(512)]

    yield Probe(
        "conversions",
        """EMMY_KERNEL(64, 1) probe(const float* in, u32* out) {
  const int t = threadIdx.x;
  u32 x[2];
  float y[2];
  emmy_ldg_b64(x, in + t * 2);
  const float lo = __uint_as_float(x[0]), hi = __uint_as_float(x[1]);
  u32 r[8] = {emmy_pack_f16(lo, hi), emmy_pack_bf16(lo, hi), emmy_to_f16(lo), emmy_to_bf16(hi)};
  emmy_unpack_f16(y, r[0]);
  r[4] = __float_as_uint(y[0] + emmy_from_f16((u16)r[2]));
  r[5] = __float_as_uint(y[1]);
  emmy_unpack_bf16(y, r[1]);
  r[6] = __float_as_uint(y[0]);
  r[7] = __float_as_uint(y[1] + emmy_from_bf16((u16)r[3]));
  emmy_stg_b128(out + t * 8, r);
  emmy_stg_b128(out + t * 8 + 4, r + 4);
}""",
        floats,
        block=64,
    )
    for name in ("exp2", "tanh", "rsqrt", "rcp"):
        yield Probe(
            name,
            f"""EMMY_KERNEL(128, 1) probe(const float* in, float* out) {{
  u32 x[1];
  emmy_ldg_b32(x, in + threadIdx.x);
  x[0] = __float_as_uint(emmy_{name}(__uint_as_float(x[0])));
  emmy_stg_b32(out + threadIdx.x, x);
}}""",
            lambda: [constant(np.linspace(0.01, 4, 128, dtype=np.float32)), zeros(128, np.float32)],
            block=128,
            tolerance=1e-3 if name == "tanh" else 1e-6,
        )
    yield Probe(
        "shuffles",
        """EMMY_KERNEL(64, 1) probe(const u32* in, u32* out) {
  const u32 t = threadIdx.x;
  u32 x[1];
  emmy_ldg_b32(x, in + t);
  const float f = (float)(x[0] % 1000u);
  u32 r[4] = {emmy_shfl_xor_u32(x[0], 5), emmy_shfl_idx_u32(x[0], t * 3 % 32),
              __float_as_uint(emmy_shfl_xor_f32(f, 16)), __float_as_uint(emmy_shfl_idx_f32(f, 7)) + emmy_warp_index()};
  emmy_pdl_wait();
  emmy_pdl_launch();
  emmy_stg_b128(out + t * 4, r);
}""",
        partial(words_in_out, 64, 256),
        block=64,
    )
    yield Probe(  # a lane's number is 0 but in the first warp, and in one lane of the third
        "votes",
        """EMMY_KERNEL(96, 1) probe(const u32* in, u32* out) {
  const u32 t = threadIdx.x;
  u32 x[1];
  emmy_ldg_b32(x, in + t / 32);
  const float f = t < 32 || t == 77 ? 0.5f : 0.0f;
  x[0] = x[0] * 2u + (u32)emmy_any(f);
  emmy_stg_b32(out + t, x);
}""",
        partial(words_in_out, 3, 96),
        block=96,
    )
    yield Probe(
        "uniform",
        """EMMY_KERNEL(96, 1) probe(const u32* in, u32* out) {
  const u32 t = threadIdx.x;
  u32 x[1];
  emmy_ldg_b32(x, in + t / 32);
  x[0] = (u32)emmy_uniform((int)x[0]) + t;
  emmy_stg_b32(out + t, x);
}""",
        partial(words_in_out, 3, 96),
        block=96,
    )
    yield Probe(  # in each round another warp hands words on to the next, by a flag of its own
        "flags",
        """EMMY_KERNEL(64, 1) probe(const u32* in, u32* between, u32* flags, u32* out) {
  const u32 t = threadIdx.x;
  for (u32 i = 0; i < 4; ++i) {
    u32 x[1];
    emmy_assume(i < 4u);
    if (t / 32 == i % 2) {
      emmy_ldg_b32(x, in + t);
      x[0] += i;
      emmy_stg_b32(between + i * 32 + t % 32, x);
      emmy_syncwarp();
      if (t % 32 == 0) emmy_flag_raise(flags + i);
    } else {
      if (t % 32 == 0) emmy_flag_await(flags + i);
      emmy_syncwarp();
      emmy_ldg_b32(x, between + i * 32 + (t + 1) % 32);
      emmy_stg_b32(out + i * 32 + t % 32, x);
      if (t % 32 == 0 && i < 3) emmy_flag_lower(flags + i);
    }
  }
}""",
        lambda: [words(64), zeros(128), zeros(4), zeros(128)],
        block=64,
    )
    yield Probe(  # whichever warp is the last to count has what both left
        "counts",
        """EMMY_KERNEL(64, 1) probe(const u32* in, u32* between, u32* counts, u32* out) {
  EMMY_SMEM(smem);
  const u32 t = threadIdx.x, word = smem + t / 32 * 4;
  u32 x[1], y[1], before[1];
  for (u32 i = 0; i < 3; ++i) {
    emmy_ldg_b32(x, in + t);
    x[0] += i;
    emmy_stg_b32(between + i * 64 + t, x);
    emmy_syncwarp();
    if (t % 32 == 0) {
      emmy_count(before, counts + i % 2);
      emmy_sts_b32(word, before);
    }
    emmy_syncwarp();
    if (emmy_lds_word(word) == 1) {
      emmy_ldg_b32(x, between + i * 64 + t % 32);
      emmy_ldg_b32(y, between + i * 64 + 32 + t % 32);
      x[0] += y[0];
      emmy_stg_b32(out + i * 32 + t % 32, x);
      if (t % 32 == 0) emmy_flag_lower(counts + i % 2);
    }
    emmy_syncthreads();
  }
}""",
        lambda: [words(64), zeros(192), zeros(2), zeros(96)],
        block=64,
        smem_bytes=8,
    )
    yield Probe(  # whichever warp is the first to count waits for words of the other, which it may have left already
        "marks",
        """EMMY_KERNEL(64, 1) probe(const u32* in, u32* between, u32* counts, u32* out) {
  const u32 t = threadIdx.x;
  u32 x[1], y[4], z[2], before[1];
  for (u32 i = 0; i < 3; ++i) {
    before[0] = 0u;
    if (t % 32 == 0) emmy_count_begun(before, counts + i);
    before[0] = emmy_shfl_idx_u32(before[0], 0u);
    emmy_ldg_b32(x, in + t);
    x[0] += i;
    z[0] = i + 7u;
    if (before[0] == 1) {
      emmy_mark_leave(between + t % 32 * 2, x);
      emmy_mark_leave(between + t % 32 * 2 + 64, z);
    }
    if (before[0] == 0) {
      emmy_marks_await<2>(y, between + t % 32 * 2, 256);
      emmy_mark_clear(between + t % 32 * 2);
      emmy_mark_clear(between + t % 32 * 2 + 64);
      if (i == 2) {  // nobody leaves a third
        emmy_mark_leave(between + t % 32 * 2, x);
        emmy_mark_look(z, between + t % 32 * 2);
        emmy_mark_clear(between + t % 32 * 2);
      }
      x[0] += y[0] * y[1] + y[2] * y[3];
      emmy_stg_b32(out + i * 32 + t % 32, x);
      if (t % 32 == 0) emmy_flag_lower(counts + i);
    }
    emmy_syncthreads();
  }
}""",
        lambda: [words(64), zeros(128), zeros(3), zeros(96)],
        block=64,
    )
    yield Probe(  # whichever warp is the first sets words to zero, to which both add; words are 0 again when both have passed
        "sums",
        """EMMY_KERNEL(64, 1) probe(const u32* in, float* sums, u32* counts, u32* out) {
  const u32 t = threadIdx.x;
  u32 x[1], zero[1], before[1];
  zero[0] = 0u;
  for (u32 i = 0; i < 3; ++i) {
    before[0] = 0u;
    if (t % 32 == 0) before[0] = emmy_count_around(counts, 1u);
    before[0] = emmy_shfl_idx_u32(before[0], 0u);
    if (before[0] == 0) emmy_stg_b32(sums + i * 32 + t % 32, zero);
    emmy_syncwarp();
    if (before[0] == 0 && t % 32 == 0) emmy_flag_raise(counts + 1);
    if (t % 32 == 0) emmy_flag_await(counts + 1);
    emmy_syncwarp();
    if (t % 32 == 0) emmy_pass_on(counts + 1, 2u);
    x[0] = __float_as_uint((float)(in[t] % 1024u + i));
    emmy_add_f32(sums + i * 32 + t % 32, x);
    emmy_syncthreads();
  }
  if (t < 2) {
    emmy_ldg_b32(x, counts + t);
    emmy_stg_b32(out + t, x);
  }
}""",
        lambda: [words(64), np.full(96, 7.0, "<f4"), zeros(2), zeros(2)],
        block=64,
    )
    # Which lane is elected is the hardware's choice: how many are, in each warp, twice, and how many both times.
    yield Probe(
        "elect",
        """EMMY_KERNEL(96, 1) probe(u32* out) {
  const u32 t = threadIdx.x;
  const u32 once = emmy_elect(), again = emmy_elect();
  u32 r[4] = {once, again, once & again, 0u};
  for (u32 d = 16; d > 0; d /= 2)
    for (int i = 0; i < 3; ++i) r[i] += emmy_shfl_xor_u32(r[i], d);
  emmy_stg_b128(out + t * 4, r);
}""",
        lambda: [zeros(384)],
        block=96,
    )
