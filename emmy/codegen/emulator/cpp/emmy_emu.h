// What a kernel's text sees when it is compiled for the CPU instead of a GPU: CUDA's words, and the functions that the
// emulator's bodies of the helpers are written with. It knows no helper; those are in emmy/codegen/ptx, one entry each.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>
#include <utility>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) emmy_tensormap { u64 words[16]; };

namespace emu {

struct Dim3 { unsigned x, y, z; };
struct Thread;

using Site = std::source_location;  // where in the kernel's text a helper was called: one instruction, for grouping lanes
#define EMMY_SITE emu::Site site = emu::Site::current()

const Dim3& thread_index();
const Dim3& block_index();
const Dim3& block_size();
const Dim3& grid_size();
u32 shared_base();  // address of the dynamic shared memory, in the block's own window

// Ends the run with an error: `kind` is one word, the rest is for a person.
[[noreturn]] void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- collectives: every lane brings an argument; the last to arrive does the work for all, with lane 0 first
struct Lanes {
  Thread* first;
  u32 line;
  void* raw(int lane) const;
  template <class T> T& arg(int lane) const { return *static_cast<T*>(raw(lane)); }
  void read(int lane, u32 address, void* to, u32 bytes) const;  // shared memory, on behalf of that lane
  void write(int lane, u32 address, const void* from, u32 bytes) const;
};
typedef void (*Work)(Lanes& lanes);
void warp(const char* op, const Site& site, void* arg, Work work);
void warpgroup(const char* op, const Site& site, void* arg, Work work);

// ---- memory, as the calling thread does it
void shared_read(u32 address, void* to, u32 bytes, const char* op, const Site& site);
void shared_write(u32 address, const void* from, u32 bytes, const char* op, const Site& site);
void global_read(const void* from, void* to, u32 bytes, const char* op, const Site& site);
void global_write(void* to, const void* from, u32 bytes, const char* op, const Site& site);
float global_add(float* to, float value, const char* op, const Site& site);
u32 cluster_address(u32 address, u32 rank);  // PTX mapa: the same place in another block of the cluster
u32 cluster_rank();
void count_matrix_access(const u32* rows, int n, bool store);  // bank conflicts of 8 rows of 16 bytes at a time
void count_mma();

// ---- asynchronous copies of 4, 8 or 16 bytes
void cp_async(u32 to, const void* from, u32 bytes, u32 source_bytes, const Site& site);
void cp_async_commit(const Site& site);
void cp_async_wait(u32 pending, const Site& site);

// ---- barriers
void block_sync(const Site& site);
void warp_sync(const Site& site);
void named_sync(u32 id, u32 threads, const Site& site);
void named_arrive(u32 id, u32 threads, const Site& site);
void cluster_arrive(bool release, const Site& site);
void cluster_wait(const Site& site);
void mbar_init(u32 bar, u32 count, const Site& site);
void mbar_fence_init(const Site& site);
void mbar_arrive(u32 bar, u32 expect_bytes, const char* op, const Site& site);
void mbar_wait(u32 bar, u32 parity, const Site& site);
void fence_async(const Site& site);
void flag_raise(void* p, const Site& site);
void flag_await(const void* p, const Site& site);
void flag_lower(void* p, const Site& site);
u32 count(void* p, const Site& site);
u32 count_begun(void* p, const Site& site);
u32 count_around(void* p, u32 last, const Site& site);
void mark_leave(void* p, u32 word, const Site& site);
void mark_look(u32* words, const void* p, const Site& site);
void mark_await(u32* words, const void* p, const Site& site);
void mark_clear(void* p, const Site& site);

// ---- bulk copies
void tma_load(u32 to, const emmy_tensormap* map, u32 bar, const int* at, u32 rank, u32 mask, bool multicast, const Site& site);
void tma_store(const emmy_tensormap* map, u32 from, const int* at, u32 rank, const Site& site);
void tma_prefetch(const emmy_tensormap* map, const int* at, u32 rank, const Site& site);
void bulk_commit(const Site& site);
void bulk_wait(u32 pending, bool read_only, const Site& site);
void st_async(u32 to, const void* from, u32 bytes, u32 bar, const Site& site);

// ---- warpgroup matrix instructions
struct WgmmaShape { int n; bool bf16, a_mn, b_mn; };  // *_mn: that operand is MN-major in shared memory
void wgmma_fence(const Site& site);
void wgmma_commit(const Site& site);
void wgmma_wait(u32 pending, const Site& site);
void wgmma_issue(const WgmmaShape& shape, float* d, u64 a, const u32* a_registers, u64 b, bool accumulate, const Site& site);

// ---- the rest
void set_registers(u32 count, bool more, const Site& site);
void pdl_wait(const Site& site);

// ---- numbers
float half_value(u16 bits);
u16 half_bits(double value);  // nearest, ties to even
inline float bfloat_value(u16 bits) { u32 b = u32(bits) << 16; float f; memcpy(&f, &b, 4); return f; }
u16 bfloat_bits(float value);
inline u32 join16(u16 lo, u16 hi) { return u32(lo) | u32(hi) << 16; }

}  // namespace emu

// ---- CUDA's words
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __restrict__
#define __align__(n) alignas(n)
#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define blockDim (emu::block_size())
#define gridDim (emu::grid_size())
inline float __uint_as_float(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }
inline u32 __float_as_uint(float f) { u32 bits; memcpy(&bits, &f, 4); return bits; }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {  // CUDA Math API: byte selector's nibble i of the eight of a, then b
  u32 out = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 byte = selector >> 4 * i & 7;
    out |= ((byte < 4 ? a >> 8 * byte : b >> 8 * (byte - 4)) & 255) << 8 * i;
  }
  return out;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline i64 min(i64 a, i64 b) { return a < b ? a : b; }
inline i64 max(i64 a, i64 b) { return a > b ? a : b; }

// ---- Emmy's words; emmy/codegen/ptx/prelude.py gives their meaning on a GPU
#define EMMY_DEV static inline
#define EMMY_KERNEL(threads, min_blocks) static void
#define EMMY_CLUSTER(x, y, z)
#define EMMY_SMEM(name) const u32 name = emu::shared_base()
#define EMMY_TENSORMAP(name) const emmy_tensormap name

// ---- calling a kernel as the driver does, with an array of pointers to its arguments
namespace emu {
template <class T> T argument(void* p) {
  T t;
  memcpy(static_cast<void*>(&t), p, sizeof t);
  return t;
}
template <class... A, size_t... I> void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(argument<std::remove_cv_t<A>>(arguments[I])...);
}
template <class... A> constexpr int count(void (*)(A...)) { return sizeof...(A); }
template <class... A> void call(void (*kernel)(A...), void** arguments) { call(kernel, arguments, std::index_sequence_for<A...>{}); }
}  // namespace emu
#define EMMY_EMU_EXPORT(kernel) \
  extern "C" const int emmy_emu_arity = emu::count(kernel); \
  extern "C" void emmy_emu_entry(void** arguments) { emu::call(kernel, arguments); }
