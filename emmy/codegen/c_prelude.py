"""The C helpers that printed kernels call: conversions, vectors, functions on them. Fixed text; knows no kernel.

Written with GCC's vector extensions, so the same text serves AVX-512, AVX2, NEON and plain C; only loads and stores of
part of a vector name instructions, and only where the compiler says it has them. No function drops a NaN.
"""

from __future__ import annotations

SCALARS = """\
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline int64_t imin(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t imax(int64_t a, int64_t b) { return a > b ? a : b; }

static inline float as_float(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
static inline uint32_t as_bits(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
static inline float bf16_to_f32(uint16_t x) { return as_float((uint32_t)x << 16); }
static inline uint16_t f32_to_bf16(float x) {  /* to nearest, ties to even */
  uint32_t u = as_bits(x);
  return x != x ? (uint16_t)(u >> 16 | 0x40) : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline float f16_to_f32(uint16_t x) {  /* 2^112 moves the exponent, and makes subnormals normal */
  uint32_t u = as_bits(as_float((uint32_t)(x & 0x7fff) << 13) * 0x1p112f);
  return as_float(u | (u >= 0x47800000 ? 0x7f800000 : 0) | (uint32_t)(x & 0x8000) << 16);
}
static inline uint16_t f32_to_f16(float x) {  /* to nearest, ties to even */
  uint32_t u = as_bits(x) & 0x7fffffff, sign = as_bits(x) >> 16 & 0x8000, small, normal;
  small = as_bits(as_float(u) + 0.5f) - 0x3f000000;  /* below 2^-14: the sum rounds at 2^-24 */
  normal = (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13;
  return sign | (u > 0x7f800000 ? 0x7e00 : u < 0x38800000 ? small : u < 0x477ff000 ? normal : 0x7c00);
}

static inline float maximum_f32(float a, float b) { return a > b || a != a ? a : b; }
static inline float minimum_f32(float a, float b) { return a < b || a != a ? a : b; }
static inline float where_f32(float c, float a, float b) { return c != 0 ? a : b; }
static inline float le_f32(float a, float b) { return a <= b ? 1.0f : 0.0f; }
static inline float lt_f32(float a, float b) { return a < b ? 1.0f : 0.0f; }
static inline float exp_f32(float x) { return expf(x); }
static inline float tanh_f32(float x) { return tanhf(x); }
static inline float sqrt_f32(float x) { return sqrtf(x); }
static inline float rsqrt_f32(float x) { return 1.0f / sqrtf(x); }
static inline float silu_f32(float x) { return x / (1.0f + expf(-x)); }
/* x / 2 (1 + tanh u) = x / (1 + exp -2u) */
static inline float gelu_tanh_f32(float x) { return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x))); }
static inline float ramp_f32(int64_t start) { return (float)start; }
"""

_VECTOR = """
typedef float @F __attribute__((vector_size(@B), aligned(4), may_alias));
typedef int32_t @I __attribute__((vector_size(@B), aligned(4), may_alias));
typedef uint32_t @U __attribute__((vector_size(@B), aligned(4), may_alias));
typedef uint16_t @H __attribute__((vector_size(@B / 2), aligned(2), may_alias));

static inline @F splat_@F(float x) { return (@F){@X}; }
static inline @F ramp_@F(int64_t start) { return splat_@F((float)start) + (@F){@N}; }
static inline @F select_@F(@I mask, @F a, @F b) { return (@F)(((@I)a & mask) | ((@I)b & ~mask)); }
static inline float lane_sum_@F(@F x) {
  float y[@L];
  memcpy(y, &x, sizeof y);
  for (int n = @L / 2; n; n /= 2) for (int i = 0; i < n; ++i) y[i] += y[i + n];
  return y[0];
}

static inline @F load_f32x@L(const float *p) { return *(const @F *)p; }
static inline void store_f32x@L(float *p, @F x) { *(@F *)p = x; }
#if @L == 16 && defined(__AVX512F__) && !defined(__clang__)
typedef float full_@F __attribute__((vector_size(64)));
static inline @F load_some_f32x@L(const float *p, int64_t n) {
  return __builtin_ia32_loadups512_mask(p, (full_@F){0}, (uint16_t)((1u << n) - 1));
}
static inline void store_some_f32x@L(float *p, @F x, int64_t n) {
  __builtin_ia32_storeups512_mask(p, (full_@F)x, (uint16_t)((1u << n) - 1));
}
#elif @L == 8 && defined(__AVX2__) && !defined(__clang__)
typedef float full_@F __attribute__((vector_size(32)));
typedef int32_t full_@I __attribute__((vector_size(32)));
static inline @I some_@I(int64_t n) { return (@I){@N} < (int32_t)n; }
static inline @F load_some_f32x@L(const float *p, int64_t n) {
  return __builtin_ia32_maskloadps256((const full_@F *)p, (full_@I)some_@I(n));
}
static inline void store_some_f32x@L(float *p, @F x, int64_t n) {
  __builtin_ia32_maskstoreps256((full_@F *)p, (full_@I)some_@I(n), (full_@F)x);
}
#else
static inline @F load_some_f32x@L(const float *p, int64_t n) {
  float y[@L] = {0};
  for (int64_t i = 0; i < n; ++i) y[i] = p[i];
  return load_f32x@L(y);
}
static inline void store_some_f32x@L(float *p, @F x, int64_t n) {
  float y[@L];
  store_f32x@L(y, x);
  for (int64_t i = 0; i < n; ++i) p[i] = y[i];
}
#endif

static inline @F bf16_to_@F(@H x) { return (@F)(__builtin_convertvector(x, @U) << 16); }
static inline @H @F_to_bf16(@F x) {
  @U u = (@U)x, r = (u + 0x7fff + (u >> 16 & 1)) >> 16, nan = u >> 16 | 0x40, m = (@U)(x != x);
  return __builtin_convertvector((r & ~m) | (nan & m), @H);
}
static inline @F f16_to_@F(@H x) {
  @U h = __builtin_convertvector(x, @U), u = (@U)((@F)((h & 0x7fff) << 13) * 0x1p112f);
  return (@F)(u | ((@U)(u >= 0x47800000) & 0x7f800000) | (h & 0x8000) << 16);
}
static inline @H @F_to_f16(@F x) {
  @U u = (@U)x & 0x7fffffff, sign = (@U)x >> 16 & 0x8000, small = (@U)((@F)u + 0.5f) - 0x3f000000;
  @U normal = (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13, is_small = (@U)(u < 0x38800000), is_huge = (@U)(u >= 0x477ff000);
  @U y = (small & is_small) | (normal & ~is_small);
  y = (y & ~is_huge) | (((@U)(u > 0x7f800000) & 0x200) | 0x7c00) & is_huge;
  return __builtin_convertvector(y | sign, @H);
}
static inline @F load_bf16x@L(const uint16_t *p) { return bf16_to_@F(*(const @H *)p); }
static inline @F load_f16x@L(const uint16_t *p) { return f16_to_@F(*(const @H *)p); }
static inline void store_bf16x@L(uint16_t *p, @F x) { *(@H *)p = @F_to_bf16(x); }
static inline void store_f16x@L(uint16_t *p, @F x) { *(@H *)p = @F_to_f16(x); }
static inline @H some_@H(const uint16_t *p, int64_t n) {
  uint16_t y[@L] = {0};
  for (int64_t i = 0; i < n; ++i) y[i] = p[i];
  return *(const @H *)y;
}
static inline @F load_some_bf16x@L(const uint16_t *p, int64_t n) { return bf16_to_@F(some_@H(p, n)); }
static inline @F load_some_f16x@L(const uint16_t *p, int64_t n) { return f16_to_@F(some_@H(p, n)); }
static inline void put_some_@H(uint16_t *p, @H x, int64_t n) { for (int64_t i = 0; i < n; ++i) p[i] = x[i]; }
static inline void store_some_bf16x@L(uint16_t *p, @F x, int64_t n) { put_some_@H(p, @F_to_bf16(x), n); }
static inline void store_some_f16x@L(uint16_t *p, @F x, int64_t n) { put_some_@H(p, @F_to_f16(x), n); }
static inline @F gather_f32x@L(const float *p, int64_t stride, int64_t n) {
  float y[@L] = {0};
  for (int64_t i = 0; i < n; ++i) y[i] = p[i * stride];
  return load_f32x@L(y);
}
static inline @F gather_bf16x@L(const uint16_t *p, int64_t stride, int64_t n) {
  float y[@L] = {0};
  for (int64_t i = 0; i < n; ++i) y[i] = bf16_to_f32(p[i * stride]);
  return load_f32x@L(y);
}
static inline @F gather_f16x@L(const uint16_t *p, int64_t stride, int64_t n) {
  float y[@L] = {0};
  for (int64_t i = 0; i < n; ++i) y[i] = f16_to_f32(p[i * stride]);
  return load_f32x@L(y);
}

static inline @F maximum_@F(@F a, @F b) { return select_@F((a > b) | (a != a), a, b); }
static inline @F minimum_@F(@F a, @F b) { return select_@F((a < b) | (a != a), a, b); }
static inline @F where_@F(@F c, @F a, @F b) { return select_@F(c != 0, a, b); }
static inline @F le_@F(@F a, @F b) { return select_@F(a <= b, splat_@F(1), splat_@F(0)); }
static inline @F lt_@F(@F a, @F b) { return select_@F(a < b, splat_@F(1), splat_@F(0)); }
static inline @F sqrt_@F(@F x) { for (int i = 0; i < @L; ++i) x[i] = sqrtf(x[i]); return x; }
static inline @F rsqrt_@F(@F x) { return 1.0f / sqrt_@F(x); }
/* exp(x) = 2^n exp(r), |r| <= ln 2 / 2; the polynomial is a least-squares fit of relative error 2^-28. 2^n in two steps,
   so that results near both ends of the range come out right. */
static inline @F exp_@F(@F x) {
  x = select_@F(x > 89.0f, splat_@F(89.0f), select_@F(x < -104.0f, splat_@F(-104.0f), x));
  @F t = x * 1.44269504f + 12582912.0f, n = t - 12582912.0f;
  @F r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  @F p = 0.00138146128f * r + 0.00836871006f;
  p = p * r + 0.0416683890f;
  p = p * r + 0.166665211f;
  p = p * r + 0.499999940f;
  p = p * r * r + r + 1.0f;
  @I e = (@I)t - 0x4b400000, half = e >> 1;
  return p * (@F)((half + 127) << 23) * (@F)((e - half + 127) << 23);
}
/* odd polynomial (fit, relative error 2^-27) where 1 - 2 / (exp 2x + 1) would cancel */
static inline @F tanh_@F(@F x) {
  @F z = x * x, p = -0.00570497848f * z + 0.0206390806f;
  p = p * z - 0.0537397116f;
  p = p * z + 0.133314416f;
  p = p * z - 0.333332807f;
  return select_@F(z < 0.390625f, x + x * z * p, 1.0f - 2.0f / (exp_@F(2.0f * x) + 1.0f));
}
static inline @F silu_@F(@F x) { return x / (1.0f + exp_@F(-x)); }
static inline @F gelu_tanh_@F(@F x) { return x / (1.0f + exp_@F(-1.5957691216f * (x + 0.044715f * x * x * x))); }
"""

_TRANSPOSE = """
static inline void transpose_@Tx@L(float *to, int64_t to_pitch, const @C *of, int64_t of_pitch) {
  @F @R;
@S
@W
}
"""


def vectors(lanes: int) -> str:
    """The helpers for vectors of `lanes`."""
    text = _VECTOR.replace("@X", ", ".join(["x"] * lanes)).replace("@N", ", ".join(str(i) for i in range(lanes)))
    text = text.replace("@F", f"f32x{lanes}").replace("@I", f"i32x{lanes}").replace("@U", f"u32x{lanes}")
    return text.replace("@H", f"u16x{lanes}").replace("@B", str(4 * lanes)).replace("@L", str(lanes))


def largest(lanes: int) -> str:
    """The helper that finds the largest lane of a vector; a NaN is the largest."""
    return f"""\
static inline float lane_max_f32x{lanes}(f32x{lanes} x) {{
  float y[{lanes}];
  memcpy(y, &x, sizeof y);
  for (int n = {lanes} / 2; n; n /= 2) for (int i = 0; i < n; ++i) y[i] = maximum_f32(y[i], y[i + n]);
  return y[0];
}}
"""


def transpose(lanes: int, dtype: str) -> str:
    """The helper that copies a square block transposed: exchanges of blocks of half the size, down to single elements."""
    steps: list[str] = [f"  r{i} = load_{dtype}x{lanes}(of + {i} * of_pitch);" for i in range(lanes)]
    d = lanes // 2
    while d:
        low = ", ".join(str(lanes + j - d if j & d else j) for j in range(lanes))
        high = ", ".join(str(lanes + j if j & d else j + d) for j in range(lanes))
        for i in range(lanes):
            if not i & d:
                a, b = f"r{i}", f"r{i + d}"
                steps.append(
                    f"  {{ f32x{lanes} x = __builtin_shuffle({a}, {b}, (i32x{lanes}){{{low}}}); "
                    f"{b} = __builtin_shuffle({a}, {b}, (i32x{lanes}){{{high}}}); {a} = x; }}"
                )
        d //= 2
    writes = "\n".join(f"  store_f32x{lanes}(to + {i} * to_pitch, r{i});" for i in range(lanes))
    text = (
        _TRANSPOSE.replace("@R", ", ".join(f"r{i}" for i in range(lanes)))
        .replace("@S", "\n".join(steps))
        .replace("@W", writes)
    )
    text = text.replace("@T", dtype).replace("@L", str(lanes)).replace("@F", f"f32x{lanes}")
    return text.replace("@C", "float" if dtype == "f32" else "uint16_t")
