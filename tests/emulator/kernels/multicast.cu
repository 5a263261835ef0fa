// C = A B^T by clusters of two blocks side by side: each block fetches half of the rows of A that both need, for both.
EMMY_KERNEL(160, 1) EMMY_CLUSTER(2, 1, 1) multicast(EMMY_TENSORMAP(a), EMMY_TENSORMAP(b), float* c, int n, int k) {
  EMMY_SMEM(smem);
  const u32 full = smem + 3 * 12288, empty = full + 3 * 8, rank = emmy_cluster_rank();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 32, steps = k / 64;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 3; ++s) {
      emmy_mbar_init(full + 8 * s, 1);
      emmy_mbar_init(empty + 8 * s, 8);
    }
    emmy_mbar_fence_init();
  }
  emmy_syncthreads();
  emmy_cluster_arrive_relaxed();
  emmy_cluster_wait();
  if (warp == 4) {
    if (lane == 0)
      for (int s = 0; s < steps; ++s) {
        const u32 slot = smem + s % 3 * 12288, bar = full + s % 3 * 8;
        emmy_mbar_wait(empty + s % 3 * 8, (s / 3 & 1) ^ 1);
        emmy_mbar_expect_tx(bar, 12288);
        emmy_tma_load_2d_multicast(slot + rank * 4096, &a, bar, s * 64, m0 + rank * 32, 3);
        emmy_tma_load_2d(slot + 8192, &b, bar, s * 64, n0);
      }
  } else {
    float acc[2][2][4] = {};
    for (int s = 0; s < steps; ++s) {
      const u32 slot = smem + s % 3 * 12288;
      emmy_mbar_wait(full + s % 3 * 8, s / 3 & 1);
      multiply(acc, slot, slot + 8192, warp, lane);
      emmy_fence_async();
      emmy_syncwarp();
      if (lane < 2) emmy_mbar_arrive_cluster(empty + s % 3 * 8, lane);
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      #pragma unroll
      for (int j = 0; j < 2; ++j)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = m0 + warp / 2 * 32 + i * 16 + lane / 4 + h * 8, col = n0 + warp % 2 * 16 + j * 8 + lane % 4 * 2;
          u32 r[2] = {__float_as_uint(acc[i][j][2 * h]), __float_as_uint(acc[i][j][2 * h + 1])};
          emmy_stg_b64(c + (i64)row * n + col, r);
        }
  }
  emmy_cluster_arrive();
  emmy_cluster_wait();
}
