// C = A B on Hopper: 128 x 64 x 64, A K-major and B MN-major as they lie in memory. One warpgroup copies, two multiply.
EMMY_KERNEL(384, 1) wgmma_ring(EMMY_TENSORMAP(a), EMMY_TENSORMAP(b), EMMY_TENSORMAP(c), int k) {
  EMMY_SMEM(smem);
  const u32 out = smem + 3 * 24576, full = out + 16384, empty = full + 3 * 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128;
  const int m0 = blockIdx.y * 128, n0 = blockIdx.x * 64, steps = k / 64;
  if (threadIdx.x == 0) {
    for (int s = 0; s < 3; ++s) {
      emmy_mbar_init(full + 8 * s, 1);
      emmy_mbar_init(empty + 8 * s, 2);
    }
    emmy_mbar_fence_init();
  }
  emmy_syncthreads();
  if (group == 2) {
    emmy_setmaxnreg_dec<40>();
    if (threadIdx.x == 256)
      for (int s = 0; s < steps; ++s) {
        const u32 slot = smem + s % 3 * 24576, bar = full + s % 3 * 8;
        emmy_mbar_wait(empty + s % 3 * 8, (s / 3 & 1) ^ 1);
        emmy_mbar_expect_tx(bar, 24576);
        emmy_tma_load_2d(slot, &a, bar, s * 64, m0);
        emmy_tma_load_2d(slot + 16384, &b, bar, n0, s * 64);
      }
    return;
  }
  emmy_setmaxnreg_inc<232>();
  float acc[32];
  for (int s = 0; s < steps; ++s) {
    const u32 slot = smem + s % 3 * 24576;
    emmy_mbar_wait(full + s % 3 * 8, s / 3 & 1);
    const u64 da = emmy_desc_k_sw128(slot + group * 8192), db = emmy_desc_mn_sw128(slot + 16384, 8192);
    emmy_wgmma_fence();
    #pragma unroll
    for (int kk = 0; kk < 4; ++kk)
      emmy_wgmma_n64_f16_ss_tb(acc, emmy_desc_step(da, kk * 32), emmy_desc_step(db, kk * 2048), s > 0 || kk > 0);
    emmy_wgmma_commit();
    emmy_wgmma_wait<1>();
    if (s > 0 && threadIdx.x % 128 == 0) emmy_mbar_arrive(empty + (s - 1) % 3 * 8);
  }
  emmy_wgmma_wait<0>();
  const u32 tile = out + group * 8192;
  #pragma unroll
  for (int j = 0; j < 8; j += 2) {
    u32 r[4];
    #pragma unroll
    for (int q = 0; q < 4; ++q) r[q] = emmy_pack_f16(acc[4 * j + 2 * q], acc[4 * j + 2 * q + 1]);
    emmy_stmatrix_x4(tile + at(warp * 16 + lane % 16, j + lane / 16), r);
  }
  emmy_fence_async();
  emmy_bar_sync(1 + group, 128);
  if (threadIdx.x % 128 == 0) {
    emmy_tma_store_2d(&c, tile, n0, m0 + group * 64);
    emmy_bulk_commit();
    emmy_bulk_wait<0>();
  }
}
