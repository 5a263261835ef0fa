// What the emulator keeps of a running grid: threads, blocks, clusters, barriers, clocks. Private to the emulator's core.
#pragma once
#include <deque>
#include <list>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "emmy_emu.h"
#include "fiber.h"

namespace emu {

// ---- happens-before
// One component for each agent of a cluster: threads first, then one for each mbarrier and each warpgroup, last the grid
// this one depends on. `all`: what has happened before; `proxy`: that part of it with a proxy fence on the way.
struct Clock {
  std::vector<u32> all, proxy;
  void reset(u32 agents) { all.assign(agents, 0); proxy.assign(agents, 0); }
  void join(const Clock& other);
};

enum How : u8 { NOBODY, THREAD, CP_ASYNC, BULK_LOAD, BULK_STORE, WGMMA };
struct Access {
  u32 stamp = 0;  // the agent's time; for CP_ASYNC and BULK_STORE the number of the thread's group, timed once it is waited for
  u16 agent = 0, line = 0;
  u8 how = NOBODY;
  u8 halves = 3;  // of the word: bit 0 the lower 2 bytes, bit 1 the upper
  bool operator==(const Access&) const = default;
};
struct Cell {  // of one 4-byte word of shared memory, or of an array that resident blocks share
  Access write[2];  // of each half
  bool mbar = false;
  u8 n_reads = 0;
  Access reads[4];
  std::vector<Access> more_reads;
};

// ---- threads
enum State : u8 { READY, IN_WARP, IN_WARPGROUP, AT_BLOCK, AT_NAMED, AT_MBAR, AT_CLUSTER, AT_REGISTERS, AT_FLAG, DONE };
struct Block;
struct SmallCopy { u32 to; const void* from; u32 bytes, source_bytes; };
struct BulkStore { emmy_tensormap map; u32 from; int at[5]; u32 rank; std::vector<u8> data; };
template <class T> struct Groups {             // committed in order, complete in order; numbered from 1
  std::vector<T> open;
  std::deque<std::vector<T>> committed;        // those not yet complete
  std::vector<u32> completed_at{0};            // [group] -> the thread's time when it waited for it, 0: not yet
  u32 open_number() const { return u32(completed_at.size()); }
  void commit() { committed.push_back(std::move(open)); open.clear(); completed_at.push_back(0); }
};
struct Thread {
  Fiber fiber;
  char* stack = nullptr;
  Block* block = nullptr;
  u32 id = 0, tid = 0;                         // in the cluster, in the block
  Dim3 index{};
  State state = READY;
  const char* op = "";
  void* arg = nullptr;
  u32 line = 0;
  const void* flag = nullptr;
  u32 bar = 0, parity = 0, named = 0, cluster_phase = 0, wanted_registers = 0;
  bool arrived_cluster = false;
  Clock clock, fenced;                         // fenced: as of the last fence.mbarrier_init, what a relaxed arrival publishes
  u32 clock_version = 0;
  std::vector<u32> proxy_fences;               // times of its fence.proxy.async, of an earlier one first
  Groups<SmallCopy> copies;
  Groups<BulkStore> stores;
  u32 stores_read = 0, stores_done = 0;        // groups whose source has been read, whose writes have been made
  u32 now() const { return clock.all[id]; }
};

// ---- barriers
struct Mbar {
  u32 count = 0; i64 pending = 0, tx = 0; u32 phase = 0;
  Clock gathering, published;                  // by the arrivals of all phases so far; by the last complete one
  u16 agent = 0;
  u32 issued = 0, landed_prefix = 0;           // bulk copies that report here, numbered from 1
  std::vector<u32> landed;                     // numbers beyond the prefix
};
struct Named { u32 arrived = 0, threads = 0; Clock gathering; };
struct Rendezvous { u32 arrived = 0, live = 0; Clock gathering, published; u32 phase = 0; };

// ---- asynchronous work
struct Flight {                                // a bulk copy on its way to one block
  Block* to_block; u32 to, bar; u32 number;
  bool tensor; emmy_tensormap map; int at[5]; u32 rank;  // not a tensor: an st.async
  u8 data[16]; u32 bytes;
};
struct Accumulators { std::vector<float*> of; std::vector<float> value; u32 in_flight = 0; };
struct Mma { WgmmaShape shape; u64 a, b; std::vector<u32> a_registers; std::vector<const u32*> a_of; bool from_registers, accumulate; Accumulators* d; };
struct Warpgroup {
  std::vector<Mma> open; std::deque<std::vector<Mma>> committed;
  u32 n_committed = 0, n_complete = 0; u16 agent = 0;
  bool fenced = false;
  std::list<Accumulators> accumulators;
  Clock issue; u64 issue_version = ~0ull;
  u32 registers = 0;                           // of each thread, as setmaxnreg counts
};

// ---- groups of lanes that executed the same instruction together, for counting
struct SiteGroup { u32 seen = 0; u64 address[32]; u8 bytes = 0; };
struct SiteLog { std::deque<SiteGroup> groups; u64 base = 0; u64 count[32] = {}; };

struct Warp { u32 arrived = 0; u32 order[32]; std::unordered_map<u64, SiteLog> sites; };
struct Cluster;
struct Block {
  Cluster* cluster; Block* first; Rendezvous* barrier; u32 rank; Dim3 index;  // first, barrier: of its hardware's cluster, in which it has the rank
  Thread* threads; u32 n, live, starts = 0; bool exited = false;  // starts: how many of the hardware's clusters begin before its own
  std::vector<u8> smem; std::vector<Cell> cells;
  std::unordered_map<u32, Mbar> mbars;
  Named named[16]; u32 at_block = 0;
  std::vector<Warp> warps; std::vector<Warpgroup> groups; std::vector<u32> group_arrived;
  std::unordered_map<u32, u32> remote;         // agent of another block -> time of its last access to this block's memory
  i64 free_registers = 0;
};
struct Cluster {                               // of blocks that run side by side: those of one of the hardware's, or all
  std::vector<Block> blocks; std::vector<Thread> threads; std::vector<Rendezvous> barriers; std::deque<Flight> flights;
  u32 n_agents = 0, next_agent = 0, live = 0;
};

// ---- counters; `emmy/codegen/emulator/stats.py` says what each one counts
#define EMU_STATS(X) \
  X(smem_load_waves) X(smem_load_waves_ideal) X(smem_store_waves) X(smem_store_waves_ideal) X(smem_load_bytes) X(smem_store_bytes) \
  X(global_load_sectors) X(global_load_sectors_ideal) X(global_store_sectors) X(global_store_sectors_ideal) \
  X(global_load_bytes) X(global_store_bytes) X(cp_async_bytes) X(tma_load_bytes) X(tma_loads) X(tma_store_bytes) X(prefetch_bytes) X(dsmem_bytes) \
  X(mma) X(wgmma) X(wgmma_macs) X(wgmma_bytes) X(atomics) X(block_syncs) X(named_syncs) X(mbar_arrivals) X(mbar_waits) X(cluster_syncs) \
  X(uninitialised_words) X(switches)
struct Stats {
#define X(name) u64 name = 0;
  EMU_STATS(X)
#undef X
};

struct Array { u8* base; u64 bytes; bool writable, late; u8* mapping; u64 mapping_bytes; std::vector<Cell> cells; };  // cells: of one that is watched
struct Run {
  Thread* now = nullptr; Fiber home; Cluster* cluster = nullptr;
  std::string error; Stats stats; std::mt19937 chance; u32 seed = 0; bool eager = false, together = false, few = false;  // together: every block of the grid at once; few: some of them at a time
  Dim3 grid{}, block{}, cluster_shape{}; u32 cluster_blocks = 1, smem_bytes = 0; u64 budget = 0;
  std::vector<Array> arrays;
  std::unordered_map<const void*, Clock> flags;  // what the last store.release to a word announces
};
extern Run run;
constexpr u32 SHARED_BASE = 1024;              // where sm_90 puts dynamic shared memory, below is reserved
constexpr u32 MBARS_A_BLOCK = 64;
constexpr u32 CLUSTER_SHIFT = 24;              // a shared::cluster address is (rank + 1) << 24 | address

// ---- between the files of the core
void pause(State state);                       // the running fiber gives way; returns when its state is READY again
void tick(const Site& site);                   // one helper call: counted against the budget, its place noted
Block& block_of(u32 address, const char* op);  // the owner of a shared address, which may be in another block
u8* shared_at(Block& block, u32 address, u32 bytes, u32 align, const char* op);
void race_read(const Clock& clock, Block& block, u32 address, u32 bytes, Access by, bool async, const char* op);
void race_write(const Clock& clock, Block& block, u32 address, u32 bytes, Access by, bool async, const char* op);
void race_global(const Clock& clock, Array& array, u64 byte, u32 bytes, Access by, bool store, const char* op);
Access by_thread(const Thread& t, u32 line);
void touch_remote(Block& block);               // remember that the running thread touched another block's memory
void meet(Thread* const* threads, u32 n);      // everything any of them did happens before everything they do next
void acquire(Thread& t, const Clock& clock);
void release(Thread& t, Clock& into);
void land(size_t flight);
bool someone_waits(const Flight& f);
void run_store(BulkStore& s);
void read_store(BulkStore& s, Block& block);
void finish_stores(Thread& t, u32 pending, bool read_only);
void check_block_exit(Block& block);
void mbar_complete(Mbar& m);
void count_global(Thread& t, const void* p, u32 bytes, bool store, const Site& site);
void count_shared(Thread& t, u32 address, u32 bytes, bool store, const Site& site);
void close_counts(Block& block);
void* global_at(const void* p, u32 bytes, bool store, const char* op);
std::string name_of(const Thread& t);
std::string describe(const Access& a);

}  // namespace emu
