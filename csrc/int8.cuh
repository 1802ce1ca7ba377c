// Entries of 8-bit integers with scales: their copies to shared memory, and a softmax over them.
//
// All products are of float16, which has every such integer. A score is multiplied by its key's
// scale; a weight has its value's in it. A word of four integers becomes two pairs, of its even
// bytes and of its odd ones: where a product of float16 takes two neighbouring channels, here it
// takes those of a pair. So queries are laid out in that order.
#pragma once

#include <type_traits>

#include "device.cuh"
#include "params.h"
#include "softmax.cuh"

namespace kvx {

// Where an entry lies. A value lies behind its key, and so does its scale. In the place of what does
// not count another entry is copied, without its scales.
struct __align__(8) Int8Place {
  uint32_t block, slot;

  __device__ __forceinline__ bool counts() const { return static_cast<int>(block) >= 0; }
  // Strides in bytes, of 32 bits: an offset is then two products.
  __device__ __forceinline__ uint64_t offset(uint32_t of_block, uint32_t of_entry) const {
    return static_cast<uint64_t>(block & ~(1u << 31)) * of_block +
           static_cast<uint64_t>(slot) * of_entry;
  }
};
// Of what does not count.
constexpr Int8Place NO_PLACE = {1u << 31, 0};

// table: a row's.
__device__ __forceinline__ Int8Place int8_place_of(const AttendParams& p, const int* table,
                                                   int entry) {
  const int block = block_of(p.rows, entry);
  return {static_cast<uint32_t>(table[block]),
          static_cast<uint32_t>(entry - block * p.rows.block_size)};
}

// In shared memory an entry's key or value is a row of D bytes. Its pieces of 16 bytes are in an
// order that spares bank conflicts: a piece lies where it would, xor this.
template <int D>
__device__ __forceinline__ uint32_t swizzle_int8(int row) {
  return (D == 64 ? row / 2 % 4 : row % 8) * 16;
}
// The address of a piece and `chunk` more, an even number. from: that of piece 0 or 1 of its row.
template <int D>
__device__ __forceinline__ uint32_t chunk_from(uint32_t from, int chunk) {
  return (from ^ (chunk % 8 * 16)) + chunk / 8 * 128;
}

// A warp's copies of the keys and values of 16 entries, and their pairs of scales.
template <int D>
__device__ __forceinline__ void fetch_int8(const AttendParams& p, int kv_head,
                                           const Int8Place* places, uint4* to, uint4* to_scales) {
  constexpr int CHUNKS = D / 16;
  const int lane = threadIdx.x % 32, piece = lane % CHUNKS;
  const char* keys = p.keys + kv_head * p.head_bytes + piece * 16;
  const uint32_t block_bytes = p.block_bytes, entry_bytes = p.entry_bytes;
  char* const shared = reinterpret_cast<char*>(to);
#pragma unroll
  for (int i = 0; i < CHUNK * CHUNKS / 32; ++i) {
    const int entry = lane / CHUNKS + i * (32 / CHUNKS);
    const char* from = keys + places[entry].offset(block_bytes, entry_bytes);
    char* at = shared + entry * D + (piece * 16 ^ swizzle_int8<D>(entry));
    copy_async(at, from);
    copy_async(at + CHUNK * D, from + D);
  }
  if (lane < CHUNK) {
    const Int8Place place = places[lane];
    const char* scales = p.key_scales + kv_head * p.scale_head_bytes;
    copy_async_8_or_zero(reinterpret_cast<float2*>(to_scales) + lane,
                         scales + place.offset(p.scale_block_bytes, p.scale_entry_bytes),
                         place.counts());
  }
}

// The even bytes of a word as a pair of float16, or the odd ones. As the mantissa of 1024 a byte
// adds itself, unsigned: 128 is added before and taken away with the 1024. bias: BIAS in a
// register, as an instruction takes one constant.
constexpr uint32_t BIAS = 0x64806480u;

template <bool ODD>
__device__ __forceinline__ uint32_t int8_pair(uint32_t x, uint32_t bias) {
  uint32_t result;
  if constexpr (ODD) x >>= 8;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(x), "n"(0x00ff00ff), "r"(bias));
  asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(result), "r"(bias));
  return result;
}

// Eight channels of a query as float16, and by what they are to be multiplied: bfloat16 is brought
// to a largest magnitude in [1, 2). Lanes that hold a head's D channels are neighbours.
template <typename T, int D>
__device__ __forceinline__ uint4 query_to_float16(uint4 x, float& factor) {
  factor = 1.0f;
  if constexpr (std::is_same_v<T, BFloat16>) {
    uint32_t largest = 0;  // bits, in the order of the magnitudes
    for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
      largest = max(largest, max(pair << 16 & 0x7fffffffu, pair & 0x7fff0000u));
    }
#pragma unroll
    for (int step = D / 16; step; step /= 2) {
      largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    }
    const int exponent = min(max(static_cast<int>(largest >> 23) - 127, -100), 126);
    factor = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
    const float inverse = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
    auto scaled = [&](uint32_t pair) {
      return Float16::pack(T::low(pair) * inverse, T::high(pair) * inverse);
    };
    x = make_uint4(scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w));
  }
  return x;
}

// Writes 8 channels of a query as keys are multiplied with them. to_even, to_odd: the 16 channels
// of an even chunk and of the odd one behind it. odd: which of them `x` is.
__device__ __forceinline__ void store_query_int8(uint4* to_even, uint4* to_odd, bool odd, uint4 x) {
  constexpr int EVEN = 0x5410, ODD = 0x7632;  // halves of two words
  reinterpret_cast<uint2*>(to_even)[odd] =
      make_uint2(__byte_perm(x.x, x.y, EVEN), __byte_perm(x.z, x.w, EVEN));
  reinterpret_cast<uint2*>(to_odd)[odd] =
      make_uint2(__byte_perm(x.x, x.y, ODD), __byte_perm(x.z, x.w, ODD));
}

// See Softmax. Entries are the rows of products, and then channels of values: heads are columns.
template <int D, bool WIDE, bool CAPPED>
struct Int8Softmax {
  static constexpr int TILES = WIDE ? 2 : 1;  // of eight heads
  static constexpr bool KEEPS_QUERIES = !WIDE && D < 256;  // in registers
  // What float16 has room for: weights are of a maximum that may be exceeded by the first, base 2,
  // and in units of values' scales that may be the second's multiple.
  static constexpr float SLACK = 8.0f, MOST = 64.0f;

  float out[TILES][D / 16][4];
  // Of heads lane % 4 * 2 and the next one in each tile: the maximum that weights are of, the sum
  // of weights of this lane, and by what products with the queries are to be multiplied.
  float largest[TILES][2], sum[TILES][2], factors[TILES][2];
  float unit, inverse;  // of values' scales, a power of two
  uint32_t bias;
  uint32_t kept[KEEPS_QUERIES ? D / 16 : 1][2];

  __device__ void reset() {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[tile][i][j] = 0.0f;
      }
      largest[tile][0] = largest[tile][1] = -infinity();
      sum[tile][0] = sum[tile][1] = 0.0f;
    }
    unit = inverse = 0.0f;
    bias = static_cast<uint32_t>(keep(static_cast<int>(BIAS)));
  }

  // 16 channels: of heads 0 to 7 those of one lane are in 0 and 2, of others in 1 and 3.
  __device__ static void load_queries(uint32_t (&b)[4], const uint4* queries, int k) {
    const int lane = threadIdx.x % 32, row = lane % 16;
    load_matrices(b, queries + row * (D / 8) + swizzled(row, k * 2 + lane / 16));
  }

  // Takes the queries, and what products with each are to be multiplied by.
  __device__ void start(const uint4* queries, const float* of_queries, float scale) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        factors[tile][j] = of_queries[tile * 8 + threadIdx.x % 4 * 2 + j] * scale;
      }
    }
    if constexpr (KEEPS_QUERIES) {
#pragma unroll
      for (int k = 0; k < D / 16; ++k) {
        uint32_t b[4];
        load_queries(b, queries, k);
        kept[k][0] = b[0], kept[k][1] = b[2];
      }
    }
  }

  // Multiplies what was added so far.
  __device__ void rescale(int tile, float by_0, float by_1) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      out[tile][i][0] *= by_0, out[tile][i][1] *= by_1;
      out[tile][i][2] *= by_0, out[tile][i][3] *= by_1;
    }
  }

  // Makes the unit as large as the largest of the warp's scales.
  __device__ void raise_unit(float most) {
    const uint32_t bits = __reduce_max_sync(ALL_LANES, __float_as_uint(most)) & 0x7f800000u;
    const uint32_t raised = max(bits, 27u << 23);  // with an inverse
    inverse = __uint_as_float((254u << 23) - raised);
    const float by = unit * inverse;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) rescale(tile, by, by);
    unit = __uint_as_float(raised);
  }

  // Makes the maxima those of these scores, too.
  __device__ void raise_largest(const float (&s)[TILES][4]) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      float by[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float top = fmaxf(s[tile][j], s[tile][2 + j]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
        }
        top = fmaxf(top, largest[tile][j]);
        by[j] = top == -infinity() ? 1.0f : exp2f(largest[tile][j] - top);
        largest[tile][j] = top, sum[tile][j] *= by[j];
      }
      rescale(tile, by[0], by[1]);
    }
  }

  // Adds 16 entries: keys, then values, then pairs of scales, of which a key's is 0 where an entry
  // does not count.
  __device__ void add(const uint4* queries, const uint4* entries, const uint4* pairs, float cap) {
    const int lane = threadIdx.x % 32;
    float s[TILES][4] = {};  // of entries lane / 4, and 8 behind it; of two heads each
    const int key_row = lane % 8 + lane / 16 * 8;
    const uint32_t first = shared_address(entries);
    const uint32_t key = first + key_row * D + (lane / 8 % 2 * 16 ^ swizzle_int8<D>(key_row));
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      uint32_t x[4];
      load_matrices(x, chunk_from<D>(key, k * 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t a[4] = {int8_pair<false>(x[half], bias), int8_pair<false>(x[2 + half], bias),
                               int8_pair<true>(x[half], bias), int8_pair<true>(x[2 + half], bias)};
        if constexpr (KEEPS_QUERIES) {
          const uint32_t(&b)[2] = kept[k * 2 + half];
          accumulate_tiles<Float16>(s[0], a, b[0], b[1]);
        } else {
          uint32_t b[4];
          load_queries(b, queries, k * 2 + half);
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) {
            accumulate_tiles<Float16>(s[tile], a, b[tile], b[2 + tile]);
          }
        }
      }
    }
    const float2 scales[2] = {reinterpret_cast<const float2*>(pairs)[lane / 4],
                              reinterpret_cast<const float2*>(pairs)[lane / 4 + 8]};
    bool higher = false;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& x = s[tile][j];
        x *= scales[j / 2].x * factors[tile][j % 2];
        if constexpr (CAPPED) x = capped(x, cap);
        if (scales[j / 2].x == 0.0f) x = -infinity();
        higher |= x > largest[tile][j % 2] + SLACK;
      }
    }
    const float most = fmaxf(scales[0].y, scales[1].y);
    if (__any_sync(ALL_LANES, most > unit * MOST)) raise_unit(most);
    if (__any_sync(ALL_LANES, higher)) raise_largest(s);
    const float of_values[2] = {scales[0].y * inverse, scales[1].y * inverse};
    uint32_t weights[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      float w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float top = largest[tile][j % 2];
        w[j] = exp2f(s[tile][j] - (top == -infinity() ? 0.0f : top));
        sum[tile][j % 2] += w[j];
        w[j] *= of_values[j / 2];
      }
      weights[tile][0] = transpose_matrix(Float16::pack(w[0], w[1]));
      weights[tile][1] = transpose_matrix(Float16::pack(w[2], w[3]));
    }
    const int value_row = lane % 16;
    const uint32_t value =
        first + (CHUNK + value_row) * D + (lane / 16 * 16 ^ swizzle_int8<D>(value_row));
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      uint32_t x[4];
      load_matrices_transposed(x, chunk_from<D>(value, i * 2));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t a[4] = {
            int8_pair<false>(x[2 * j], bias), int8_pair<true>(x[2 * j], bias),
            int8_pair<false>(x[2 * j + 1], bias), int8_pair<true>(x[2 * j + 1], bias)};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          accumulate_tiles<Float16>(out[tile][2 * i + j], a, weights[tile][0], weights[tile][1]);
        }
      }
    }
  }

  // See Softmax::store.
  __device__ void store(float* to, float* to_largest, float* to_sum) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int head = tile * 8 + lane % 4 * 2 + j;
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          sum[tile][j] += __shfl_xor_sync(ALL_LANES, sum[tile][j], step);
        }
        if (lane < 4) to_largest[head] = largest[tile][j], to_sum[head] = sum[tile][j];
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
          *reinterpret_cast<float2*>(to + head * D + i * 16 + lane / 4 * 2) =
              make_float2(out[tile][i][j] * unit, out[tile][i][2 + j] * unit);
        }
      }
    }
  }
};

}  // namespace kvx
