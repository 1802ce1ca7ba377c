// Products of queries and 1-bit keys as float16.
//
// The left-hand side is made of code words: bits 15 - j and 31 - j of a word, channels 2j and
// 2j + 1, become a pair of float16 by a shift and one logical operation. For even j a bit is the
// sign of 1.0, for odd j, which the same shift serves, the top bit of the exponent of 2.0:
// b = 2.0 bit - 1, and the -1 is a product of its own, once per group.
// A float16 q s would cost half of its digits: its rounding error is a column of its own. Lanes of
// such a column compute -q s + q s, the others q s + 0 s, without a branch.
#pragma once

#include "queries.cuh"
#include "score_shape.cuh"

namespace kvx {

constexpr uint32_t MINUS_ONES = 0xbc00bc00u;  // two of float16

__device__ __forceinline__ uint32_t sign_pair(uint32_t word) {
  return not_and_or(word, 0x80008000u, 0x3c003c00u);  // bit 15: 1.0, else -1.0
}
__device__ __forceinline__ uint32_t two_pair(uint32_t word) {
  return word & 0x40004000u;  // bit 14: 2.0, else 0.0
}

// Queries as QueryLoader left them, in registers if there are few.
template <int D, int TILES, bool HELD_>
struct QueryFragments {
  static constexpr bool HELD = HELD_;
  static constexpr int CHUNKS = D / 32;
  const uint4* shared;
  uint32_t error_lane;  // all bits set in lanes of error columns
  uint32_t held[HELD ? CHUNKS * 4 : 1], held_errors[HELD ? CHUNKS * 4 : 1];

  __device__ __forceinline__ explicit QueryFragments(const uint4* fragments)
      : shared(fragments + threadIdx.x % 32), error_lane(threadIdx.x & 4 ? ALL_LANES : 0) {
    if constexpr (HELD) {
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        uint32_t q[4];
        words_of(shared[chunk * 32], q);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          held[chunk * 4 + i] = q[i];
          held_errors[chunk * 4 + i] = keep((q[i] ^ 0x80008000u) & error_lane);
        }
      }
    }
  }

  // Eight channels, and what they are multiplied by to get the error.
  __device__ __forceinline__ void read(int tile, int chunk, uint32_t (&q)[4],
                                       uint32_t (&errors)[4]) const {
    if constexpr (!HELD) words_of(shared[(tile * CHUNKS + chunk) * 32], q);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (HELD) q[i] = held[chunk * 4 + i];
      errors[i] = HELD ? held_errors[chunk * 4 + i] : (q[i] ^ 0x80008000u) & error_lane;
    }
  }
};

// Scores of a step, reduced over those heads that the lane's columns hold: best[v] is of token
// 8 v + lane / 4.
template <typename Shape, int D, int TILES, int SUBS, bool HELD>
__device__ __forceinline__ void score_step_float16(const uint4* stage,
                                                   const QueryFragments<D, TILES, HELD>& queries,
                                                   int heads, Reduction reduce, float (&best)[8]) {
  constexpr int AT_ONCE = TILES < 2 ? TILES : 2, PAIRS = Shape::PAIRS, CHUNKS = PAIRS / 4;
  constexpr int TOKEN_TILES = Shape::SUB / 16;
  const int lane = threadIdx.x % 32, quad = lane / 4, quarter = lane % 4;
  const uint32_t minus_ones[4] = {MINUS_ONES, MINUS_ONES, MINUS_ONES, MINUS_ONES};
  for (int v = 0; v < 8; ++v) best[v] = reduce.neutral();

#pragma unroll 1
  for (int round = 0; round < TILES / AT_ONCE; ++round) {
    const int first_tile = round * AT_ONCE;
    // q.z: lanes of odd rows take the second group. With registers to spare a chunk goes in as it
    // was read: half of it for the lane's row, half for the row 8 below, each summed by itself.
    float zero[AT_ONCE][2][4] = {};
    const int mine = SUBS == 2 ? quad & 1 : 0;
#pragma unroll
    for (int chunk = 0; chunk < D / 32; ++chunk) {
      const uint4 z = scale_chunk<Shape, D>(stage, mine, true, chunk);
#pragma unroll
      for (int tile = 0; tile < AT_ONCE; ++tile) {
        uint32_t q[4], unused[4];
        queries.read(first_tile + tile, chunk, q, unused);
        if constexpr (HELD) {
          accumulate_tiles<Float16>(zero[tile][0], {z.x, z.y, z.z, z.w}, q[0], q[2]);
          accumulate_tiles<Float16>(zero[tile][1], {z.x, z.y, z.z, z.w}, q[1], q[3]);
        } else {
          accumulate_tiles<Float16>(zero[tile][0], {z.x, z.x, z.y, z.y}, q[0], q[1]);
          accumulate_tiles<Float16>(zero[tile][0], {z.z, z.z, z.w, z.w}, q[2], q[3]);
        }
      }
    }
    float zeros[AT_ONCE][SUBS];
#pragma unroll
    for (int tile = 0; tile < AT_ONCE; ++tile) {
      const float sum = HELD ? zero[tile][0][0] + zero[tile][1][2] : zero[tile][0][0];
      if constexpr (SUBS == 2) {
        const float other = __shfl_xor_sync(ALL_LANES, sum, 4);
        zeros[tile][0] = mine ? other : sum;
        zeros[tile][1] = mine ? sum : other;
      } else {
        zeros[tile][0] = sum;
      }
    }

#pragma unroll
    for (int sub = 0; sub < SUBS; ++sub) {
      float sums[TOKEN_TILES][AT_ONCE][4] = {}, offset[AT_ONCE][4] = {};
      const uint32_t* codes =
          reinterpret_cast<const uint32_t*>(stage + sub * Shape::SUB_CHUNKS);
#pragma unroll
      for (int pass = 0; pass < Shape::PASSES; ++pass) {
        uint32_t weights[AT_ONCE][PAIRS];
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
          uint32_t s[4], q[4], errors[4];
          words_of(scale_chunk<Shape, D>(stage, sub, false, pass * CHUNKS + chunk), s);
#pragma unroll
          for (int tile = 0; tile < AT_ONCE; ++tile) {
            queries.read(first_tile + tile, pass * CHUNKS + chunk, q, errors);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              weights[tile][chunk * 4 + i] =
                  multiply_add_half2(errors[i], s[i], multiply_half2(q[i], s[i]));
            }
          }
        }
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) {
#pragma unroll
          for (int tile = 0; tile < AT_ONCE; ++tile) {
            accumulate_tiles<Float16>(offset[tile], minus_ones, weights[tile][4 * k + 1],
                                      weights[tile][4 * k + 3]);
          }
        }
#pragma unroll
        for (int rows = 0; rows < TOKEN_TILES; ++rows) {
          uint32_t word[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int token = rows * 16 + i * 8 + quad;
            if (D == 64) {
              word[i] = codes[token * 2 + quarter / 2] << (quarter & 1) * 8;
            } else {
              word[i] = codes[token * (D / 32) + quarter * Shape::PASSES + pass];
            }
          }
#pragma unroll
          for (int k = 0; k < CHUNKS; ++k) {
            const uint32_t a = word[0] << 4 * k, b = word[1] << 4 * k;
            const uint32_t c = word[0] << (4 * k + 2), d = word[1] << (4 * k + 2);
#pragma unroll
            for (int tile = 0; tile < AT_ONCE; ++tile) {
              accumulate_tiles<Float16>(
                  sums[rows][tile], {sign_pair(a), sign_pair(b), sign_pair(c), sign_pair(d)},
                  weights[tile][4 * k], weights[tile][4 * k + 2]);
              accumulate_tiles<Float16>(
                  sums[rows][tile], {two_pair(a), two_pair(b), two_pair(c), two_pair(d)},
                  weights[tile][4 * k + 1], weights[tile][4 * k + 3]);
            }
          }
        }
      }
      // A lane's two columns are one head's product and its error.
#pragma unroll
      for (int tile = 0; tile < AT_ONCE; ++tile) {
        if ((first_tile + tile) * 4 + quarter >= heads) continue;
        const float bias = zeros[tile][sub] + (offset[tile][0] + offset[tile][1]);
#pragma unroll
        for (int rows = 0; rows < TOKEN_TILES; ++rows) {
          const float(&x)[4] = sums[rows][tile];
          const int v = (sub * TOKEN_TILES + rows) * 2;
          const float lower = x[0] + x[1] + bias, upper = x[2] + x[3] + bias;
          best[v] = TILES == 1 ? lower : reduce(best[v], lower);
          best[v + 1] = TILES == 1 ? upper : reduce(best[v + 1], upper);
        }
      }
    }
  }
}

// See ByteProducts.
template <int D, int TILES, int SUBS, int WARPS>
struct Float16Products {
  static constexpr int CTAS = D == 256 ? 3 : 2;
  using Shape = ScoreShape<D, TILES, SUBS, WARPS>;
  using Loader = QueryLoader<D, TILES, Columns::SIGNED_PAIRS, Shape::THREADS>;
  static constexpr int QUERY_EXPONENT = 0;
  static constexpr bool HELD = TILES == 1 && D <= 128 && WARPS <= 8;
  QueryFragments<D, TILES, HELD> queries;

  __device__ __forceinline__ explicit Float16Products(const uint4* fragments)
      : queries(fragments) {}

  __device__ __forceinline__ void score_step(const uint4* stage, int heads, Reduction reduce,
                                             float (&best)[8]) const {
    score_step_float16<Shape, D, TILES, SUBS>(stage, queries, heads, reduce, best);
  }
};

}  // namespace kvx
