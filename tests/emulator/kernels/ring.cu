// C = A B^T with a ring of three slots filled by cp.async: 64 x 32 x 32, rows of A beyond m read as zero and not stored.
EMMY_DEV u32 place(u32 row, u32 chunk) { return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4); }
EMMY_DEV void fill(u32 slot, const u16* a, const u16* b, int m0, int n0, int m, int k, int step) {
  const int t = threadIdx.x;
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = (t + i * 128) / 4, chunk = t % 4;
    const u16* from = a + (i64)min(m0 + row, m - 1) * k + step * 32 + chunk * 8;
    emmy_cp_async_b128_zfill(slot + place(row, chunk), from, m0 + row < m ? 16 : 0);
  }
  emmy_cp_async_b128(slot + 4096 + place(t / 4, t % 4), b + (i64)(n0 + t / 4) * k + step * 32 + t % 4 * 8);
}
EMMY_KERNEL(128, 1) ring(const u16* a, const u16* b, float* c, int m, int n, int k) {
  EMMY_SMEM(smem);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / 2 * 32, wn = warp % 2 * 16;
  const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 32, steps = k / 32;
  float acc[2][2][4] = {};
  for (int s = 0; s < 2; ++s) {
    if (s < steps) fill(smem + s * 6144, a, b, m0, n0, m, k, s);
    emmy_cp_async_commit();
  }
  for (int s = 0; s < steps; ++s) {
    emmy_cp_async_wait<1>();
    emmy_syncthreads();
    if (s + 2 < steps) fill(smem + (s + 2) % 3 * 6144, a, b, m0, n0, m, k, s + 2);
    emmy_cp_async_commit();
    const u32 slot = smem + s % 3 * 6144;
    #pragma unroll
    for (int kk = 0; kk < 2; ++kk) {
      u32 fa[2][4], fb[4];
      #pragma unroll
      for (int i = 0; i < 2; ++i) emmy_ldmatrix_x4(fa[i], slot + place(wm + i * 16 + lane % 16, kk * 2 + lane / 16));
      emmy_ldmatrix_x4(fb, slot + 4096 + place(wn + lane / 16 * 8 + lane % 8, kk * 2 + lane / 8 % 2));
      #pragma unroll
      for (int i = 0; i < 2; ++i)
        #pragma unroll
        for (int j = 0; j < 2; ++j) emmy_mma_f32_f16(acc[i][j], fa[i], fb + 2 * j);
    }
  }
  #pragma unroll
  for (int i = 0; i < 2; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = m0 + wm + i * 16 + lane / 4 + h * 8, col = n0 + wn + j * 8 + lane % 4 * 2;
        u32 r[2] = {__float_as_uint(acc[i][j][2 * h]), __float_as_uint(acc[i][j][2 * h + 1])};
        emmy_stg_b64_if(c + (i64)row * n + col, r, row < m);
      }
}
