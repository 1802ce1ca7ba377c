// Wrappers of the PTX instructions that the kernels are made of, and their data types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace kvx {

constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ __align__(128) char shared_bytes[];
  return shared_bytes;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Asynchronous copy of 16 bytes to shared memory.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// The same of 4 bytes.
__device__ __forceinline__ void copy_async_4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

// Brings what will be read soon into the level 2 cache, and its address into those of the walk.
__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// The same of 16 bytes, or zeros if `none` is negative: in one instruction more than the copy,
// where a number of bytes takes up to seven.
__device__ __forceinline__ void copy_async_or_zero(uint32_t to, const void* from, int none) {
  asm volatile("{ .reg .pred none; setp.lt.s32 none, %2, 0; "
               "cp.async.cg.shared.global [%0], [%1], 16, none; }" ::"r"(to),
               "l"(from), "r"(none)
               : "memory");
}
__device__ __forceinline__ void copy_async_or_zero(void* to, const void* from, int none) {
  copy_async_or_zero(shared_address(to), from, none);
}

// The same of 8 bytes.
__device__ __forceinline__ void copy_async_8_or_zero(void* to, const void* from, bool valid) {
  const int bytes = valid ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `PENDING` of this thread's groups are still under way.
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint4 load_16(const void* from) {
  return __ldg(reinterpret_cast<const uint4*>(from));
}

// Keeps a value in its register: the compiler would rather compute it anew with every use.
__device__ __forceinline__ float keep(float x) {
  asm volatile("" : "+f"(x));
  return x;
}
__device__ __forceinline__ int keep(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <typename T>
__device__ __forceinline__ T* keep(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// A pair of float16 or bfloat16 travels as uint32, the one of lower index in the lower half.

// A pair of float16, negated where bits 15 and 31 of `bits` are clear: in one instruction, where
// the compiler would make two of it.
__device__ __forceinline__ uint32_t with_sign(uint32_t pair, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xb4;" : "=r"(result) : "r"(pair), "r"(0x80008000u), "r"(bits));
  return result;
}

struct Float16 {
  __device__ static uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  __device__ static float low(uint32_t pair) {
    return __low2float(reinterpret_cast<const __half2&>(pair));
  }
  __device__ static float high(uint32_t pair) {
    return __high2float(reinterpret_cast<const __half2&>(pair));
  }
  __device__ static uint16_t narrow(float x) { return __half_as_ushort(__float2half_rn(x)); }
};

struct BFloat16 {
  __device__ static uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  __device__ static float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ static float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
  __device__ static uint16_t narrow(float x) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  }
};

// Two float8, in the lower 16 bits, to a pair of float16: exact.
__device__ __forceinline__ uint32_t float8_to_half2(uint32_t pair, bool e5m2) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(
      static_cast<__nv_fp8x2_storage_t>(pair & 0xffffu), e5m2 ? __NV_E5M2 : __NV_E4M3);
  return raw.x | static_cast<uint32_t>(raw.y) << 16;
}

// d = a b + c for a of 16 x 16 and b of 16 x 8. Lane l holds rows l / 4 and l / 4 + 8.
template <typename T>
__device__ __forceinline__ void multiply_tiles(float& d0, float& d1, float& d2, float& d3,
                                               const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                               float c0, float c1, float c2, float c3);

template <>
__device__ __forceinline__ void multiply_tiles<Float16>(float& d0, float& d1, float& d2, float& d3,
                                                        const uint32_t (&a)[4], uint32_t b0,
                                                        uint32_t b1, float c0, float c1, float c2,
                                                        float c3) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2),
        "f"(c3));
}

template <>
__device__ __forceinline__ void multiply_tiles<BFloat16>(float& d0, float& d1, float& d2,
                                                         float& d3, const uint32_t (&a)[4],
                                                         uint32_t b0, uint32_t b1, float c0,
                                                         float c1, float c2, float c3) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2),
        "f"(c3));
}

// c += a b
template <typename T>
__device__ __forceinline__ void accumulate_tiles(float (&c)[4], const uint32_t (&a)[4],
                                                 uint32_t b0, uint32_t b1) {
  multiply_tiles<T>(c[0], c[1], c[2], c[3], a, b0, b1, c[0], c[1], c[2], c[3]);
}

// 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  load_matrices(r, shared_address(row));
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  load_matrices_transposed(r, shared_address(row));
}

// An 8 x 8 matrix of 16-bit elements as fragments of products hold it, transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(x));
  return result;
}

// Thread block clusters: Hopper and later. Elsewhere they are never launched.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// A kernel that is launched with `overlap` (launch.cuh) may start before the one before it has
// ended; Hopper and later. Launched without, both of these do nothing.
//
// Waits until the kernel before has ended and what it wrote is there to read. No thread may leave
// without it: a kernel that has ended then means that all before it have.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start once every CTA has come here or has ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The same place in the shared memory of another CTA of the cluster.
template <typename T>
__device__ __forceinline__ T* in_cta(T* mine, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(mine), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  return mine;
#endif
}

// Makes zeros of N integers, with all THREADS of the CTA. How often a thread takes its turn is
// known when compiling, where it is not of a loop that begins with threadIdx.x.
template <int N, int THREADS>
__device__ __forceinline__ void fill_zeros(int* to) {
  static_assert(N % (THREADS * 4) == 0);
#pragma unroll
  for (int i = 0; i < N / 4; i += THREADS) {
    reinterpret_cast<int4*>(to)[i + threadIdx.x] = make_int4(0, 0, 0, 0);
  }
}

// Unsigned integers in the order of the floats; the sum makes 0.0 of -0.0.
__device__ __forceinline__ uint32_t order_key_unless_negative_zero(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ uint32_t order_key(float x) {
  return order_key_unless_negative_zero(x + 0.0f);
}

constexpr int KEY_BINS = 2048;
constexpr int KEY_SHIFT = 21;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Of a row's blocks the one that a token lies in: token / rows.block_size.
__device__ __forceinline__ int block_of(const Rows& rows, int token) {
  return __umulhi(token, rows.block_factor) >> rows.block_shift;
}

// Sum over the lanes up to this one.
__device__ __forceinline__ int sum_up_to(int x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    // The shuffle itself tells whether there is such a lane.
    asm volatile("{ .reg .pred there; .reg .s32 other; "
                 "shfl.sync.up.b32 other|there, %0, %1, 0, 0xffffffff; "
                 "@there add.s32 %0, %0, other; }" : "+r"(x) : "r"(step));
  }
  return x;
}

// Where share `i` of `n` items begins if `shares` are as equal as they can be.
__device__ __forceinline__ int share_begin(int n, int i, int shares) {
  return n / shares * i + min(i, n % shares);
}

}  // namespace kvx
