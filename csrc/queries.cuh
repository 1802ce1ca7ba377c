// The queries of a row's KV head as float16 fragments of a matrix product's right-hand side.
#pragma once

#include <initializer_list>

#include "device.cuh"
#include "params.h"

namespace kvx {

// Which head and channels lane l holds, of a column n = l / 4 and a quarter t = l % 4 of the depth.
// PAIRED: columns 2h and 2h + 1 hold head h and its negative, and a lane a quarter of the channels
// in one piece, as 1-bit keys have it. Else a column is a head, and lanes take turns every 8
// channels.
template <int D, bool PAIRED>
struct QueryLayout {
  static constexpr int CHUNKS = D / 32;  // of 8 channels, per lane
  static constexpr int HEADS = PAIRED ? 4 : 8;
  __device__ static int head(int tile, int lane) {
    return tile * HEADS + (PAIRED ? lane / 8 : lane / 4);
  }
  __device__ static int channel(int chunk, int lane) {
    return PAIRED ? (lane % 4) * (D / 4) + chunk * 8 : (chunk * 4 + lane % 4) * 8;
  }
};

__device__ __forceinline__ float2 unpack(uint32_t pair, Dtype dtype) {
  if (dtype == Dtype::BFLOAT16) return make_float2(BFloat16::low(pair), BFloat16::high(pair));
  return make_float2(Float16::low(pair), Float16::high(pair));
}

// Fills fragments[TILES][CHUNKS][32], zeros for heads that there are not, and returns what scores
// must be multiplied by: queries are brought to a largest magnitude in [1, 2), for float16 to hold
// them, and their products with scales, whatever the model. All threads of the CTA take part.
template <int D, int TILES, bool PAIRED>
__device__ float load_queries(const Queries& queries, int token, int kv_head, uint4* fragments,
                              float* scratch) {
  using Layout = QueryLayout<D, PAIRED>;
  constexpr int COUNT = TILES * Layout::CHUNKS * 32;
  const int64_t first = token * queries.token_stride +
                        static_cast<int64_t>(kv_head) * queries.heads * queries.head_stride;
  const char* base = static_cast<const char*>(queries.data) + first * 2;
  auto load = [&](int i) {
    const int lane = i % 32, chunk = i / 32 % Layout::CHUNKS, tile = i / 32 / Layout::CHUNKS;
    const int head = Layout::head(tile, lane);
    if (head >= queries.heads) return make_uint4(0, 0, 0, 0);
    return load_16(base + (head * queries.head_stride + Layout::channel(chunk, lane)) * 2);
  };

  float largest = 0.0f;
  for (int i = threadIdx.x; i < COUNT; i += blockDim.x) {
    const uint4 raw = load(i);
    for (const uint32_t pair : {raw.x, raw.y, raw.z, raw.w}) {
      const float2 x = unpack(pair, queries.dtype);
      largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
    }
  }
  for (int step = 16; step; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int warp = 0; warp < blockDim.x / 32; ++warp) largest = fmaxf(largest, scratch[warp]);

  const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -100);
  const float factor = __uint_as_float(static_cast<uint32_t>(127 - min(exponent, 126)) << 23);
  for (int i = threadIdx.x; i < COUNT; i += blockDim.x) {
    const uint4 raw = load(i);
    const float by = PAIRED && (i / 4 & 1) ? -factor : factor;
    auto scaled = [&](uint32_t pair) {
      const float2 x = unpack(pair, queries.dtype);
      return Float16::pack(x.x * by, x.y * by);
    };
    fragments[i] = make_uint4(scaled(raw.x), scaled(raw.y), scaled(raw.z), scaled(raw.w));
  }
  __syncthreads();
  return __uint_as_float(static_cast<uint32_t>(127 + min(exponent, 126)) << 23);
}

// Combines scores over query heads.
struct Reduction {
  bool sum;
  __device__ float neutral() const { return sum ? 0.0f : -infinity(); }
  __device__ float operator()(float a, float b) const { return sum ? a + b : fmaxf(a, b); }
};

// Writes what the CTA counted to the row's histogram.
__device__ __forceinline__ void add_histogram(const int* counted, int* histogram) {
  for (int bin = threadIdx.x; bin < KEY_BINS; bin += blockDim.x) {
    const int count = counted[bin];
    if (count) atomicAdd(histogram + bin, count);
  }
}

}  // namespace kvx
