// Barriers of warps, blocks and clusters, mbarriers, and the collectives built on them.
#include "state.h"

namespace emu {

// ---- collectives
void* Lanes::raw(int lane) const { return first[lane].arg; }

static void collective(const char* op, const Site& site, u32 width, State waiting, u32& arrived, void* arg, Work work) {
  tick(site);
  Thread& me = *run.now;
  Block& block = *me.block;
  Thread* first = block.threads + me.tid / width * width;
  if (first - block.threads + width > block.n) fail("divergent", "%s needs %u threads, the block's last group is smaller", op, width);
  me.op = op;
  me.arg = arg;
  for (u32 i = 0; arrived && i < width; ++i) {
    if (first[i].state != waiting) continue;
    if (first[i].op == op && first[i].line == me.line) break;  // those who wait agree already
    fail("divergent", "%s at line %u, while %s is at %s of line %u", op, me.line, name_of(first[i]).c_str(), first[i].op, first[i].line);
  }
  if (++arrived < width) return pause(waiting);
  arrived = 0;
  Lanes lanes{first, me.line};
  work(lanes);
  for (u32 i = 0; i < width; ++i) first[i].state = READY;
}

void warp(const char* op, const Site& site, void* arg, Work work) {
  Block& b = *run.now->block;
  collective(op, site, 32, IN_WARP, b.warps[run.now->tid / 32].arrived, arg, work);
}

void warpgroup(const char* op, const Site& site, void* arg, Work work) {
  Block& b = *run.now->block;
  collective(op, site, 128, IN_WARPGROUP, b.group_arrived[run.now->tid / 128], arg, work);
}

void warp_sync(const Site& site) {
  warp("syncwarp", site, nullptr, [](Lanes& l) {
    Thread* threads[32];
    for (int i = 0; i < 32; ++i) threads[i] = l.first + i;
    meet(threads, 32);
  });
}

// ---- the block's barriers
static void block_complete(Block& b) {
  static std::vector<Thread*> there;
  there.clear();
  for (u32 i = 0; i < b.n; ++i) if (b.threads[i].state == AT_BLOCK) there.push_back(b.threads + i);
  meet(there.data(), u32(there.size()));
  for (Thread* t : there) t->state = READY;
  b.at_block = 0;
  ++run.stats.block_syncs;
}

void block_sync(const Site& site) {
  tick(site);
  Thread& me = *run.now;
  me.op = "syncthreads";
  me.state = AT_BLOCK;
  if (++me.block->at_block == me.block->live) return block_complete(*me.block);
  pause(AT_BLOCK);
}

void named_complete(Block& b, u32 id) {
  Named& n = b.named[id];
  for (u32 i = 0; i < b.n; ++i) {
    Thread& t = b.threads[i];
    if (t.state == AT_NAMED && t.named == id) { acquire(t, n.gathering); t.state = READY; }
  }
  n = {};
  ++run.stats.named_syncs;
}

static void named(u32 id, u32 threads, bool wait, const Site& site) {
  tick(site);
  Thread& me = *run.now;
  if (id > 15) fail("barrier", "named barrier %u, there are 16", id);
  if (threads % 32 || !threads) fail("barrier", "named barrier %u counts %u threads, not a multiple of 32", id, threads);
  Named& n = me.block->named[id];
  if (n.arrived && n.threads != threads) fail("barrier", "named barrier %u counts %u threads here and %u elsewhere", id, threads, n.threads);
  n.threads = threads;
  release(me, n.gathering);
  me.op = wait ? "bar.sync" : "bar.arrive";
  me.named = id;
  me.state = wait ? AT_NAMED : READY;
  if (++n.arrived == threads) return named_complete(*me.block, id);
  if (wait) pause(AT_NAMED);
}

void named_sync(u32 id, u32 threads, const Site& site) { named(id, threads, true, site); }
void named_arrive(u32 id, u32 threads, const Site& site) { named(id, threads, false, site); }

// ---- the cluster's barrier
void cluster_complete(Rendezvous& r) {
  r.published = r.gathering;
  r.arrived = 0;
  ++r.phase;
  ++run.stats.cluster_syncs;
}

void cluster_arrive(bool releases, const Site& site) {
  tick(site);
  Thread& me = *run.now;
  Rendezvous& r = *me.block->barrier;
  if (me.arrived_cluster) fail("barrier", "barrier.cluster.arrive twice without a wait");
  me.arrived_cluster = true;
  me.cluster_phase = r.phase;
  if (releases) release(me, r.gathering);
  else if (!me.fenced.all.empty()) r.gathering.join(me.fenced);
  if (++r.arrived == r.live) cluster_complete(r);
}

void cluster_wait(const Site& site) {
  tick(site);
  Thread& me = *run.now;
  if (!me.arrived_cluster) fail("barrier", "barrier.cluster.wait without an arrive");
  me.op = "barrier.cluster.wait";
  if (me.block->barrier->phase == me.cluster_phase) pause(AT_CLUSTER);
  me.arrived_cluster = false;
  acquire(me, me.block->barrier->published);
}

// ---- mbarriers
static Mbar& mbar_at(u32 address, const char* op) {
  Block& block = block_of(address, op);
  shared_at(block, address, 8, 8, op);
  const u32 own = address & ((1u << CLUSTER_SHIFT) - 1);
  const auto it = block.mbars.find(own);
  if (it == block.mbars.end()) fail("barrier", "%s: there is no mbarrier at shared address %u", op, own);
  touch_remote(block);
  const Cell& c = block.cells[(own - SHARED_BASE) / 4];  // the initialisation is a write like any other
  if (run.now->clock.all[c.write[0].agent] < c.write[0].stamp)
    fail("race", "%s of the mbarrier at shared address %u is not ordered after its initialisation by %s", op, own, describe(c.write[0]).c_str());
  return it->second;
}

void mbar_init(u32 bar, u32 count, const Site& site) {
  tick(site);
  Thread& me = *run.now;
  Block& block = *me.block;
  shared_at(block, bar, 8, 8, "mbarrier.init");
  if (!count || count >= 1u << 20) fail("barrier", "mbarrier.init counts %u arrivals, allowed are 1 to 2^20 - 1", count);
  if (block.mbars.size() == MBARS_A_BLOCK) fail("barrier", "more than %u mbarriers in a block", MBARS_A_BLOCK);
  if (block.mbars.contains(bar)) fail("barrier", "mbarrier.init of the live mbarrier at shared address %u", bar);
  race_write(me.clock, block, bar, 8, by_thread(me, site.line()), false, "mbarrier.init");
  block.cells[(bar - SHARED_BASE) / 4].mbar = block.cells[(bar - SHARED_BASE) / 4 + 1].mbar = true;
  Mbar& m = block.mbars[bar];
  m.count = count;
  m.pending = count;
  m.agent = u16(run.cluster->next_agent++);
}

void mbar_fence_init(const Site& site) {
  tick(site);
  Thread& me = *run.now;
  me.clock.proxy = me.clock.all;
  me.fenced = me.clock;
  ++me.clock.all[me.id];
}

void mbar_complete(Mbar& m) {
  if (m.pending || m.tx) return;
  m.pending = m.count;
  m.published = m.gathering;
  ++m.phase;
}

void mbar_arrive(u32 bar, u32 expect_bytes, const char* op, const Site& site) {
  tick(site);
  Mbar& m = mbar_at(bar, op);
  m.tx += expect_bytes;
  if (m.tx >= 1 << 20) fail("barrier", "%s: %lld bytes expected in one phase, an mbarrier counts to 2^20 - 1", op, (long long)m.tx);
  if (--m.pending < 0) fail("barrier", "%s of the mbarrier at shared address %u: more arrivals than its count of %u", op, bar & 0xffffff, m.count);
  release(*run.now, m.gathering);
  ++run.stats.mbar_arrivals;
  mbar_complete(m);
}

void mbar_wait(u32 bar, u32 parity, const Site& site) {
  tick(site);
  Thread& me = *run.now;
  if (bar >> CLUSTER_SHIFT) fail("barrier", "mbarrier.try_wait on another block's mbarrier");
  if (parity > 1) fail("barrier", "mbarrier.try_wait for parity %u, allowed are 0 and 1", parity);
  Mbar& m = mbar_at(bar, "mbarrier.try_wait");
  ++run.stats.mbar_waits;
  me.op = "mbarrier wait";
  me.bar = bar;
  me.parity = parity;
  if ((m.phase & 1) == parity) pause(AT_MBAR);  // phase n has completed when the count of complete phases is above n
  acquire(me, m.published);
}

// ---- flags: words in global memory, up or down. Who sees one up knows all that its raiser knew (st.release, ld.acquire).
static u32* flag_at(const void* p, bool store, const char* op, const Site& site) {
  tick(site);
  run.now->op = op;
  return static_cast<u32*>(global_at(p, 4, store, op));
}

void flag_raise(void* p, const Site& site) {
  u32* flag = flag_at(p, true, "st.release", site);
  if (*flag) fail("race", "a flag is raised at %p, which nobody has lowered", p);
  *flag = 1;
  Clock& announced = run.flags[p];
  announced = {};
  release(*run.now, announced);
}

void flag_await(const void* p, const Site& site) {
  const u32* flag = flag_at(p, false, "the wait for a flag", site);
  run.now->flag = p;
  if (!*flag) pause(AT_FLAG);
  acquire(*run.now, run.flags[p]);
}

void flag_lower(void* p, const Site& site) { *flag_at(p, true, "st.relaxed", site) = 0; }

// ---- counts: who counts knows all that those did who counted before (atom.acq_rel, a release sequence of read-modify-writes)
u32 count(void* p, const Site& site) {
  u32* word = flag_at(p, true, "atom.acq_rel", site);
  ++run.stats.atomics;
  Clock& announced = run.flags[p];
  acquire(*run.now, announced);
  release(*run.now, announced);
  return (*word)++;
}

u32 count_begun(void* p, const Site& site) {
  u32* word = flag_at(p, true, "atom.relaxed", site);
  ++run.stats.atomics;
  return (*word)++;
}

u32 count_around(void* p, u32 last, const Site& site) {
  u32* word = flag_at(p, true, "atom.relaxed", site);
  ++run.stats.atomics;
  const u32 before = *word;
  *word = before >= last ? 0 : before + 1;
  return before;
}

// ---- words with a mark beside them that says that they are there. Nobody knows anything else by them.
static u32* mark_at(const void* p, bool store, const char* op, const Site& site) {
  tick(site);
  run.now->op = op;
  return static_cast<u32*>(global_at(p, 8, store, op));
}

void mark_leave(void* p, u32 word, const Site& site) {
  u32* words = mark_at(p, true, "st.relaxed", site);
  if (words[1]) fail("race", "a word is left at %p, where one is that nobody has taken", p);
  words[0] = word;
  words[1] = 1;
  run.stats.global_store_bytes += 8;
}

void mark_look(u32* words, const void* p, const Site& site) {
  const u32* there = mark_at(p, false, "ld.relaxed", site);
  const bool seen = run.eager || run.chance() & 1;  // what nothing orders may be seen later
  words[0] = seen ? there[0] : 0;
  words[1] = seen ? there[1] : 0;
  run.stats.global_load_bytes += 8;
}

void mark_await(u32* words, const void* p, const Site& site) {
  const u32* there = mark_at(p, false, "the wait for a word", site);
  run.now->flag = there + 1;
  if (!there[1]) pause(AT_FLAG);
  memcpy(words, there, 8);
  run.stats.global_load_bytes += 8;
}

void mark_clear(void* p, const Site& site) {
  u32* words = mark_at(p, true, "st.relaxed", site);
  words[0] = words[1] = 0;
}

void fence_async(const Site& site) {
  tick(site);
  Thread& me = *run.now;
  me.clock.proxy = me.clock.all;
  me.proxy_fences.push_back(me.now());
  ++me.clock.all[me.id];
  ++me.clock_version;
}

void pdl_wait(const Site& site) {
  tick(site);
  run.now->clock.all.back() = run.now->clock.proxy.back() = 1;
  ++run.now->clock_version;
}

// ---- registers
// The block's registers are dealt evenly at launch; setmaxnreg.dec gives some back, .inc waits until there are enough.
void set_registers(u32 count, bool more, const Site& site) {
  struct Arg { u32 count; bool more; } arg{count, more};
  warpgroup(more ? "setmaxnreg.inc" : "setmaxnreg.dec", site, &arg, [](Lanes& l) {
    const Arg& a = l.arg<Arg>(0);
    Block& b = *l.first->block;
    Warpgroup& g = b.groups[l.first->tid / 128];
    if (a.count % 8 || a.count < 24 || a.count > 256) fail("registers", "setmaxnreg %u, allowed are multiples of 8 from 24 to 256", a.count);
    if (!a.more) {
      if (a.count > g.registers) fail("registers", "setmaxnreg.dec to %u, the threads have %u", a.count, g.registers);
      b.free_registers += 128 * i64(g.registers - a.count);
      g.registers = a.count;
    } else if (a.count < g.registers) fail("registers", "setmaxnreg.inc to %u, the threads have %u", a.count, g.registers);
  });
  if (!more) return;
  Thread& me = *run.now;
  me.op = "setmaxnreg.inc";
  me.wanted_registers = count;
  pause(AT_REGISTERS);
}

// ---- leaving
void thread_leaves(Thread& t) {
  Block& b = *t.block;
  --b.live;
  --run.cluster->live;
  Rendezvous& r = *b.barrier;
  --r.live;
  if (b.live && b.at_block == b.live) block_complete(b);
  if (r.arrived && r.arrived == r.live) cluster_complete(r);
  if (!b.live) {
    check_block_exit(b);
    b.exited = true;
  }
}

}  // namespace emu
