// Chunks of 16 bytes in rows of 128, permuted as the 128-byte swizzle of TMA and wgmma does.
EMMY_DEV u32 at(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }
