// Runs a grid: one fiber a thread, warps in an order the seed chooses, every block of a cluster at once.
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "state.h"

#if defined(__x86_64__) && !defined(EMMY_EMU_UCONTEXT)
asm(".text\n.globl emmy_emu_switch\n.type emmy_emu_switch,@function\nemmy_emu_switch:\n"
    " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    " movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
    " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
#endif

namespace emu {

Run run;
static void (*entry)(void**);
static void** parameters;
void thread_leaves(Thread& t);

const Dim3& thread_index() { return run.now->index; }
const Dim3& block_index() { return run.now->block->index; }
const Dim3& block_size() { return run.block; }
const Dim3& grid_size() { return run.grid; }

void pause(State state) {
  Thread& t = *run.now;
  t.state = state;
  fiber_switch(t.fiber, run.home);
}

void fail(const char* kind, const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  run.error = std::string(kind) + "\n" + text;
  if (Thread* t = run.now) {
    char where[160];
    snprintf(where, sizeof where, "\nblock (%u, %u, %u), %s, line %u", t->block->index.x, t->block->index.y, t->block->index.z, name_of(*t).c_str(), t->line);
    run.error += where;
    fiber_switch(t->fiber, run.home);
  }
  abort();                                     // only fibers fail
}

void tick(const Site& site) {
  run.now->line = site.line();
  if (!run.budget--) fail("budget", "more helper calls than the budget allows: a loop that does not end?");
}

static void body() {
  Thread& t = *run.now;
  entry(parameters);
  t.line = 0;
  for (u32 g = 1; g <= t.copies.committed.size(); ++g)
    if (!t.copies.committed[g - 1].empty()) fail("copy", "the thread ends with a cp.async group it never waited for");
  if (!t.copies.open.empty()) fail("copy", "the thread ends with cp.async copies it never committed");
  if (!t.stores.open.empty()) fail("copy", "the thread ends with TMA stores it never committed");
  for (u32 g = 1; g < t.stores.open_number(); ++g)
    if (!t.stores.completed_at[g]) fail("copy", "the thread ends with a TMA store whose source it never waited for");
  finish_stores(t, 0, false);
  for (const Warpgroup& g : t.block->groups)
    if (&g == &t.block->groups[t.tid / 128] && (!g.open.empty() || !g.committed.empty())) fail("copy", "the warpgroup ends with a wgmma it never waited for");
  thread_leaves(t);
  pause(DONE);
}

// ---- faults of plain pointers: a fault inside a fiber becomes an error of the run
static void on_fault(int, siginfo_t* info, void*) {
  const u8* at = static_cast<const u8*>(info->si_addr);
  for (size_t i = 0; i < run.arrays.size(); ++i) {
    const Array& a = run.arrays[i];
    if (at >= a.mapping - 4096 && at < a.mapping + a.mapping_bytes + 4096)
      fail("bounds", "a plain access %s array %zu, at byte %lld of %llu", at >= a.base && at < a.base + a.bytes ? "writes read-only" : "leaves", i, (long long)(at - a.base), a.bytes);
  }
  fail("fault", "access to address %p, or a thread's stack is used up", info->si_addr);
}

class Faults {
 public:
  Faults() {
    stack_t mine{};
    mine.ss_sp = memory_;
    mine.ss_size = sizeof memory_;
    sigaltstack(&mine, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &old_segv_);
    sigaction(SIGBUS, &action, &old_bus_);
  }
  ~Faults() {
    sigaction(SIGSEGV, &old_segv_, nullptr);
    sigaction(SIGBUS, &old_bus_, nullptr);
    if (old_stack_.ss_sp || old_stack_.ss_flags) sigaltstack(&old_stack_, nullptr);
    else { stack_t off{}; off.ss_flags = SS_DISABLE; sigaltstack(&off, nullptr); }
  }
 private:
  static inline char memory_[64 << 10];
  stack_t old_stack_{};
  struct sigaction old_segv_{}, old_bus_{};
};

// ---- scheduling
static bool wakes(Thread& t) {
  switch (t.state) {
    case AT_MBAR: return (t.block->mbars.at(t.bar).phase & 1) != t.parity;
    case AT_FLAG: return *static_cast<const u32*>(t.flag) != 0;
    case AT_CLUSTER: return t.block->barrier->phase != t.cluster_phase;
    case AT_REGISTERS: {                       // the whole warpgroup at once
      Block& b = *t.block;
      Warpgroup& g = b.groups[t.tid / 128];
      const i64 more = 128 * (i64(t.wanted_registers) - g.registers);
      if (more > b.free_registers) return false;
      b.free_registers -= more;
      g.registers = t.wanted_registers;
      return true;
    }
    default: return false;
  }
}

static bool run_warp(Block& b, u32 w) {
  bool ran = false;
  for (bool again = true; again;) {
    again = false;
    for (u32 i = 0; i < 32; ++i) {
      const u32 l = w * 32 + b.warps[w].order[i];
      if (l >= b.n) continue;
      Thread& t = b.threads[l];
      if (t.state != READY) {
        if (!wakes(t)) continue;
        t.state = READY;
      }
      run.now = &t;
      ++run.stats.switches;
      fiber_switch(run.home, t.fiber);
      run.now = nullptr;
      if (!run.error.empty()) return true;
      ran = again = true;
    }
  }
  return ran;
}

// A bulk copy arrives when nothing else can move, and only one that somebody waits for: as late as may be.
static bool deliver() {
  std::vector<size_t> awaited;
  for (size_t i = 0; i < run.cluster->flights.size(); ++i) if (someone_waits(run.cluster->flights[i])) awaited.push_back(i);
  if (awaited.empty()) return false;
  land(awaited[run.seed ? run.chance() % awaited.size() : 0]);
  return true;
}

static std::string why_waiting(const Thread& t) {
  char s[200];
  if (t.state == AT_MBAR) {
    const Mbar& m = t.block->mbars.at(t.bar);
    snprintf(s, sizeof s, "waits for parity %u of the mbarrier at shared address %u (phase %u: %lld of %u arrivals and %lld bytes missing)", t.parity, t.bar, m.phase,
             (long long)m.pending, m.count, (long long)m.tx);
  } else if (t.state == AT_NAMED) {
    const Named& n = t.block->named[t.named];
    snprintf(s, sizeof s, "waits at named barrier %u (%u of %u threads there)", t.named, n.arrived, n.threads);
  } else if (t.state == IN_WARP || t.state == IN_WARPGROUP) snprintf(s, sizeof s, "waits for the rest of its %s at %s", t.state == IN_WARP ? "warp" : "warpgroup", t.op);
  else if (t.state == AT_BLOCK) snprintf(s, sizeof s, "waits at syncthreads (%u of %u threads there)", t.block->at_block, t.block->live);
  else if (t.state == AT_REGISTERS) snprintf(s, sizeof s, "waits for %u registers a thread, %lld are free", t.wanted_registers, (long long)t.block->free_registers);
  else snprintf(s, sizeof s, "waits at %s", t.op);
  return s + (", line " + std::to_string(t.line));
}

static std::string deadlock() {
  std::string text = "deadlock\nno thread can go on";
  for (Block& b : run.cluster->blocks) {
    std::string last;
    u32 from = 0;
    const auto say = [&](u32 to) {
      if (last.empty()) return;
      text += "\n  block (" + std::to_string(b.index.x) + ", " + std::to_string(b.index.y) + ", " + std::to_string(b.index.z) + ") threads " + std::to_string(from) + " to " +
              std::to_string(to - 1) + ": " + last;
    };
    for (u32 i = 0; i < b.n; ++i) {
      const std::string now = b.threads[i].state == DONE ? "" : why_waiting(b.threads[i]);
      if (now == last) continue;
      say(i);
      last = now;
      from = i;
    }
    say(b.n);
  }
  return text;
}

static void run_cluster(Cluster& c) {
  struct Turn { Block* block; u32 warp; };
  std::vector<Turn> turns;
  for (Block& b : c.blocks) for (u32 w = 0; w < b.warps.size(); ++w) turns.push_back({&b, w});
  // Seed 0 goes in order. Odd seeds always run the warp of highest priority that can move, even ones go round by chance.
  const bool greedy = run.seed & 1;
  if (run.seed) std::shuffle(turns.begin(), turns.end(), run.chance);
  const size_t groups = c.barriers.size(), room = run.few ? 1 + run.seed % groups : groups;
  while (c.live && run.error.empty()) {
    bool ran = false;
    size_t begun = room;                       // where few have room, a block begins when one before it has ended
    for (const Rendezvous& r : c.barriers) begun += !r.live;
    if (run.seed && !greedy) std::shuffle(turns.begin(), turns.end(), run.chance);
    for (size_t i = 0; i < turns.size() && run.error.empty(); ++i) {
      if (turns[i].block->starts >= begun) continue;
      const bool moved = run_warp(*turns[i].block, turns[i].warp);
      ran = ran || moved;
      if (moved && greedy && i) break;         // back to the highest priority
    }
    if (!ran && run.error.empty() && !deliver()) run.error = deadlock();
  }
}

static void order_lanes(Warp& w) {
  for (u32 i = 0; i < 32; ++i) w.order[i] = i;
  if (run.seed % 3 == 1) std::reverse(w.order, w.order + 32);
  else if (run.seed % 3 == 2) std::shuffle(w.order, w.order + 32, run.chance);
}

constexpr size_t STACK = 128 << 10;            // its lowest page is a guard
constexpr size_t POISONED = 16 << 10;          // of each stack: variables that nobody set are NaN

static void start(Cluster& c, Dim3 first, char* stacks) {
  const Dim3 s = run.cluster_shape, bd = run.block;
  const u32 n_blocks = s.x * s.y * s.z, n = bd.x * bd.y * bd.z, groups = (n + 127) / 128;
  c.blocks = std::vector<Block>(n_blocks);
  c.threads = std::vector<Thread>(size_t(n_blocks) * n);
  c.next_agent = n_blocks * n;
  c.n_agents = n_blocks * (n + groups + MBARS_A_BLOCK) + 1;
  c.live = n_blocks * n;
  c.flights.clear();
  c.barriers = std::vector<Rendezvous>(n_blocks / run.cluster_blocks);
  run.cluster = &c;
  std::vector<u32> order(c.barriers.size());
  for (u32 i = 0; i < order.size(); ++i) order[i] = i;
  if (run.few && run.seed) std::shuffle(order.begin(), order.end(), run.chance);
  for (u32 r = 0; r < n_blocks; ++r) {
    Block& b = c.blocks[r];
    b.cluster = &c;
    b.rank = r % run.cluster_blocks;
    b.first = &c.blocks[r - b.rank];
    b.barrier = &c.barriers[r / run.cluster_blocks];
    b.barrier->live += n;
    b.starts = order[r / run.cluster_blocks];
    b.index = {first.x + r % s.x, first.y + r / s.x % s.y, first.z + r / (s.x * s.y)};
    b.threads = &c.threads[size_t(r) * n];
    b.n = b.live = n;
    b.smem.assign(run.smem_bytes, 0xff);       // 0xffff is a NaN in f16, bf16 and f32: what is read unwritten shows
    b.cells.assign((run.smem_bytes + 3) / 4, Cell{});
    b.warps.resize((n + 31) / 32);
    b.groups.resize(groups);
    b.group_arrived.assign(groups, 0);
    const u32 registers = std::min(65536 / n / 8 * 8, 248u);
    for (Warpgroup& g : b.groups) { g.agent = u16(c.next_agent++); g.registers = registers; }
    for (Warp& w : b.warps) order_lanes(w);
    for (u32 i = 0; i < n; ++i) {
      Thread& t = b.threads[i];
      t.id = r * n + i;
      t.tid = i;
      t.block = &b;
      t.index = {i % bd.x, i / bd.x % bd.y, i / (bd.x * bd.y)};
      t.clock.reset(c.n_agents);
      t.clock.all[t.id] = 1;
      t.stack = stacks + STACK * t.id;
      memset(t.stack + STACK - POISONED, 0xff, POISONED);
      fiber_make(t.fiber, t.stack, STACK, body);
    }
  }
}

static void run_grid() {
  const Dim3 g = run.grid, s = run.cluster_shape;
  const size_t n = size_t(s.x) * s.y * s.z * run.block.x * run.block.y * run.block.z;
  char* stacks = static_cast<char*>(mmap(nullptr, STACK * n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (size_t i = 0; i < n; ++i) mprotect(stacks + STACK * i, 4096, PROT_NONE);
  std::vector<Dim3> clusters;
  for (u32 z = 0; z < g.z; z += s.z) for (u32 y = 0; y < g.y; y += s.y) for (u32 x = 0; x < g.x; x += s.x) clusters.push_back({x, y, z});
  if (run.seed) std::shuffle(clusters.begin(), clusters.end(), run.chance);
  {
    Faults faults;
    Cluster cluster;
    for (size_t i = 0; i < clusters.size() && run.error.empty(); ++i) {
      start(cluster, clusters[i], stacks);
      run_cluster(cluster);
      if (run.error.empty()) for (Block& b : cluster.blocks) close_counts(b);
    }
    run.cluster = nullptr;
  }
  munmap(stacks, STACK * n);
}

// ---- global arrays: copied between guard pages for the run
constexpr u8 CANARY = 0xa5;
static void map_array(Array& a, const void* data) {
  // The start is aligned as cudaMalloc aligns, the end is as near to a guard page as that allows.
  const u64 room = std::max<u64>((a.bytes + 255) / 256 * 256, 256), pages = (room + 4095) / 4096 * 4096;
  a.mapping_bytes = pages;
  u8* raw = static_cast<u8*>(mmap(nullptr, pages + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  a.mapping = raw + 4096;
  mprotect(a.mapping, pages, PROT_READ | PROT_WRITE);
  memset(a.mapping, CANARY, pages);
  a.base = a.mapping + pages - room;
  memcpy(a.base, data, a.bytes);
  if (!a.writable) mprotect(a.mapping, pages, PROT_READ);
}

static bool canary_lives(const Array& a) {
  for (const u8* p = a.mapping; p < a.base; ++p) if (*p != CANARY) return false;
  for (const u8* p = a.base + a.bytes; p < a.mapping + a.mapping_bytes; ++p) if (*p != CANARY) return false;
  return true;
}

}  // namespace emu

// ---- what Python calls
struct EmuArray { void* data; u64 bytes; int writable, late; };
struct EmuArgument { int kind, array; u64 offset; unsigned char bytes[128]; };  // kind 0: a value, 1: a pointer, 2: a tensor map
struct EmuLaunch {
  u32 grid[3], block[3], cluster[3], smem_bytes, seed, eager, together, few, n_arrays, n_arguments;
  u64 budget;
  EmuArray* arrays;
  EmuArgument* arguments;
};

extern "C" const char* emmy_emu_stat_names() {
#define X(name) #name " "
  return EMU_STATS(X);
#undef X
}

extern "C" const char* emmy_emu_run(void (*kernel)(void**), const EmuLaunch* launch, u64* stats) {
  using namespace emu;
  run = Run{};
  run.grid = {launch->grid[0], launch->grid[1], launch->grid[2]};
  run.block = {launch->block[0], launch->block[1], launch->block[2]};
  run.few = launch->few;
  run.together = launch->together;             // blocks are side by side as those of a cluster are; neighbours along x form clusters
  run.cluster_blocks = launch->cluster[0] * launch->cluster[1] * launch->cluster[2];
  run.cluster_shape = run.together ? run.grid : Dim3{launch->cluster[0], launch->cluster[1], launch->cluster[2]};
  run.smem_bytes = launch->smem_bytes;
  run.seed = launch->seed;
  run.eager = launch->eager;
  run.budget = launch->budget;
  run.chance.seed(launch->seed);
  for (u32 i = 0; i < launch->n_arrays; ++i) {
    const EmuArray& a = launch->arrays[i];
    run.arrays.push_back({nullptr, a.bytes, a.writable != 0, a.late != 0, nullptr, 0, {}});
    if (run.together && a.writable) run.arrays.back().cells.resize((a.bytes + 3) / 4);
    map_array(run.arrays.back(), a.data);
  }
  std::vector<EmuArgument> arguments(launch->arguments, launch->arguments + launch->n_arguments);
  std::vector<void*> pointers;
  std::vector<emmy_tensormap> maps(arguments.size());
  std::vector<u8*> addresses(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    EmuArgument& a = arguments[i];
    if (a.kind) addresses[i] = run.arrays[size_t(a.array)].base + a.offset;
    if (a.kind == 2) {
      memcpy(&maps[i], a.bytes, 128);
      memcpy(&maps[i], &addresses[i], 8);
    }
    pointers.push_back(a.kind == 0 ? static_cast<void*>(a.bytes) : a.kind == 1 ? static_cast<void*>(&addresses[i]) : static_cast<void*>(&maps[i]));
  }
  entry = kernel;
  parameters = pointers.data();
  run_grid();
  for (u32 i = 0; i < launch->n_arrays; ++i) {
    Array& a = run.arrays[i];
    if (a.writable && run.error.empty() && !canary_lives(a)) run.error = "bounds\na plain store lands just outside array " + std::to_string(i);
    if (a.writable) memcpy(launch->arrays[i].data, a.base, a.bytes);
    munmap(a.mapping - 4096, a.mapping_bytes + 8192);
  }
  memcpy(stats, &run.stats, sizeof run.stats);
  static std::string error;
  error = run.error;
  return error.c_str();
}
