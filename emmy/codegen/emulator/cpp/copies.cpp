// Asynchronous copies. Each takes effect at the last moment its rules allow, and its destination is poison until then:
// cp.async at the wait for its group, bulk loads when nothing else can run, bulk stores at the wait that allows reuse.
#include "state.h"

namespace emu {

struct Map { u8* base; u32 element_bytes, rank, swizzle_bytes; u32 dim[5], box[5]; u32 pad; u64 stride[4]; };
static_assert(sizeof(Map) <= sizeof(emmy_tensormap));
static const Map& read(const emmy_tensormap& m) { return *reinterpret_cast<const Map*>(&m); }
static u32 own(u32 address) { return address & ((1u << CLUSTER_SHIFT) - 1); }

// ---- cp.async
void cp_async(u32 to, const void* from, u32 bytes, u32 source_bytes, const Site& site) {
  tick(site);
  Thread& me = *run.now;
  Block& block = *me.block;
  if (to >> CLUSTER_SHIFT) fail("bounds", "cp.async to another block's shared memory");
  u8* p = shared_at(block, to, bytes, bytes, "cp.async");
  if (source_bytes > bytes) fail("bounds", "cp.async of %u bytes with a source of %u", bytes, source_bytes);
  if (reinterpret_cast<uintptr_t>(from) % bytes) fail("alignment", "cp.async: the global address is not a multiple of %u", bytes);
  for (u32 i = 0; i < source_bytes; i += 2) global_at(static_cast<const u8*>(from) + i, 2, false, "cp.async");
  const Access by{me.copies.open_number(), u16(me.id), u16(site.line()), CP_ASYNC};
  race_write(me.clock, block, to, bytes, by, false, "cp.async");
  run.stats.cp_async_bytes += source_bytes;
  count_shared(me, to, bytes, true, site);
  if (source_bytes) count_global(me, from, source_bytes, false, site);
  if (run.eager) {
    memset(p, 0, bytes);
    memcpy(p, from, source_bytes);
  } else memset(p, 0xff, bytes);
  me.copies.open.push_back({to, from, bytes, source_bytes});
}

void cp_async_commit(const Site& site) {
  tick(site);
  run.now->copies.commit();
}

void cp_async_wait(u32 pending, const Site& site) {
  tick(site);
  Thread& me = *run.now;
  auto& c = me.copies;
  while (c.committed.size() > pending) {
    for (const SmallCopy& s : c.committed.front()) {
      u8* p = me.block->smem.data() + (s.to - SHARED_BASE);
      if (run.eager) continue;
      memset(p, 0, s.bytes);
      memcpy(p, s.from, s.source_bytes);
    }
    c.completed_at[c.open_number() - c.committed.size()] = me.now();
    c.committed.pop_front();
  }
}

// ---- tensor maps
static void check_map(const Map& m, u32 rank, const char* op) {
  if (m.rank != rank) fail("copy", "%s of %u dimensions with a tensor map of %u", op, rank, m.rank);
}

static u32 box_bytes(const Map& m) {
  u32 n = m.element_bytes;
  for (u32 d = 0; d < m.rank; ++d) n *= m.box[d];
  return n;
}

// 16-byte chunks are permuted within rows of the swizzle's width by address bits 7 and up (CUDA driver API: CUtensorMapSwizzle).
static u32 swizzled(u32 address, u32 swizzle_bytes) { return swizzle_bytes ? address ^ ((address >> 7 & (swizzle_bytes / 16 - 1)) << 4) : address; }

// Calls each(shared offset in the box, global pointer or null outside the tensor) for every element of the box.
template <class F> static void walk(const Map& m, const int* at, F each) {
  u32 rows = 1;
  for (u32 d = 1; d < m.rank; ++d) rows *= m.box[d];
  for (u32 r = 0; r < rows; ++r) {
    u8* row = m.base;
    bool inside = true;
    u32 rest = r;
    for (u32 d = 1; d < m.rank; ++d) {
      const i64 i = at[d] + i64(rest % m.box[d]);
      rest /= m.box[d];
      inside = inside && i >= 0 && i < m.dim[d];
      row += i * i64(m.stride[d - 1]);
    }
    for (u32 x = 0; x < m.box[0]; ++x) {
      const i64 i = i64(at[0]) + x;
      each((r * m.box[0] + x) * m.element_bytes, inside && i >= 0 && i < m.dim[0] ? row + i * m.element_bytes : nullptr);
    }
  }
}

static void check_box(const Map& m, u32 address, const char* op) {
  const u32 align = m.swizzle_bytes ? 8 * m.swizzle_bytes : 128;
  if (own(address) % align) fail("alignment", "%s: shared address %u is not a multiple of %u, which %s needs", op, own(address), align, m.swizzle_bytes ? "its swizzle" : "a bulk copy");
}

// When it is asked for, not when it happens: whether the array may be touched yet.
static void check_array(const Map& m, bool store, const char* op) {
  for (const Array& a : run.arrays) if (m.base >= a.mapping && m.base < a.mapping + a.mapping_bytes) global_at(m.base, 2, store, op);
}

// ---- bulk loads
static void send(Block& to_block, u32 to, u32 bar, u32 bytes, Flight f, const char* op, u32 line) {
  Thread& me = *run.now;
  u8* p = shared_at(to_block, to, bytes, 1, op);
  const auto it = to_block.mbars.find(own(bar));
  if (it == to_block.mbars.end()) fail("barrier", "%s: there is no mbarrier at shared address %u of cluster rank %u", op, own(bar), to_block.rank);
  const Access& init = to_block.cells[(own(bar) - SHARED_BASE) / 4].write[0];
  if (me.clock.proxy[init.agent] < init.stamp)
    fail(me.clock.all[init.agent] < init.stamp ? "race" : "proxy", "%s reports to the mbarrier at shared address %u, whose initialisation is not fenced for the async proxy and ordered before it", op, own(bar));
  Mbar& m = it->second;
  touch_remote(to_block);
  const Access by{++m.issued, m.agent, u16(line), BULK_LOAD};
  race_write(me.clock, to_block, own(to), bytes, by, true, op);
  memset(p, 0xff, bytes);
  f.to_block = &to_block;
  f.to = own(to);
  f.bar = own(bar);
  f.bytes = bytes;
  f.number = m.issued;
  run.cluster->flights.push_back(f);
  if (run.eager) land(run.cluster->flights.size() - 1);
}

void tma_load(u32 to, const emmy_tensormap* map, u32 bar, const int* at, u32 rank, u32 mask, bool multicast, const Site& site) {
  tick(site);
  const char* op = multicast ? "TMA multicast load" : "TMA load";

  const Map& m = read(*map);
  check_map(m, rank, op);
  check_box(m, to, op);
  check_array(m, false, op);
  Flight f{};
  f.tensor = true;
  f.map = *map;
  f.rank = rank;
  memcpy(f.at, at, rank * sizeof(int));
  const u32 bytes = box_bytes(m);
  run.stats.tma_load_bytes += bytes;           // once, however many blocks receive it
  ++run.stats.tma_loads;
  if (!multicast) return send(block_of(to, op), to, bar, bytes, f, op, site.line());
  const u32 blocks = run.cluster_blocks;
  Block* first = run.now->block->first;
  if (!mask || mask >> blocks) fail("copy", "%s to the blocks of mask 0x%x, the cluster has %u blocks", op, mask, blocks);
  for (u32 r = 0; r < blocks; ++r)
    if (mask >> r & 1) {
      if (first[r].exited) fail("exit", "%s: the block of cluster rank %u has ended", op, r);
      send(first[r], own(to), own(bar), bytes, f, op, site.line());
    }
}

// Moves nothing; but the array must be one that may be touched by now.
void tma_prefetch(const emmy_tensormap* map, const int* at, u32 rank, const Site& site) {
  tick(site);
  const Map& m = read(*map);
  check_map(m, rank, "TMA prefetch");
  check_array(m, false, "TMA prefetch");
  walk(m, at, [&](u32, const u8* from) { if (from) run.stats.prefetch_bytes += m.element_bytes; });
}

void st_async(u32 to, const void* from, u32 bytes, u32 bar, const Site& site) {
  tick(site);
  const char* op = "st.async";
  Block& block = block_of(to, op);
  if (&block_of(bar, op) != &block) fail("copy", "st.async to one block, reporting to another's mbarrier");
  shared_at(block, to, bytes, bytes, op);
  Flight f{};
  memcpy(f.data, from, bytes);
  run.stats.dsmem_bytes += bytes;
  send(block, to, bar, bytes, f, op, site.line());
}

void land(size_t flight) {
  const Flight f = run.cluster->flights[flight];
  run.cluster->flights.erase(run.cluster->flights.begin() + long(flight));
  u8* smem = f.to_block->smem.data();
  if (f.tensor) {
    const Map& m = read(f.map);
    walk(m, f.at, [&](u32 offset, const u8* from) {
      u8* p = smem + (swizzled(f.to + offset, m.swizzle_bytes) - SHARED_BASE);
      if (from) memcpy(p, from, m.element_bytes);
      else memset(p, 0, m.element_bytes);
    });
  } else memcpy(smem + (f.to - SHARED_BASE), f.data, f.bytes);
  Mbar& m = f.to_block->mbars.at(f.bar);
  m.landed.push_back(f.number);
  for (bool more = true; more;) {              // publish only what every earlier copy has reached too
    more = false;
    for (size_t i = 0; i < m.landed.size(); ++i)
      if (m.landed[i] == m.landed_prefix + 1) {
        ++m.landed_prefix;
        m.landed.erase(m.landed.begin() + long(i));
        more = true;
        break;
      }
  }
  Clock landed;
  landed.reset(run.cluster->n_agents);
  landed.all[m.agent] = landed.proxy[m.agent] = m.landed_prefix;
  m.gathering.join(landed);
  m.tx -= f.bytes;
  mbar_complete(m);
}

bool someone_waits(const Flight& f) {
  for (u32 i = 0; i < f.to_block->n; ++i) {
    const Thread& t = f.to_block->threads[i];
    if (t.state == AT_MBAR && t.bar == f.bar) return true;
  }
  return false;
}

// ---- bulk stores
void tma_store(const emmy_tensormap* map, u32 from, const int* at, u32 rank, const Site& site) {
  tick(site);
  Thread& me = *run.now;
  const Map& m = read(*map);
  check_map(m, rank, "TMA store");
  check_box(m, from, "TMA store");
  check_array(m, true, "TMA store");
  if (from >> CLUSTER_SHIFT) fail("bounds", "TMA store from another block's shared memory");
  for (u32 d = 0; d < rank; ++d) if (at[d] < 0) fail("bounds", "TMA store at coordinate %d of dimension %u: a GPU faults below 0", at[d], d);
  const u32 bytes = box_bytes(m);
  shared_at(*me.block, from, bytes, 1, "TMA store");
  const Access by{me.stores.open_number(), u16(me.id), u16(site.line()), BULK_STORE};
  race_read(me.clock, *me.block, from, bytes, by, true, "TMA store");
  BulkStore s{*map, from, {}, rank, {}};
  memcpy(s.at, at, rank * sizeof(int));
  run.stats.tma_store_bytes += bytes;
  if (run.eager) read_store(s, *me.block);
  me.stores.open.push_back(std::move(s));
}

void read_store(BulkStore& s, Block& block) {
  if (!s.data.empty()) return;
  const Map& m = read(s.map);
  const u8* smem = block.smem.data();
  s.data.resize(box_bytes(m));
  for (u32 o = 0; o < s.data.size(); o += m.element_bytes) memcpy(&s.data[o], smem + (swizzled(s.from + o, m.swizzle_bytes) - SHARED_BASE), m.element_bytes);
}

void run_store(BulkStore& s) {
  const Map& m = read(s.map);
  walk(m, s.at, [&](u32 offset, u8* to) {
    if (to) memcpy(global_at(to, m.element_bytes, true, "TMA store"), &s.data[offset], m.element_bytes);
  });
}

void bulk_commit(const Site& site) {
  tick(site);
  run.now->stores.commit();
}

void finish_stores(Thread& t, u32 pending, bool read_only) {
  auto& s = t.stores;
  const u32 complete = u32(s.committed.size()) > pending ? u32(s.committed.size()) - pending : 0;
  const u32 oldest = s.open_number() - u32(s.committed.size());
  for (u32 i = 0; i < complete; ++i) {
    for (BulkStore& b : s.committed[i]) read_store(b, *t.block);
    u32& at = s.completed_at[oldest + i];
    if (!at) at = t.now();
  }
  if (read_only) return;
  for (u32 i = 0; i < complete; ++i) {
    for (BulkStore& b : s.committed.front()) run_store(b);
    s.committed.pop_front();
  }
}

void bulk_wait(u32 pending, bool read_only, const Site& site) {
  tick(site);
  finish_stores(*run.now, pending, read_only);
}

}  // namespace emu
