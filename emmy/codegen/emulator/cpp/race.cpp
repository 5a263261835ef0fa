// Happens-before, by vector clocks over every word of shared memory: a pair of accesses that nothing orders is an error,
// even when this schedule happened to run them the right way round.
//
// Also across proxies: what was written by ordinary stores or cp.async is seen by TMA and wgmma only when a
// fence.proxy.async stands on the way from one to the other (PTX ISA: Memory Consistency Model, Proxy-preserved base
// causality order).
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

static bool by_ordinary_store(const Access& a) { return a.how == THREAD || a.how == CP_ASYNC; }

std::string name_of(const Thread& t) {
  char s[96];
  if (t.block->cluster->blocks.size() > 1)
    snprintf(s, sizeof s, "thread %u (warp %u, lane %u) of cluster rank %u", t.tid, t.tid / 32, t.tid % 32, t.block->rank);
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

[[noreturn]] static void conflict(const Clock& clock, const Access& before, u32 address, const char* op, const char* did) {
  const std::string who = describe(before);
  if (by_ordinary_store(before) && ordered(before, clock, false))
    fail("proxy", "%s of shared address %u: %s %s it through the generic proxy, and no fence.proxy.async lies between", op, address, who.c_str(), did);
  fail("race", "%s of shared address %u is not ordered after %s, which %s it", op, address, who.c_str(), did);
}

static void remember_read(Cell& c, const Clock& clock, const Access& by) {
  const auto covered = [&](const Access& old) {  // whoever comes after the new read comes after the old one too
    return (old.agent == by.agent && old.how == by.how) || (by.how == THREAD && ordered(old, clock, false));
  };
  u32 kept = 0;
  for (u32 i = 0; i < c.n_reads; ++i) if (!covered(c.reads[i])) c.reads[kept++] = c.reads[i];
  c.n_reads = u8(kept);
  if (!c.more_reads.empty()) std::erase_if(c.more_reads, covered);
  if (c.n_reads < 4) c.reads[c.n_reads++] = by;
  else c.more_reads.push_back(by);
}

void race_read(const Clock& clock, Block& block, u32 address, u32 bytes, const Access& by, bool async, const char* op) {
  for (u32 w = (address - SHARED_BASE) / 4, end = (address + bytes - SHARED_BASE + 3) / 4; w < end; ++w) {
    Cell& c = block.cells[w];
    if (c.write.how == NOBODY) ++run.stats.uninitialised_words;
    else if (!ordered(c.write, clock, async && by_ordinary_store(c.write))) conflict(clock, c.write, SHARED_BASE + 4 * w, op, "writes");
    remember_read(c, clock, by);
  }
}

void race_write(const Clock& clock, Block& block, u32 address, u32 bytes, const Access& by, bool async, const char* op) {
  for (u32 w = (address - SHARED_BASE) / 4, end = (address + bytes - SHARED_BASE + 3) / 4; w < end; ++w) {
    Cell& c = block.cells[w];
    if (c.mbar) fail("barrier", "%s overwrites the mbarrier at shared address %u", op, SHARED_BASE + 4 * w);
    if (!ordered(c.write, clock, async && by_ordinary_store(c.write))) conflict(clock, c.write, SHARED_BASE + 4 * w, op, "writes");
    for (u32 i = 0; i < c.n_reads; ++i) if (!ordered(c.reads[i], clock, false)) conflict(clock, c.reads[i], SHARED_BASE + 4 * w, op, "reads");
    for (const Access& r : c.more_reads) if (!ordered(r, clock, false)) conflict(clock, r, SHARED_BASE + 4 * w, op, "reads");
    c.write = by;
    c.n_reads = 0;
    c.more_reads.clear();
  }
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
