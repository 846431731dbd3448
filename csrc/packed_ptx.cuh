// The instructions of packed.cu and its headers that C++ has no words for. tests/emulated.h has the same functions for a CPU.
#pragma once

#include "common.cuh"

namespace fwanda {

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// The lane, from where the compiler does not compute it again and again.
__device__ inline uint32_t lane_register() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Bytes of a and b that the four lowest nibbles of the selector name.
__device__ inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

// Sum of the products of four bytes of a and b, plus c.
__device__ inline uint32_t dot_of_bytes(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// The same for the two halves of a and the two lower bytes of b.
__device__ inline uint32_t dot_of_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// Loads from shared memory. The compiler may move them as far as the address is known; see also keep_order().
__device__ inline uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

// 16 bytes if there is need; else anything.
__device__ inline uint4 load_if(uint32_t address, bool needed) {
  uint4 x;
  asm("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "r"(address), "r"(uint32_t(needed)));
  return x;
}

// x of this lane and of all before it.
__device__ inline int inclusive_scan(int x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
    asm volatile("{ .reg .pred p; .reg .b32 y; shfl.sync.up.b32 y|p, %0, %1, 0, -1; @p add.s32 %0, %0, y; }" : "+r"(x) : "r"(step));
  return x;
}

// Keeps the compiler from moving memory accesses across this point: x is computed before it, and used only after it.
__device__ inline void keep_order(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }
__device__ inline void keep_order(float& x) { asm volatile("" : "+f"(x)::"memory"); }

// Keeps the compiler from computing x again instead of keeping it in a register.
__device__ inline void keep(int& x) { asm volatile("" : "+r"(x)); }

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes of global memory if there is need; else anything.
__device__ inline uint4 load_global_if(const void* p, bool needed) {
  uint4 x;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p), "r"(uint32_t(needed)));
  return x;
}

// A number that another kernel may be writing, from the L2 cache.
__device__ inline uint32_t load_hint(const void* p) {
  uint32_t x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p));
  return x;
}

// Into the L2 cache; a multiple of 16 bytes.
__device__ inline void prefetch_bytes(const void* p, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
}

// Barriers are named by their shared addresses. One opens when so many threads have arrived, and all bytes that it
// expects have been copied.
__device__ inline void init_barrier(uint32_t barrier, uint32_t threads) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A barrier that nobody waits for begins anew.
__device__ inline void renew_barrier(uint32_t barrier, uint32_t threads) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  init_barrier(barrier, threads);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders the reads and writes of this thread in shared memory before bulk copies that start later.
__device__ inline void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Arrives.
__device__ inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void start_copy(uint32_t barrier, void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// 16 bytes, past the queue of the bulk copies. The barrier is the one of arrive_after_copies().
__device__ inline void copy_16(uint32_t barrier, void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Arrives when the copies of 16 bytes that this thread has started are there.
__device__ inline void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void wait_copy(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
}

__device__ inline void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// sums [16, 8] += a [16, 16] times b [16, 8], as fragments.
template <class T>
__device__ inline void multiply(float (&sums)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
#define FWANDA_MULTIPLY(dtype)                                                                                              \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." dtype "." dtype ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (T::kExponent == Bf16::kExponent) {
    FWANDA_MULTIPLY("bf16");
  } else {
    FWANDA_MULTIPLY("f16");
  }
#undef FWANDA_MULTIPLY
}

template <class T>
__device__ inline uint16_t rounded(float value) {
  uint16_t bits;
  if constexpr (T::kExponent == Bf16::kExponent) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  } else {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
  return bits;
}

__device__ inline int block_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}

__device__ inline int blocks_of_cluster() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return int(size);
}

__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// What another block of the cluster has at the place of p.
__device__ inline float load_cluster(const float* p, int block) {
  float value;
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
  return value;
}

}  // namespace fwanda
