// y = x / sqrt(mean(x^2) + eps) * w, a row of 1024 a block; x comes from the grid before this one.
EMMY_KERNEL(128, 1) rms_norm(const u16* x, const u16* w, u16* y, float eps) {
  EMMY_SMEM(smem);
  const int t = threadIdx.x;
  u32 rx[4], rw[4], ry[4];
  emmy_ldg_b128_nc(rw, w + t * 8);
  emmy_pdl_wait();
  emmy_ldg_b128(rx, x + blockIdx.x * 1024 + t * 8);
  float sum = 0.f;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    float p[2];
    emmy_unpack_bf16(p, rx[i]);
    sum += p[0] * p[0] + p[1] * p[1];
  }
  #pragma unroll
  for (u32 d = 16; d > 0; d /= 2) sum += emmy_shfl_xor_f32(sum, d);
  u32 part[1] = {__float_as_uint(sum)};
  if (t % 32 == 0) emmy_sts_b32(smem + emmy_warp_index() * 4, part);
  emmy_syncthreads();
  u32 parts[4];
  emmy_lds_b128(parts, smem);
  sum = 0.f;
  #pragma unroll
  for (int i = 0; i < 4; ++i) sum += __uint_as_float(parts[i]);
  const float scale = emmy_rsqrt(sum / 1024.f + eps);
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    float p[2], q[2];
    emmy_unpack_bf16(p, rx[i]);
    emmy_unpack_bf16(q, rw[i]);
    ry[i] = emmy_pack_bf16(p[0] * scale * q[0], p[1] * scale * q[1]);
  }
  emmy_pdl_launch();
  emmy_stg_b128(y + blockIdx.x * 1024 + t * 8, ry);
}
