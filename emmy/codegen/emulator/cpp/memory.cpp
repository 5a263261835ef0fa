// Shared and global memory as threads see it: bounds, alignment, who may write, and how well lanes' accesses go together.
#include <algorithm>

#include "state.h"

namespace emu {

static u32 own(u32 address) { return address & ((1u << CLUSTER_SHIFT) - 1); }

Block& block_of(u32 address, const char* op) {
  const u32 window = address >> CLUSTER_SHIFT;
  if (!window) return *run.now->block;
  if (window > run.cluster_blocks) fail("bounds", "%s: cluster rank %u, the cluster has %u blocks", op, window - 1, run.cluster_blocks);
  Block& block = run.now->block->first[window - 1];
  if (block.exited) fail("exit", "%s: the block of cluster rank %u has ended, its shared memory is gone", op, block.rank);
  return block;
}

u8* shared_at(Block& block, u32 address, u32 bytes, u32 align, const char* op) {
  const u32 a = own(address);
  if (a < SHARED_BASE || a - SHARED_BASE + u64(bytes) > block.smem.size())
    fail("bounds", "%s: shared address %u, %u bytes; the block has %zu bytes from address %u on", op, a, bytes, block.smem.size(), SHARED_BASE);
  if (a % align) fail("alignment", "%s: shared address %u is not a multiple of %u", op, a, align);
  return block.smem.data() + (a - SHARED_BASE);
}

u32 cluster_address(u32 address, u32 rank) {
  if (rank >= run.cluster_blocks) fail("bounds", "mapa: cluster rank %u, the cluster has %u blocks", rank, run.cluster_blocks);
  return (rank + 1) << CLUSTER_SHIFT | own(address);
}

u32 cluster_rank() { return run.now->block->rank; }
u32 shared_base() { return SHARED_BASE; }

static void read_as(Thread& t, u32 address, void* to, u32 bytes, const char* op, u32 line) {
  Block& block = block_of(address, op);
  const u8* p = shared_at(block, address, bytes, bytes, op);
  touch_remote(block);
  race_read(t.clock, block, own(address), bytes, by_thread(t, line), false, op);
  memcpy(to, p, bytes);
  if (&block != t.block) run.stats.dsmem_bytes += bytes;
}

static void write_as(Thread& t, u32 address, const void* from, u32 bytes, const char* op, u32 line) {
  Block& block = block_of(address, op);
  u8* p = shared_at(block, address, bytes, bytes, op);
  touch_remote(block);
  race_write(t.clock, block, own(address), bytes, by_thread(t, line), false, op);
  memcpy(p, from, bytes);
  if (&block != t.block) run.stats.dsmem_bytes += bytes;
}

void shared_read(u32 address, void* to, u32 bytes, const char* op, const Site& site) {
  tick(site);
  read_as(*run.now, address, to, bytes, op, site.line());
  count_shared(*run.now, address, bytes, false, site);
}

void shared_write(u32 address, const void* from, u32 bytes, const char* op, const Site& site) {
  tick(site);
  write_as(*run.now, address, from, bytes, op, site.line());
  count_shared(*run.now, address, bytes, true, site);
}

void Lanes::read(int lane, u32 address, void* to, u32 bytes) const {
  Thread* self = run.now;
  run.now = first + lane;                      // errors and remote accesses are that lane's
  read_as(first[lane], address, to, bytes, first->op, line);
  run.now = self;
}

void Lanes::write(int lane, u32 address, const void* from, u32 bytes) const {
  Thread* self = run.now;
  run.now = first + lane;
  write_as(first[lane], address, from, bytes, first->op, line);
  run.now = self;
}

// ---- global memory: only the arrays given to the launch
void* global_at(const void* p, u32 bytes, bool store, const char* op) {
  const u8* q = static_cast<const u8*>(p);
  for (size_t i = 0; i < run.arrays.size(); ++i) {
    const Array& a = run.arrays[i];
    if (q < a.mapping || q >= a.mapping + a.mapping_bytes) continue;
    if (q < a.base || q + bytes > a.base + a.bytes)
      fail("bounds", "%s: byte %lld of array %zu, %u bytes; the array has %llu", op, (long long)(q - a.base), i, bytes, a.bytes);
    if (reinterpret_cast<uintptr_t>(q) % bytes) fail("alignment", "%s: byte %lld of array %zu is not a multiple of %u", op, (long long)(q - a.base), i, bytes);
    if (store && !a.writable) fail("bounds", "%s: array %zu is read-only", op, i);
    const Clock& clock = run.now->clock;
    if (a.late && !clock.all.back())           // the last agent is the grid this one depends on
      fail("race", "%s: array %zu is written by the grid before this one, and griddepcontrol.wait does not come first", op, i);
    if (a.late && !strcmp(op, "ld.global.nc")) // PTX ISA: ld.global.nc: memory that is read-only while the kernel runs
      fail("race", "%s: array %zu may still be written by the grid before this one while the kernel runs", op, i);
    return const_cast<void*>(p);
  }
  fail("bounds", "%s: address %p is in no array of this launch", op, p);
}

// Blocks that wait for one another pass data through arrays: each access of one that is written is ordered like those of shared memory.
static void watch(const void* p, u32 bytes, bool store, const char* op, const Site& site) {
  if (!run.together) return;
  for (Array& a : run.arrays)
    if (!a.cells.empty() && p >= a.base && p < a.base + a.bytes)
      race_global(run.now->clock, a, u64(static_cast<const u8*>(p) - a.base), bytes, by_thread(*run.now, site.line()), store, op);
}

void global_read(const void* from, void* to, u32 bytes, const char* op, const Site& site) {
  tick(site);
  watch(global_at(from, bytes, false, op), bytes, false, op, site);
  memcpy(to, from, bytes);
  run.stats.global_load_bytes += bytes;
  count_global(*run.now, from, bytes, false, site);
}

void global_write(void* to, const void* from, u32 bytes, const char* op, const Site& site) {
  tick(site);
  watch(global_at(to, bytes, true, op), bytes, true, op, site);
  memcpy(to, from, bytes);
  run.stats.global_store_bytes += bytes;
  count_global(*run.now, to, bytes, true, site);
}

float global_add(float* to, float value, const char* op, const Site& site) {
  tick(site);
  float* p = static_cast<float*>(global_at(to, 4, true, op));
  watch(p, 4, false, op, site);                // ordered with stores, as loads are, and not with one another
  const float old = *p;
  *p = old + value;
  ++run.stats.atomics;
  return old;
}

// ---- how well the lanes of a warp go together
// Lanes run one after another here, so an instruction's 32 accesses are gathered by call site and by how often each lane
// has passed it.
static void add_waves(bool store, u64 waves, u64 ideal) {
  (store ? run.stats.smem_store_waves : run.stats.smem_load_waves) += waves;
  (store ? run.stats.smem_store_waves_ideal : run.stats.smem_load_waves_ideal) += ideal;
}

static void account(const SiteGroup& g, int kind) {
  const bool shared = kind < 2;
  // Shared memory serves 128 bytes a wave from 32 banks of 4 bytes; wide accesses go by half or quarter warps.
  // Global memory moves sectors of 32 bytes.
  if (shared) {
    const int lanes_a_wave = g.bytes == 16 ? 8 : g.bytes == 8 ? 16 : 32;
    u64 waves = 0, ideal = 0;
    for (int from = 0; from < 32; from += lanes_a_wave) {
      u32 words[128], n = 0, load[32] = {}, worst = 0;
      for (int l = from; l < from + lanes_a_wave; ++l)
        if (g.seen >> l & 1) for (u32 w = u32(g.address[l]) / 4, e = (u32(g.address[l]) + g.bytes + 3) / 4; w < e; ++w) words[n++] = w;
      std::sort(words, words + n);
      n = u32(std::unique(words, words + n) - words);
      for (u32 i = 0; i < n; ++i) worst = std::max(worst, ++load[words[i] % 32]);
      waves += worst;
      ideal += (n + 31) / 32;
    }
    add_waves(kind, waves, ideal);
  } else {
    u64 sectors[64], bytes = 0;
    u32 n = 0;
    for (int l = 0; l < 32; ++l) if (g.seen >> l & 1) { sectors[n++] = g.address[l] / 32; bytes += g.bytes; }
    std::sort(sectors, sectors + n);
    n = u32(std::unique(sectors, sectors + n) - sectors);
    (kind == 3 ? run.stats.global_store_sectors : run.stats.global_load_sectors) += n;
    (kind == 3 ? run.stats.global_store_sectors_ideal : run.stats.global_load_sectors_ideal) += std::min<u64>(n, (bytes + 31) / 32);
  }
}

static void count(Thread& t, u64 address, u32 bytes, int kind, const Site& site) {
  Warp& warp = t.block->warps[t.tid / 32];
  const u32 lane = t.tid % 32;
  SiteLog& log = warp.sites[(u64(site.line()) << 24 | u64(site.column()) << 4) | u64(kind)];
  const u64 nth = log.count[lane]++;
  while (log.base + log.groups.size() <= nth) log.groups.emplace_back();
  SiteGroup& g = log.groups[nth - log.base];
  g.bytes = u8(bytes);
  g.seen |= 1u << lane;
  g.address[lane] = address;
  while (!log.groups.empty() && log.groups.front().seen == 0xffffffffu) {
    account(log.groups.front(), kind);
    log.groups.pop_front();
    ++log.base;
  }
}

void count_shared(Thread& t, u32 address, u32 bytes, bool store, const Site& site) {
  (store ? run.stats.smem_store_bytes : run.stats.smem_load_bytes) += bytes;
  count(t, own(address), bytes, store ? 1 : 0, site);
}
void count_global(Thread& t, const void* p, u32 bytes, bool store, const Site& site) { count(t, reinterpret_cast<u64>(p), bytes, store ? 3 : 2, site); }

void close_counts(Block& block) {
  for (Warp& w : block.warps) {
    for (auto& [site, log] : w.sites) for (const SiteGroup& g : log.groups) if (g.seen) account(g, int(site & 3));
    w.sites.clear();
  }
}

void count_matrix_access(const u32* rows, int n, bool store) {
  (store ? run.stats.smem_store_bytes : run.stats.smem_load_bytes) += 16 * u64(n);
  for (int q = 0; q < n; q += 8) {
    u32 load[8] = {}, worst = 0;               // each row covers 4 of the 32 banks
    for (int i = q; i < q + 8; ++i) {
      bool twin = false;                       // the same row again is one access
      for (int j = q; j < i; ++j) twin = twin || rows[j] == rows[i];
      if (!twin) worst = std::max(worst, ++load[rows[i] / 16 % 8]);
    }
    add_waves(store, worst, 1);
  }
}

void count_mma() { ++run.stats.mma; }

// ---- numbers
float half_value(u16 h) {
  static const float* table = [] {
    static float t[65536];
    for (u32 i = 0; i < 65536; ++i) {
      const int e = i >> 10 & 31, m = i & 1023;
      const float v = e == 0 ? std::ldexp(float(m), -24) : e == 31 ? (m ? NAN : INFINITY) : std::ldexp(float(m | 1024), e - 25);
      t[i] = i & 0x8000 ? -v : v;
    }
    return t;
  }();
  return table[h];
}

u16 half_bits(double d) {
  const u16 sign = std::signbit(d) ? 0x8000 : 0;
  d = std::fabs(d);
  if (d != d) return 0x7fff;                   // what cvt.rn.f16.f32 gives for a NaN
  if (d >= 65520.0) return sign | 0x7c00;
  if (d < 0x1p-14) return sign | u16(std::nearbyint(std::ldexp(d, 24)));
  int e;
  const double m = std::frexp(d, &e);
  long q = long(std::nearbyint(std::ldexp(m, 11)));
  if (q == 2048) { q = 1024; ++e; }
  return sign | u16(((e + 14) << 10) + (q - 1024));
}

u16 bfloat_bits(float f) {
  if (f != f) return 0x7fff;
  u32 b;
  memcpy(&b, &f, 4);
  return u16((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

}  // namespace emu
