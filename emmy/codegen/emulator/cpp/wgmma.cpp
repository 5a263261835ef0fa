// Warpgroup matrix instructions: 128 threads multiply 64 x 16 by 16 x N, asynchronously.
//
// Operands are read from shared memory when the group is waited for, and accumulators are poison until then, so that a
// slot refilled too early or a sum read too early shows. PTX ISA: Asynchronous Warpgroup Level Matrix Instructions.
#include <algorithm>

#include "state.h"

namespace emu {

// PTX ISA: Matrix Descriptor Format. Strides are bytes here.
struct Descriptor { u32 start, lead, stride, swizzle_bytes; };
static Descriptor decode(u64 d) {
  static const u32 widths[4] = {0, 128, 64, 32};
  if (d >> 49 & 7) fail("copy", "wgmma descriptor with base offset %u; tiles must be aligned to their swizzle instead", u32(d >> 49 & 7));
  const u32 start = u32(d & 0x3fff) << 4, w = widths[d >> 62];
  if (w && start % (8 * w) >= w) fail("copy", "wgmma descriptor of shared address %u: not in the first of the 8 rows of its swizzle of %u bytes", start, w);
  return {start, u32(d >> 16 & 0x3fff) << 4, u32(d >> 32 & 0x3fff) << 4, w};
}

// The address of 8 consecutive elements. K-major: row `mn`, half `part` of the 16 along k. MN-major: elements 8 * part and
// following along mn, of row `k`. PTX ISA: Strides; an atom is 8 rows of the swizzle's width (16 bytes without one).
static u32 chunk(const Descriptor& d, bool mn_major, u32 row, u32 part) {
  const u32 w = d.swizzle_bytes;
  u32 a = d.start + row / 8 * d.stride + row % 8 * (w ? w : 16);
  if (!mn_major) a += w ? part * 16 : part * d.lead;
  else if (w) a += part % (w / 16) * 16 + part / (w / 16) * d.lead;
  else a = d.start + row / 8 * d.lead + row % 8 * 16 + part * d.stride;
  return w ? a ^ ((a >> 7 & (w / 16 - 1)) << 4) : a;
}

// Calls each(row, part, address) for every chunk of an operand of `mn` rows or columns and 16 along k.
template <class F> static void chunks(const Descriptor& d, bool mn_major, u32 mn, F each) {
  const u32 rows = mn_major ? 16 : mn, parts = mn_major ? mn / 8 : 2;
  for (u32 r = 0; r < rows; ++r) for (u32 p = 0; p < parts; ++p) each(r, p, chunk(d, mn_major, r, p));
}

static Block& home(const Lanes& l) { return *l.first->block; }
static Warpgroup& group_of(const Lanes& l) { return home(l).groups[l.first->tid / 128]; }

// What every warp of the group knows: a warp knows what any of its lanes knows.
static const Clock& issue_clock(const Lanes& l, Warpgroup& g) {
  u64 version = 0;
  for (u32 i = 0; i < 128; ++i) version += l.first[i].clock_version;
  if (version == g.issue_version) return g.issue;
  static Clock one;
  for (u32 w = 0; w < 4; ++w) {
    one = l.first[32 * w].clock;
    for (u32 i = 1; i < 32; ++i) one.join(l.first[32 * w + i].clock);
    if (!w) { g.issue = one; continue; }
    for (size_t i = 0; i < one.all.size(); ++i) {
      g.issue.all[i] = std::min(g.issue.all[i], one.all[i]);
      g.issue.proxy[i] = std::min(g.issue.proxy[i], one.proxy[i]);
    }
  }
  g.issue_version = version;
  return g.issue;
}

static float value(u16 bits, bool bf16) { return bf16 ? bfloat_value(bits) : half_value(bits); }

static void load_operand(Block& block, u64 descriptor, bool mn_major, u32 mn, bool bf16, float (*to)[16]) {
  chunks(decode(descriptor), mn_major, mn, [&](u32 row, u32 part, u32 address) {
    u16 e[8];
    memcpy(e, block.smem.data() + (address - SHARED_BASE), 16);
    for (u32 i = 0; i < 8; ++i) (mn_major ? to[part * 8 + i][row] : to[row][part * 8 + i]) = value(e[i], bf16);
  });
}

static void multiply(Block& block, Mma& m) {
  static float a[64][16], b[256][16], bt[16][256];
  static double d[64][256];
  const u32 n = u32(m.shape.n);
  if (m.from_registers) {
    for (u32 l = 0; l < 128; ++l) for (u32 i = 0; i < 4; ++i) {  // as mma.m16n8k16 holds A: a warp has 16 rows
      const u32 row = l / 32 * 16 + l % 32 / 4 + (i & 1) * 8, col = l % 4 * 2 + (i >> 1) * 8, pair = m.a_registers[4 * l + i];
      a[row][col] = value(u16(pair), m.shape.bf16);
      a[row][col + 1] = value(u16(pair >> 16), m.shape.bf16);
    }
  } else load_operand(block, m.a, m.shape.a_mn, 64, m.shape.bf16, a);
  load_operand(block, m.b, m.shape.b_mn, n, m.shape.bf16, b);
  for (u32 j = 0; j < n; ++j) for (u32 k = 0; k < 16; ++k) bt[k][j] = b[j][k];
  for (u32 i = 0; i < 64; ++i) {
    std::fill(d[i], d[i] + n, 0.0);
    for (u32 k = 0; k < 16; ++k) for (u32 j = 0; j < n; ++j) d[i][j] += double(a[i][k]) * bt[k][j];
  }
  for (u32 l = 0; l < 128; ++l) for (u32 i = 0; i < n / 2; ++i) {
    const u32 row = l / 32 * 16 + l % 32 / 4 + (i >> 1 & 1) * 8, col = (i >> 2) * 8 + l % 4 * 2 + (i & 1);
    float& v = m.d->value[l * (n / 2) + i];
    v = float((m.accumulate ? double(v) : 0.0) + d[row][col]);
  }
}

// PTX ISA: wgmma.mma_async: accessing its registers before its group was waited for is undefined, those of A included.
static void look_at_registers(const Mma& m) {
  for (size_t l = 0; l < m.a_of.size(); ++l)
    if (memcmp(m.a_of[l], &m.a_registers[4 * l], 16)) fail("registers", "wgmma: A's registers of thread %u of the warpgroup were changed before its group was waited for", u32(l));
}

static void give_back(Warpgroup& g, Accumulators* d) {
  if (--d->in_flight) return;
  const size_t n = d->value.size() / 128;
  for (size_t l = 0; l < 128; ++l) memcpy(d->of[l], &d->value[l * n], n * sizeof(float));
  g.accumulators.remove_if([&](const Accumulators& a) { return &a == d; });
}

static Accumulators& accumulators_of(Warpgroup& g, float* const* d, u32 n) {
  for (Accumulators& a : g.accumulators) {
    if (a.of[0] + a.value.size() / 128 <= d[0] || d[0] + n / 2 <= a.of[0]) continue;
    if (a.of[0] != d[0] || a.value.size() != 64 * n) fail("registers", "wgmma on accumulators that a wgmma of another shape still works on");
    return a;
  }
  if (!g.fenced) fail("registers", "wgmma on accumulators after wgmma.wait_group or at first, without a wgmma.fence");
  Accumulators& a = g.accumulators.emplace_back();
  a.of.assign(d, d + 128);
  a.value.resize(64 * n);
  for (u32 i = 0; i < 128; ++i) {
    memcpy(&a.value[i * (n / 2)], d[i], n / 2 * sizeof(float));
    memset(d[i], 0xff, n / 2 * sizeof(float));
  }
  return a;
}

void wgmma_issue(const WgmmaShape& shape, float* d, u64 a, const u32* a_registers, u64 b, bool accumulate, const Site& site) {
  struct Arg { WgmmaShape shape; float* d; u64 a; const u32* registers; u64 b; bool accumulate; } arg{shape, d, a, a_registers, b, accumulate};
  warpgroup("wgmma", site, &arg, [](Lanes& l) {
    const Arg& first = l.arg<Arg>(0);
    Block& block = home(l);
    Warpgroup& g = group_of(l);
    float* d[128];
    Mma m{first.shape, first.a, first.b, {}, {}, first.registers != nullptr, first.accumulate, nullptr};
    for (int i = 0; i < 128; ++i) {
      const Arg& x = l.arg<Arg>(i);
      if (x.a != first.a || x.b != first.b || x.accumulate != first.accumulate) fail("divergent", "wgmma: descriptors or scale-d differ inside the warpgroup");
      d[i] = x.d;
      if (!x.registers) continue;
      m.a_registers.insert(m.a_registers.end(), x.registers, x.registers + 4);
      m.a_of.push_back(x.registers);
    }
    if (m.from_registers && !g.fenced) fail("registers", "wgmma with A in registers, without a wgmma.fence");
    const Clock& clock = issue_clock(l, g);
    const Access by{g.n_committed + 1, g.agent, u16(l.line), WGMMA};
    const auto look = [&](u64 descriptor, bool mn_major, u32 mn) {
      chunks(decode(descriptor), mn_major, mn, [&](u32, u32, u32 address) {
        shared_at(block, address, 16, 16, "wgmma");
        race_read(clock, block, address, 16, by, true, "wgmma");
        run.stats.wgmma_bytes += 16;
      });
    };
    if (!m.from_registers) look(m.a, first.shape.a_mn, 64);
    look(m.b, first.shape.b_mn, u32(first.shape.n));
    Accumulators& acc = accumulators_of(g, d, u32(first.shape.n));
    ++acc.in_flight;
    m.d = &acc;
    ++run.stats.wgmma;
    run.stats.wgmma_macs += 64ull * 16 * u32(first.shape.n);
    if (run.eager) {
      multiply(block, m);
      give_back(g, &acc);
      m.d = nullptr;
    }
    g.open.push_back(std::move(m));
  });
}

void wgmma_fence(const Site& site) {
  warpgroup("wgmma.fence", site, nullptr, [](Lanes& l) { group_of(l).fenced = true; });
}

void wgmma_commit(const Site& site) {
  warpgroup("wgmma.commit_group", site, nullptr, [](Lanes& l) {
    Warpgroup& g = group_of(l);
    g.committed.push_back(std::move(g.open));
    g.open.clear();
    ++g.n_committed;
  });
}

void wgmma_wait(u32 pending, const Site& site) {
  warpgroup("wgmma.wait_group", site, &pending, [](Lanes& l) {
    Warpgroup& g = group_of(l);
    while (g.committed.size() > l.arg<u32>(0)) {
      for (Mma& m : g.committed.front()) {
        look_at_registers(m);
        if (!m.d) continue;
        multiply(home(l), m);
        give_back(g, m.d);
      }
      g.committed.pop_front();
      ++g.n_complete;
    }
    g.fenced = false;
    for (u32 i = 0; i < 128; ++i) {
      Thread& t = l.first[i];
      t.clock.all[g.agent] = std::max(t.clock.all[g.agent], g.n_complete);
      ++t.clock_version;
    }
  });
}

}  // namespace emu
