// C = A B^T by one block that walks every tile: two groups of four warps take turns on tiles, and multiply one at a time.
EMMY_KERNEL(288, 1) pingpong(EMMY_TENSORMAP(a), EMMY_TENSORMAP(b), float* c, int tiles_m, int tiles_n, int k) {
  EMMY_SMEM(smem);
  const u32 full = smem + 3 * 12288, empty = full + 3 * 8, turn = empty + 3 * 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128;
  const int steps = k / 64, tiles = tiles_m * tiles_n;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 3; ++s) {
      emmy_mbar_init(full + 8 * s, 1);
      emmy_mbar_init(empty + 8 * s, 4);
    }
    emmy_mbar_init(turn, 1);
    emmy_mbar_init(turn + 8, 1);
    emmy_mbar_fence_init();
  }
  emmy_syncthreads();
  if (group == 2) {
    if (lane == 0)
      for (int p = 0; p < tiles * steps; ++p) {
        const int tile = p / steps, s = p % steps;
        const u32 slot = smem + p % 3 * 12288, bar = full + p % 3 * 8;
        emmy_mbar_wait(empty + p % 3 * 8, (p / 3 & 1) ^ 1);
        emmy_mbar_expect_tx(bar, 12288);
        emmy_tma_load_2d(slot, &a, bar, s * 64, tile / tiles_n * 64);
        emmy_tma_load_2d(slot + 8192, &b, bar, s * 64, tile % tiles_n * 32);
      }
    return;
  }
  for (int tile = group; tile < tiles; tile += 2) {
    float acc[2][2][4] = {};
    emmy_mbar_wait(turn + 8 * group, (tile / 2 & 1) ^ (group == 0));
    for (int p = tile * steps; p < (tile + 1) * steps; ++p) {
      const u32 slot = smem + p % 3 * 12288;
      emmy_mbar_wait(full + p % 3 * 8, p / 3 & 1);
      multiply(acc, slot, slot + 8192, warp, lane);
      emmy_fence_async();
      emmy_syncwarp();
      if (lane == 0) emmy_mbar_arrive(empty + p % 3 * 8);
    }
    emmy_bar_sync(1 + group, 128);
    if (threadIdx.x % 128 == 0) emmy_mbar_arrive(turn + 8 * (group ^ 1));
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      #pragma unroll
      for (int j = 0; j < 2; ++j)
        #pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = tile / tiles_n * 64 + warp / 2 * 32 + i * 16 + lane / 4 + h * 8;
          const int col = tile % tiles_n * 32 + warp % 2 * 16 + j * 8 + lane % 4 * 2;
          u32 r[2] = {__float_as_uint(acc[i][j][2 * h]), __float_as_uint(acc[i][j][2 * h + 1])};
          emmy_stg_b64(c + (i64)row * tiles_n * 32 + col, r);
        }
  }
}
