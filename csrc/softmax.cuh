// A softmax over entries that come a few at a time, on tensor cores, and the rows that it reads.
#pragma once

#include <type_traits>

#include "device.cuh"

namespace kvx {

constexpr int CHUNK = 16;  // entries that a warp takes at a time

// Rows of 16-bit elements, their chunks of 16 bytes in an order that spares bank conflicts.
__device__ __forceinline__ int swizzled(int row, int chunk) { return chunk ^ (row & 7); }

// Where chunk 2 k + half of a row is in shared memory, from where its chunk `half`, 0 or 1, is:
// rows begin at multiples of 128 bytes, so that only the bits that are swizzled change, and chunks
// 8 apart share an address.
__device__ __forceinline__ uint32_t pair_at(uint32_t of_half, int k) {
  return (of_half ^ (k * 2 & 7) * 16) + (k * 2 & ~7) * 16;
}

// 2^x, or 0 where that is below 2^-126, of one instruction.
__device__ __forceinline__ float exp2_or_zero(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// log2(x) of an x that is neither negative nor below 2^-126, likewise.
__device__ __forceinline__ float log2_of_normal(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// x of base 2, 2 log2(e) times the ratio of a logit to its cap: what is left is cap * tanh(ratio).
__device__ __forceinline__ float capped(float x, float cap) {
  return cap - __fdividef(2.0f * cap, 1.0f + exp2f(x));
}

// CAPPED: whether logits have a soft cap.
template <typename T, int D, bool WIDE, bool CAPPED>
struct Softmax {
  float out[D / 8][WIDE ? 4 : 2];
  float largest[2], sum[2];  // of heads lane / 4 and, if WIDE, lane / 4 + 8; sum: of this lane

  __device__ void reset() {
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
#pragma unroll
      for (int j = 0; j < (WIDE ? 4 : 2); ++j) out[i][j] = 0.0f;
    }
    largest[0] = largest[1] = -infinity();
    sum[0] = sum[1] = 0.0f;
  }

  // Adds 16 entries, of rows that begin at multiples of 128 bytes. offsets: below 0 for those that
  // do not count.
  __device__ void add(const uint4* queries, const uint4* keys, const uint4* values,
                      const int64_t* offsets, float scale, float cap) {
    constexpr int ROW = D / 8;
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    float s[2][4] = {};
    // Of queries and values rows lane % 16, of keys others.
    const int row = lane % 16, key_row = lane % 8 + lane / 16 * 8;
    const int chunk = row * ROW + swizzled(row, lane / 16);
    const int key_chunk = key_row * ROW + swizzled(key_row, lane / 8 % 2);
    const uint32_t from_queries = shared_address(queries + chunk);
    const uint32_t from_keys = shared_address(keys + key_chunk);
    const uint32_t from_values = shared_address(values + chunk);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[4], b[4];
      load_matrices(a, pair_at(from_queries, k));
      load_matrices(b, pair_at(from_keys, k));
      accumulate_tiles<T>(s[0], a, b[0], b[1]);
      accumulate_tiles<T>(s[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool counts = offsets[i * 8 + quarter * 2 + j % 2] >= 0;
        s[i][j] *= scale;
        if constexpr (CAPPED) s[i][j] = capped(s[i][j], cap);
        if (!counts) s[i][j] = -infinity();
      }
    }
    uint32_t weights[4] = {};
#pragma unroll
    for (int half = 0; half < (WIDE ? 2 : 1); ++half) {
      float top = largest[half];
#pragma unroll
      for (int i = 0; i < 2; ++i) top = fmaxf(top, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
      const float shift = top == -infinity() ? 0.0f : top;
      const float rescale = exp2_or_zero(largest[half] - shift);
      largest[half] = top;
      float added = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = exp2_or_zero(s[i][2 * half] - shift);
        const float y = exp2_or_zero(s[i][2 * half + 1] - shift);
        added += x + y;
        weights[2 * i + half] = T::pack(x, y);
      }
      sum[half] = sum[half] * rescale + added;
      if (__any_sync(ALL_LANES, rescale != 1.0f)) {
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
          out[i][2 * half] *= rescale;
          out[i][2 * half + 1] *= rescale;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      uint32_t b[4];
      load_matrices_transposed(b, pair_at(from_values, i));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float(&o)[WIDE ? 4 : 2] = out[2 * i + j];
        if constexpr (WIDE) {
          accumulate_tiles<T>(o, weights, b[2 * j], b[2 * j + 1]);
        } else {
          float none[2];
          multiply_tiles<T>(o[0], o[1], none[0], none[1], weights, b[2 * j], b[2 * j + 1], o[0],
                            o[1], 0.0f, 0.0f);
        }
      }
    }
  }

  // Writes rows of D sums, and each row's largest score and sum.
  __device__ void store(float* to, float* to_largest, float* to_sum) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < (WIDE ? 2 : 1); ++half) {
      const int row = lane / 4 + half * 8;
      sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 1);
      sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 2);
      if (lane % 4 == 0) to_largest[row] = largest[half], to_sum[row] = sum[half];
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        *reinterpret_cast<float2*>(to + row * D + i * 8 + lane % 4 * 2) =
            make_float2(out[i][2 * half], out[i][2 * half + 1]);
      }
    }
  }
};

// 16 rows of float8 to the 16-bit type that queries have.
template <typename T, int D>
__device__ __forceinline__ void widen(const uint4* from, uint4* to, bool e5m2) {
  constexpr int CACHE_CHUNKS = D / 16, ROW_CHUNKS = D / 8;
  auto pair = [&](uint32_t bits) {
    const uint32_t half = float8_to_half2(bits, e5m2);
    if constexpr (std::is_same_v<T, Float16>) return half;
    return T::pack(Float16::low(half), Float16::high(half));
  };
#pragma unroll
  for (int i = threadIdx.x % 32; i < CHUNK * CACHE_CHUNKS; i += 32) {
    const int row = i / CACHE_CHUNKS, chunk = i % CACHE_CHUNKS * 2;
    const uint4 x = from[i];
    to[row * ROW_CHUNKS + swizzled(row, chunk)] =
        make_uint4(pair(x.x), pair(x.x >> 16), pair(x.y), pair(x.y >> 16));
    to[row * ROW_CHUNKS + swizzled(row, chunk + 1)] =
        make_uint4(pair(x.z), pair(x.z >> 16), pair(x.w), pair(x.w >> 16));
  }
}

}  // namespace kvx
