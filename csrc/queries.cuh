// The queries of a row's KV head as float16 fragments of a matrix product's right-hand side.
#pragma once

#include <initializer_list>

#include "device.cuh"
#include "params.h"

namespace kvx {

// Which head and channels lane l holds, of a column n = l / 4 and a quarter t = l % 4 of the depth.
// HEADS: that the 8 columns hold; of 4, every one twice. BY_QUARTER: a lane has a quarter of the
// channels in one piece, as 1-bit keys have it. Else lanes take turns every 8 channels.
template <int D, int HEADS, bool BY_QUARTER>
struct QueryLayout {
  static constexpr int CHUNKS = D / 32;  // of 8 channels, per lane
  __device__ static int head(int tile, int lane) { return tile * HEADS + lane / 4 % HEADS; }
  __device__ static int channel(int chunk, int lane) {
    return BY_QUARTER ? (lane % 4) * (D / 4) + chunk * 8 : (chunk * 4 + lane % 4) * 8;
  }
};

__device__ __forceinline__ float2 unpack(uint32_t pair, Dtype dtype) {
  if (dtype == Dtype::BFLOAT16) return make_float2(BFloat16::low(pair), BFloat16::high(pair));
  return make_float2(Float16::low(pair), Float16::high(pair));
}

// A row's queries on their way into fragments[TILES][CHUNKS][32], zeros for heads that there are
// not. All threads of the CTA take part.
template <int D, int TILES, int HEADS, bool BY_QUARTER, int THREADS>
struct QueryLoader {
  using Layout = QueryLayout<D, HEADS, BY_QUARTER>;
  static constexpr int COUNT = TILES * Layout::CHUNKS * 32, PER = (COUNT + THREADS - 1) / THREADS;
  uint4 raw[PER];
  Dtype dtype;

  __device__ QueryLoader(const Queries& queries, Dtype of, int token, int kv_head) : dtype(of) {
    const int64_t first = token * queries.token_stride +
                          static_cast<int64_t>(kv_head) * queries.heads * queries.head_stride;
    const char* base = static_cast<const char*>(queries.data) + first * 2;
#pragma unroll
    for (int k = 0; k < PER; ++k) {
      const int i = k * THREADS + threadIdx.x;
      const int lane = i % 32, chunk = i / 32 % Layout::CHUNKS, tile = i / 32 / Layout::CHUNKS;
      const int head = Layout::head(tile, lane);
      const int64_t at = head * queries.head_stride + Layout::channel(chunk, lane);
      const bool held = i < COUNT && head < queries.heads;
      raw[k] = held ? load_16(base + at * 2) : make_uint4(0, 0, 0, 0);
    }
  }

  // Returns what scores must be multiplied by: queries are brought to a largest magnitude in [1, 2),
  // for float16 to hold them, and their products with scales, whatever the model.
  __device__ float store(uint4* fragments, float* scratch) const {
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < PER; ++k) {
      for (const uint32_t pair : {raw[k].x, raw[k].y, raw[k].z, raw[k].w}) {
        const float2 x = unpack(pair, dtype);
        largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
    }
    // As integers numbers that are not negative have the same order.
    largest = __uint_as_float(__reduce_max_sync(ALL_LANES, __float_as_uint(largest)));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) largest = fmaxf(largest, scratch[warp]);

    const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -100);
    const float factor = __uint_as_float(static_cast<uint32_t>(127 - min(exponent, 126)) << 23);
#pragma unroll
    for (int k = 0; k < PER; ++k) {
      const int i = k * THREADS + threadIdx.x;
      if (i >= COUNT) continue;
      auto scaled = [&](uint32_t pair) {
        const float2 x = unpack(pair, dtype);
        return Float16::pack(x.x * factor, x.y * factor);
      };
      const uint4 x = raw[k];
      // By quarter, pairs of channels that a product takes together lie side by side.
      fragments[i] = BY_QUARTER
                         ? make_uint4(scaled(x.x), scaled(x.z), scaled(x.y), scaled(x.w))
                         : make_uint4(scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w));
    }
    __syncthreads();
    return __uint_as_float(static_cast<uint32_t>(127 + min(exponent, 126)) << 23);
  }
};

// Combines scores over query heads.
struct Reduction {
  bool sum;
  __device__ float neutral() const { return sum ? 0.0f : -infinity(); }
  __device__ float operator()(float a, float b) const { return sum ? a + b : fmaxf(a, b); }
};

// Writes what the CTA counted to the row's histogram.
template <int THREADS>
__device__ __forceinline__ void add_histogram(const int* counted, int* histogram) {
  constexpr int PER = KEY_BINS / THREADS;
  int counts[PER];
#pragma unroll
  for (int i = 0; i < PER; ++i) counts[i] = counted[i * THREADS + threadIdx.x];
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    // Without the branch that atomicAdd would get.
    asm volatile("{ .reg .pred any; setp.ne.s32 any, %1, 0; "
                 "@any red.relaxed.gpu.global.add.s32 [%0], %1; }"
                 ::"l"(histogram + threadIdx.x + i * THREADS), "r"(counts[i]) : "memory");
  }
}

}  // namespace kvx
