// Which bin of a histogram has the unit of a rank.
#pragma once

#include "device.cuh"

namespace kvx {

// The float whose order_key this is; for keys beyond those of infinities, an infinity. That of
// negative zero no score has: it becomes the number below, as it would equal zero.
__device__ __forceinline__ float float_of(uint32_t key) {
  key = min(max(key, 0x007fffffu), 0xff800000u);
  if (key == 0x7fffffffu) --key;
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Of bins in descending order the one in which the `wanted`-th unit is.
struct Bin {
  int bin, rank, count;  // rank: of the wanted unit among the bin's `count`, from 1
};

// A thread's neighbouring bins, of the first thread the highest, in ascending order.
template <int THREADS>
struct Bins {
  static constexpr int QUADS = KEY_BINS / 4 / THREADS;
  static_assert(KEY_BINS == THREADS * QUADS * 4);
  int4 quads[QUADS];

  // SIGN: 1, or -1 to subtract.
  template <int SIGN = 1>
  __device__ __forceinline__ void add(const Bins& other) {
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      quads[i].x += SIGN * other.quads[i].x, quads[i].y += SIGN * other.quads[i].y;
      quads[i].z += SIGN * other.quads[i].z, quads[i].w += SIGN * other.quads[i].w;
    }
  }
};

// FRESH: from global memory, as other CTAs left it there during this launch.
template <int THREADS, bool FRESH = false>
__device__ __forceinline__ Bins<THREADS> read_bins(const int* bins) {
  constexpr int QUADS = Bins<THREADS>::QUADS;
  const int4* mine = reinterpret_cast<const int4*>(bins) + (THREADS - 1 - threadIdx.x) * QUADS;
  Bins<THREADS> found;
#pragma unroll
  for (int i = 0; i < QUADS; ++i) found.quads[i] = FRESH ? __ldcg(mine + i) : mine[i];
  return found;
}

// warp_sums: of each warp, found: 3 of them, in shared memory.
template <int THREADS>
__device__ __noinline__ Bin find_bin(const Bins<THREADS> bins, int wanted, int* warp_sums,
                                     int* found) {
  constexpr int QUADS = Bins<THREADS>::QUADS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < QUADS; ++i) {
    const int4 quad = bins.quads[i];
    sum += quad.x + quad.y + quad.z + quad.w;
  }
  int before = sum_up_to(sum);
  if (lane == 31) warp_sums[warp] = before;
  if (threadIdx.x < 3) found[threadIdx.x] = 0;
  __syncthreads();
  before += __reduce_add_sync(ALL_LANES, lane < warp ? warp_sums[lane] : 0) - sum;
  const int highest = KEY_BINS - 1 - threadIdx.x * QUADS * 4;
  int rank = wanted - before;
  if (rank > 0 && rank <= sum) {  // one thread, whose bins before the right one have less
    int bin = highest, count = bins.quads[QUADS - 1].w;
#pragma unroll
    for (int i = 1; i < QUADS * 4; ++i) {
      const int4 quad = bins.quads[QUADS - 1 - i / 4];
      const int next = i % 4 == 0 ? quad.w : i % 4 == 1 ? quad.z : i % 4 == 2 ? quad.y : quad.x;
      if (rank > count) rank -= count, count = next, --bin;
    }
    found[0] = bin, found[1] = rank, found[2] = count;
  }
  __syncthreads();
  return {found[0], found[1], found[2]};
}

}  // namespace kvx
