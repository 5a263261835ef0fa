// Happens-before, by vector clocks over every word of shared memory: a pair of accesses that nothing orders is an error,
// even when this schedule happened to run them the right way round.
//
// Also across proxies: what was written by ordinary stores or cp.async is seen by TMA and wgmma only when a
// fence.proxy.async stands on the way from one to the other (PTX ISA: Memory Consistency Model, Proxy-preserved base
// causality order). What was read by ordinary loads or ldmatrix may be overwritten by TMA only after a fence of the reader
// itself, before it lets go: an arrival does not wait for loads under way, and the copy engine overtakes them (measured on
// an H200: wrong sums). Reads of wgmma and TMA stores are of the copy engine's own proxy and need none.
#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "state.h"

namespace emu {

static void join_into(std::vector<u32>& a, const std::vector<u32>& b) {
  u32* x = a.data();
  const u32* y = b.data();
  for (size_t i = 0, n = b.size(); i < n; ++i) x[i] = x[i] > y[i] ? x[i] : y[i];
}

void Clock::join(const Clock& other) {
  if (other.all.empty()) return;
  if (all.empty()) { *this = other; return; }
  join_into(all, other.all);
  join_into(proxy, other.proxy);
}

void acquire(Thread& t, const Clock& clock) {
  t.clock.join(clock);
  ++t.clock_version;
}

void release(Thread& t, Clock& into) {
  into.join(t.clock);
  ++t.clock.all[t.id];
}

void meet(Thread* const* threads, u32 n) {
  static Clock all;
  all = threads[0]->clock;
  for (u32 i = 1; i < n; ++i) all.join(threads[i]->clock);
  for (u32 i = 0; i < n; ++i) {
    Thread& t = *threads[i];
    t.clock = all;
    ++t.clock.all[t.id];
    ++t.clock_version;
  }
}

Access by_thread(const Thread& t, u32 line) { return {t.now(), u16(t.id), u16(line), THREAD}; }

static bool ordered(const Access& a, const Clock& clock, bool through_proxy) {
  const u32 known = through_proxy ? clock.proxy[a.agent] : clock.all[a.agent];
  const auto waited_for = [&](const std::vector<u32>& at) { return a.stamp < at.size() && at[a.stamp] && known >= at[a.stamp]; };
  switch (a.how) {
    case NOBODY: return true;
    case THREAD: return known >= a.stamp;
    case CP_ASYNC: return waited_for(run.cluster->threads[a.agent].copies.completed_at);
    case BULK_STORE: return waited_for(run.cluster->threads[a.agent].stores.completed_at);
    case BULK_LOAD: case WGMMA: return clock.all[a.agent] >= a.stamp;
  }
  return false;
}

static bool generic(const Access& a) { return a.how == THREAD || a.how == CP_ASYNC; }

// Whether the reader passed a proxy fence after it read, of which the clock's owner has heard.
static bool let_go(const Access& read, const Clock& clock) {
  if (read.how != THREAD) return true;
  const std::vector<u32>& fences = run.cluster->threads[read.agent].proxy_fences;
  const auto fence = std::lower_bound(fences.begin(), fences.end(), read.stamp);
  return fence != fences.end() && clock.all[read.agent] > *fence;
}

std::string name_of(const Thread& t) {
  char s[96];
  if (t.block->cluster->blocks.size() > 1)
    snprintf(s, sizeof s, "thread %u (warp %u, lane %u) of %s %u", t.tid, t.tid / 32, t.tid % 32, run.together ? "block" : "cluster rank", u32(t.block - t.block->cluster->blocks.data()));
  else snprintf(s, sizeof s, "thread %u (warp %u, lane %u)", t.tid, t.tid / 32, t.tid % 32);
  return s;
}

std::string describe(const Access& a) {
  std::string s;
  switch (a.how) {
    case THREAD: s = name_of(run.cluster->threads[a.agent]); break;
    case CP_ASYNC: s = "a cp.async of " + name_of(run.cluster->threads[a.agent]); break;
    case BULK_STORE: s = "a TMA store of " + name_of(run.cluster->threads[a.agent]); break;
    case BULK_LOAD: s = "a bulk copy into shared memory"; break;
    case WGMMA: s = "a wgmma"; break;
    case NOBODY: s = "nobody"; break;
  }
  return s + " at line " + std::to_string(a.line);
}

// Words of memory that are watched: `cells`, the first at address `base` of what `space` names.
struct Watched { std::vector<Cell>& cells; u32 base; const char* space; };
static Watched shared(Block& block) { return {block.cells, SHARED_BASE, "shared address"}; }

[[noreturn]] static void conflict(const Clock& clock, const Access& before, const char* space, u32 address, const char* op, const char* did) {
  const std::string who = describe(before);
  if (generic(before) && ordered(before, clock, false))
    fail("proxy", "%s of %s %u: %s %s it through the generic proxy, and %s", op, space, address, who.c_str(), did,
         did[0] == 'r' ? "passes no fence.proxy.async before it lets go" : "no fence.proxy.async lies between");
  fail("race", "%s of %s %u is not ordered after %s, which %s it", op, space, address, who.c_str(), did);
}

static void remember_read(Cell& c, const Clock& clock, const Access& by) {
  const auto covered = [&](const Access& old) {  // whoever comes after the new read comes after the old one too
    return !(old.halves & ~by.halves) && ((old.agent == by.agent && old.how == by.how) || (by.how == THREAD && ordered(old, clock, false) && let_go(old, clock)));
  };
  u32 kept = 0;
  for (u32 i = 0; i < c.n_reads; ++i) if (!covered(c.reads[i])) c.reads[kept++] = c.reads[i];
  c.n_reads = u8(kept);
  if (!c.more_reads.empty()) std::erase_if(c.more_reads, covered);
  if (c.n_reads < 4) c.reads[c.n_reads++] = by;
  else c.more_reads.push_back(by);
}

// Calls each(cell, which halves of it, its address) for every word that the bytes touch.
template <class F> static void words(const Watched& memory, u32 address, u32 bytes, F each) {
  const u32 from = address - memory.base, to = from + bytes;
  for (u32 w = from / 4; w < (to + 3) / 4; ++w)
    each(memory.cells[w], u8((4 * w + 2 > from ? 1 : 0) | (4 * w + 2 < to ? 2 : 0)), memory.base + 4 * w);
}

static void check_writes(const Clock& clock, const Cell& c, u8 halves, const char* space, u32 address, bool async, const char* op) {
  for (u32 h = 0; h < 2; ++h) {
    const Access& w = c.write[h];
    if ((halves >> h & 1) && !ordered(w, clock, async && generic(w))) conflict(clock, w, space, address, op, "writes");
    if (halves == 3 && c.write[1] == w) return;
  }
}

void race_read(const Clock& clock, Block& block, u32 address, u32 bytes, Access by, bool async, const char* op) {
  words(shared(block), address, bytes, [&](Cell& c, u8 halves, u32 at) {
    if (((halves & 1) && c.write[0].how == NOBODY) || ((halves & 2) && c.write[1].how == NOBODY)) ++run.stats.uninitialised_words;
    check_writes(clock, c, halves, "shared address", at, async, op);
    by.halves = halves;
    remember_read(c, clock, by);
  });
}

static void write_words(const Watched& memory, const Clock& clock, u32 address, u32 bytes, Access by, bool async, const char* op) {
  words(memory, address, bytes, [&](Cell& c, u8 halves, u32 at) {
    if (c.mbar) fail("barrier", "%s overwrites the mbarrier at shared address %u", op, at);
    check_writes(clock, c, halves, memory.space, at, async, op);
    const auto check_read = [&](const Access& r) {
      if ((r.halves & halves) && !(ordered(r, clock, false) && (!async || let_go(r, clock)))) conflict(clock, r, memory.space, at, op, "reads");
    };
    for (u32 i = 0; i < c.n_reads; ++i) check_read(c.reads[i]);
    for (const Access& r : c.more_reads) check_read(r);
    for (u32 h = 0; h < 2; ++h) if (halves >> h & 1) c.write[h] = by;
    if (halves != 3) return;                   // reads of the other half count on; those of this one do no harm
    c.n_reads = 0;
    c.more_reads.clear();
  });
}

void race_write(const Clock& clock, Block& block, u32 address, u32 bytes, Access by, bool async, const char* op) {
  write_words(shared(block), clock, address, bytes, by, async, op);
}

void race_global(const Clock& clock, Array& array, u64 byte, u32 bytes, Access by, bool store, const char* op) {
  char space[40];
  snprintf(space, sizeof space, "array %zu, byte", size_t(&array - run.arrays.data()));
  const Watched memory{array.cells, 0, space};
  if (store) return write_words(memory, clock, u32(byte), bytes, by, false, op);
  words(memory, u32(byte), bytes, [&](Cell& c, u8 halves, u32 at) {
    check_writes(clock, c, halves, space, at, false, op);
    by.halves = halves;
    remember_read(c, clock, by);
  });
}

void touch_remote(Block& block) {
  if (run.now->block != &block) block.remote[run.now->id] = run.now->now();
}

void check_block_exit(Block& block) {
  Clock last;
  for (u32 i = 0; i < block.n; ++i) last.join(block.threads[i].clock);
  for (const auto& [agent, time] : block.remote)
    if (last.all[agent] < time)
      fail("exit", "the block of cluster rank %u ends, and nothing makes it wait for %s, which uses its shared memory", block.rank,
           name_of(run.cluster->threads[agent]).c_str());
  for (const Flight& f : run.cluster->flights)
    if (f.to_block == &block) fail("exit", "the block of cluster rank %u ends while a bulk copy to its shared address %u is under way", block.rank, f.to);
}

}  // namespace emu
