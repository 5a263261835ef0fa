// One slot of a 64 x 32 x 64 matmul, as four warps multiply it: warp tile 32 x 16.
EMMY_DEV void multiply(float (*acc)[2][4], u32 a, u32 b, int warp, int lane) {
  const int wm = warp / 2 * 32, wn = warp % 2 * 16;
  #pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    u32 fa[2][4], fb[4];
    #pragma unroll
    for (int i = 0; i < 2; ++i) emmy_ldmatrix_x4(fa[i], a + at(wm + i * 16 + lane % 16, kk * 2 + lane / 16));
    emmy_ldmatrix_x4(fb, b + at(wn + lane / 16 * 8 + lane % 8, kk * 2 + lane / 8 % 2));
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      #pragma unroll
      for (int j = 0; j < 2; ++j) emmy_mma_f32_f16(acc[i][j], fa[i], fb + 2 * j);
  }
}
