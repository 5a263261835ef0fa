// C = A B^T on Hopper: 64 x 16 x 32, brought by cp.async in blocks of 8 rows of 16 bytes, for wgmma without a swizzle.
EMMY_KERNEL(128, 1) wgmma_staged(const u16* a, const u16* b, float* c) {
  EMMY_SMEM(smem);
  const int t = threadIdx.x, lane = t % 32;
  for (int i = t; i < 256; i += 128) emmy_cp_async_b128(smem + i % 4 * 1024 + i / 4 * 16, a + i * 8);
  if (t < 64) emmy_cp_async_b128(smem + 4096 + t % 4 * 256 + t / 4 * 16, b + t * 8);
  emmy_cp_async_commit();
  emmy_cp_async_wait<0>();
  emmy_fence_async();
  emmy_syncthreads();
  const u64 da = emmy_desc_k(smem, 1024, 128), db = emmy_desc_k(smem + 4096, 256, 128);
  float acc[8];
  emmy_wgmma_fence();
  #pragma unroll
  for (int kk = 0; kk < 2; ++kk) emmy_wgmma_n16_f16_ss(acc, emmy_desc_step(da, kk * 2048), emmy_desc_step(db, kk * 512), kk > 0);
  emmy_wgmma_commit();
  emmy_wgmma_wait<0>();
  #pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const int row = t / 32 * 16 + lane / 4 + (i >> 1 & 1) * 8, col = (i >> 2) * 8 + lane % 4 * 2;
    u32 r[2] = {__float_as_uint(acc[i]), __float_as_uint(acc[i + 1])};
    emmy_stg_b64(c + row * 16 + col, r);
  }
}
