// C = A B^T: a producer warp fills three slots by TMA, four warps multiply; the tile leaves by a TMA store.
EMMY_KERNEL(160, 1) tma_ring(EMMY_TENSORMAP(a), EMMY_TENSORMAP(b), EMMY_TENSORMAP(c), int k) {
  EMMY_SMEM(smem);
  const u32 out = smem + 3 * 12288, full = out + 8192, empty = full + 3 * 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 32, steps = k / 64;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 3; ++s) {
      emmy_mbar_init(full + 8 * s, 1);
      emmy_mbar_init(empty + 8 * s, 4);
    }
    emmy_mbar_fence_init();
  }
  emmy_syncthreads();
  if (warp == 4) {
    if (lane == 0)
      for (int s = 0; s < steps; ++s) {
        const u32 slot = smem + s % 3 * 12288, bar = full + s % 3 * 8;
        emmy_mbar_wait(empty + s % 3 * 8, (s / 3 & 1) ^ 1);
        emmy_mbar_expect_tx(bar, 12288);
        emmy_tma_load_2d(slot, &a, bar, s * 64, m0);
        emmy_tma_load_2d(slot + 8192, &b, bar, s * 64, n0);
      }
    return;
  }
  float acc[2][2][4] = {};
  for (int s = 0; s < steps; ++s) {
    const u32 slot = smem + s % 3 * 12288;
    emmy_mbar_wait(full + s % 3 * 8, s / 3 & 1);
    multiply(acc, slot, slot + 8192, warp, lane);
    emmy_fence_async();
    emmy_syncwarp();
    if (lane == 0) emmy_mbar_arrive(empty + s % 3 * 8);
  }
  #pragma unroll
  for (int i = 0; i < 2; ++i)
    #pragma unroll
    for (int j = 0; j < 2; ++j)
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp / 2 * 32 + i * 16 + lane / 4 + h * 8, col = warp % 2 * 16 + j * 8 + lane % 4 * 2;
        u32 r[2] = {__float_as_uint(acc[i][j][2 * h]), __float_as_uint(acc[i][j][2 * h + 1])};
        emmy_sts_b64(out + at(row, col / 4) + col % 4 * 4, r);
      }
  emmy_fence_async();
  emmy_bar_sync(1, 128);
  if (threadIdx.x == 0) {
    emmy_tma_store_2d(&c, out, n0, m0);
    emmy_bulk_commit();
    emmy_bulk_wait_read<0>();
  }
}
