// Runs csrc/packed.cu and its headers on a CPU: each thread of a cluster is a coroutine, and those that meet in a collective
// wait for each other. Takes the place of packed_ptx.cuh. Copies arrive late, and until then their target holds garbage; after
// the shared memory of a block comes a page that cannot be read.
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define asm(...)  // of other dtypes in common.cuh
#define __device__
#define __global__
#define __constant__
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct uint3 { unsigned x; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __fmaf_rn(float a, float b, float c) { return a * b + c; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((unsigned long)high << 32 | low) >> (shift & 31));
}
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }

namespace emulated {

struct Values { unsigned of[6]; };

struct Meeting {  // of n threads; values stay until the meeting after the next
  int n = 32, here = 0;
  unsigned long number = 0;
  Values values[2][32];
};

struct Copy { unsigned long* barrier; unsigned char* to; const unsigned char* from; unsigned bytes; int delay; };

struct Block {
  unsigned char* memory;
  unsigned index, rank;
  std::vector<Meeting> warps;
  Meeting all;
  std::vector<Copy> copies;
};

struct Thread { ucontext_t context; Block* block; unsigned index; bool done; std::vector<char> stack; };

inline std::vector<Thread> threads;
inline std::vector<Block> blocks;
inline Meeting cluster;
inline Thread* now;
inline ucontext_t scheduler;
inline unsigned block_size, grid_size, shared_bytes;
inline void (*kernel)();
constexpr unsigned kBase = 1024;  // shared address of the dynamic memory

inline void fail(const char* what) { fprintf(stderr, "emulated: %s\n", what), abort(); }
inline void yield() { swapcontext(&now->context, &scheduler); }

inline const Values* meet(Meeting& m, unsigned place, Values mine) {
  const unsigned long number = m.number;
  if (m.n == 32) m.values[number & 1][place] = mine;
  if (++m.here == m.n) {
    m.here = 0, m.number++;
  } else {
    while (m.number == number) yield();
  }
  return m.values[number & 1];
}

inline const Values* meet_warp(unsigned a = 0, unsigned b = 0, unsigned c = 0, unsigned d = 0, unsigned e = 0, unsigned f = 0) {
  return meet(now->block->warps[now->index / 32], now->index % 32, {{a, b, c, d, e, f}});
}

inline void run_thread() { kernel(), now->done = true, yield(); }

inline void deliver(Block& block) {
  for (size_t i = 0; i < block.copies.size();) {
    Copy& copy = block.copies[i];
    if (copy.delay-- > 0) { i++; continue; }
    memcpy(copy.to, copy.from, copy.bytes);
    *copy.barrier -= (unsigned long)copy.bytes << 32;
    if (*copy.barrier >> 32 == 0) ++*copy.barrier;
    block.copies.erase(block.copies.begin() + i);
  }
}

inline void run_cluster() {
  for (bool left = true; left;) {
    left = false;
    for (Thread& thread : threads) {
      if (thread.done) continue;
      left = true, now = &thread;
      swapcontext(&scheduler, &thread.context);
    }
    for (Block& block : blocks) deliver(block);
  }
}

// Runs `grid` blocks of `size` threads, `in_cluster` at a time.
inline void launch(void (*function)(), unsigned grid, unsigned size, unsigned in_cluster, unsigned shared) {
  kernel = function, grid_size = grid, block_size = size, shared_bytes = shared;
  const size_t page = 4096, room = (shared + page - 1) / page * page;
  threads = std::vector<Thread>(size_t(size) * in_cluster);
  for (unsigned first = 0; first < grid; first += in_cluster) {
    blocks = std::vector<Block>(in_cluster);
    cluster = Meeting(), cluster.n = int(threads.size());
    for (unsigned b = 0; b < in_cluster; b++) {
      auto* pages = (unsigned char*)mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (pages == MAP_FAILED || mprotect(pages + room, page, PROT_NONE)) fail("no memory");
      memset(pages, 0xaa, room);
      blocks[b].memory = pages + room - shared, blocks[b].index = first + b, blocks[b].rank = b;
      blocks[b].warps.resize(size / 32), blocks[b].all.n = int(size);
      for (unsigned i = 0; i < size; i++) {
        Thread& thread = threads[b * size + i];
        thread.block = &blocks[b], thread.index = i, thread.done = false;
        thread.stack.resize(1 << 14);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.context, run_thread, 0);
      }
    }
    run_cluster();
    for (Block& block : blocks) munmap(block.memory + shared - room, room + page);
  }
}

inline uint3 thread_index() { return {now->index}; }
inline uint3 block_index() { return {now->block->index}; }
inline uint3 size_of_grid() { return {grid_size}; }
inline uint3 size_of_block() { return {block_size}; }

}  // namespace emulated

#define threadIdx emulated::thread_index()
#define blockIdx emulated::block_index()
#define blockDim emulated::size_of_block()
#define gridDim emulated::size_of_grid()
#define dynamic_shared (emulated::now->block->memory)

inline void __syncwarp() { emulated::meet_warp(); }
inline void __syncthreads() { emulated::meet(emulated::now->block->all, 0, {}); }
inline int __shfl_sync(unsigned, int x, int from) { return int(emulated::meet_warp(unsigned(x))[from & 31].of[0]); }
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
  const auto* all = emulated::meet_warp(x);
  for (int i = 0; i < 32; i++) x = min(x, all[i].of[0]);
  return x;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const auto* all = emulated::meet_warp(x);
  for (int i = 0; i < 32; i++) x = max(x, all[i].of[0]);
  return x;
}

#include "common.cuh"

namespace fwanda {

inline uint32_t shared_address(const void* p) {
  return uint32_t(static_cast<const unsigned char*>(p) - dynamic_shared) + emulated::kBase;
}

inline uint32_t lane_register() { return uint32_t(lane()); }

inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) {
    if (selector >> 4 * i & 8) emulated::fail("a selector that repeats a sign");
    out |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  }
  return out;
}

inline uint32_t dot_of_bytes(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  return c;
}

inline uint32_t dot_of_halves(uint32_t a, uint32_t b, uint32_t c) {
  return (a & 65535) * (b & 255) + (a >> 16) * (b >> 8 & 255) + c;
}

inline uint32_t load_word(uint32_t address) {
  const bool inside = address >= emulated::kBase && address + 4 <= emulated::kBase + emulated::shared_bytes;
  if (address % 4 || !inside) emulated::fail("a wrong address");
  uint32_t word;
  memcpy(&word, dynamic_shared + address - emulated::kBase, 4);
  return word;
}

inline uint4 load_if(uint32_t address, bool needed) {
  if (!needed) return {~0u, ~0u, ~0u, ~0u};
  if (address % 16) emulated::fail("an address that is not aligned");
  return {load_word(address), load_word(address + 4), load_word(address + 8), load_word(address + 12)};
}

inline int inclusive_scan(int x) {
  const auto* all = emulated::meet_warp(unsigned(x));
  for (int i = 0; i < lane(); i++) x += int(all[i].of[0]);
  return x;
}

inline void keep_order(uint32_t&) {}
inline void keep_order(float&) {}
inline void keep(int&) {}
inline void fence_copies() {}
inline float reciprocal(float x) { return 1 / x; }

inline uint4 load_global_if(const void* p, bool needed) {
  if (!needed) return {~0u, ~0u, ~0u, ~0u};
  uint4 x;
  memcpy(&x, p, 16);
  return x;
}

// Sometimes as if another kernel were writing what is read: any number.
inline uint32_t load_hint(const void* p) {
  return rand() % 4 ? *static_cast<const uint32_t*>(p) : uint32_t(rand()) << 4 ^ uint32_t(rand()) >> rand() % 32;
}

inline void prefetch_bytes(const void* p, uint32_t bytes) {
  if (bytes % 16 || !bytes) emulated::fail("a wrong prefetch");
  volatile unsigned char x = static_cast<const unsigned char*>(p)[0];
  x = static_cast<const unsigned char*>(p)[bytes - 1];  // a page that does not exist is an error here
}

// A barrier: how often it has opened; in its upper half the bytes that are missing, and the threads if there are several.
inline uint64_t& barrier_at(uint32_t address) { return *reinterpret_cast<uint64_t*>(dynamic_shared + address - emulated::kBase); }

inline void init_barrier(uint32_t barrier, uint32_t threads) {
  barrier_at(barrier) = threads > 1 ? uint64_t(threads) << 32 : 0;
}

inline void renew_barrier(uint32_t barrier, uint32_t threads) { init_barrier(barrier, threads); }

inline void expect_bytes(uint32_t barrier, uint32_t bytes) { barrier_at(barrier) += uint64_t(bytes) << 32; }

inline void start_copy(uint32_t barrier, void* to, const void* from, uint32_t bytes) {
  auto* const target = static_cast<unsigned char*>(to);
  auto& block = *emulated::now->block;
  const size_t place = target - block.memory;
  if (bytes % 16 || place % 16 || place + bytes > emulated::shared_bytes) emulated::fail("a wrong copy");
  memset(target, 0xa5, bytes);
  block.copies.push_back({&barrier_at(barrier), target, static_cast<const unsigned char*>(from), bytes, rand() % 8});
}

inline void copy_16(uint32_t barrier, void* to, const void* from) {
  expect_bytes(barrier, 16), start_copy(barrier, to, from, 16);
}

inline void arrive_after_copies(uint32_t barrier) {
  auto& state = barrier_at(barrier);
  state -= 1ull << 32;
  if (state >> 32 == 0) ++state;
}

inline void wait_copy(uint32_t barrier, uint32_t parity) {
  while ((barrier_at(barrier) & 1) == parity) emulated::yield();
}

inline void wait_for_last_kernel() {}
inline void let_next_kernel_start() {}

template <class T>
float product(uint32_t a, uint32_t b) {
  return T::decode(uint16_t(a)) * T::decode(uint16_t(b)) + T::decode(uint16_t(a >> 16)) * T::decode(uint16_t(b >> 16));
}

template <class T>
void multiply(float (&sums)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
  const auto* all = emulated::meet_warp(a[0], a[1], a[2], a[3], b0, b1);
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 4; k++) {
      const auto &row = all[4 * g + k], &column = all[4 * (2 * t + i % 2) + k];
      sums[i] += product<T>(row.of[i / 2], column.of[4]) + product<T>(row.of[i / 2 + 2], column.of[5]);
    }
}

template <class T>
uint16_t rounded(float value) {  // to bf16
  const uint32_t bits = __float_as_uint(value);
  return uint16_t(bits + 0x7fff + (bits >> 16 & 1) >> 16);
}

inline int block_in_cluster() { return int(emulated::now->block->rank); }
inline int blocks_of_cluster() { return int(emulated::blocks.size()); }
inline void sync_cluster() { emulated::meet(emulated::cluster, 0, {}); }

inline float load_cluster(const float* p, int block) {
  float value;
  memcpy(&value, emulated::blocks[block].memory + (reinterpret_cast<const unsigned char*>(p) - dynamic_shared), 4);
  return value;
}

}  // namespace fwanda
