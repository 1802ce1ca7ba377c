// Products of queries and 1-bit keys as bytes: twice the depth per instruction of float16, and half
// of the instructions that make bits into numbers.
//
// The left-hand side is made of code words: a shift brings a bit of each of its bytes to the top,
// the rest is masked away, and 128 bit - 64 = 64 b. The -64 is a product of its own, once per
// group.
// The right-hand side, w = q s, is fixed-point: w = (high + low / 254) unit, digits of -127 to 127
// that have a product each. The unit is a power of two and the group's, from a bound of |w| that
// all heads share.
//
// Float16 sums round to a unit for nothing: 1.5 * 1024 unit + w ends in the byte `high`. What that
// leaves of w is in turn a float16, exactly (but for denormals), and at most half a unit. 254 and
// not 256 for half a unit to be 127.
#pragma once

#include "queries.cuh"
#include "score_shape.cuh"

namespace kvx {

// A group's unit.
struct FixedPoint {
  uint32_t high, low;  // two float16 each: 1.5 * 1024 unit, and 1 / 256 of it
  float undo;          // what 64 (254 high + low) is multiplied by

  // bound: of the bits of |w| as a float16.
  __device__ __forceinline__ explicit FixedPoint(uint32_t bound) {
    // The power of two above: eight more, as 127.5 units and more would be rounded to 128. Under a
    // lowest one `low` would be denormal; that unit is 2^-16.
    const uint32_t power = max((bound + 8) & 0x7c00u, 0x1400u);
    high = (power + 0x1200u) * 0x10001u;
    low = high - 0x20002000u;
    undo = __uint_as_float((power << 13) + (100u << 23)) * (1.0f / 254);
  }
};

// The products of a step. TILES: query heads / 4, at most. SUBS: groups in a step. WARPS: of a CTA.
//
// Up to four heads leave half of the columns free. Columns 2h and 2h + 1 are then of head h, but
// have the scales of either half of the step, whose tokens are rows 0 to 7 and 8 to 15 of the
// left-hand side. Half of such a product is of no use, but weights are half the
// work. With more heads a column is a head, and each group's rows are a product of their own.
template <int D, int TILES, int SUBS, int WARPS>
struct ByteProducts {
  static constexpr bool HALVES = TILES == 1;
  static constexpr int COLUMN_TILES = HALVES ? 1 : TILES / 2;
  static constexpr int CTAS = D == 256 ? 3 : 2;  // at least, on a multiprocessor
  using Shape = ScoreShape<D, COLUMN_TILES, SUBS, WARPS>;
  static constexpr bool HELD = HALVES && D <= 128 && WARPS <= 8;  // queries, in registers
  using Loader = QueryLoader<D, COLUMN_TILES, HALVES ? Columns::PAIRS : Columns::WHOLE_HEADS,
                             Shape::THREADS>;
  // Products must be less than 2^12 for what is added to them to be finite: scales up to 16,384.
  // From largest ones of 2^-7 down weights lose digits, as float16 have no smaller ones.
  static constexpr int QUERY_EXPONENT = -3;

  static constexpr int QUERY_CHUNKS = D / 32;
  static constexpr int PAIRS = Shape::PAIRS, CHUNKS = PAIRS / 4, WORDS = PAIRS / 2;
  static constexpr int BOUND_WORDS = D / 64;
  // Products that a lane's columns take part in: all of a step, or a group.
  static constexpr int PARTS = HALVES ? 1 : SUBS;
  static constexpr int ROW_TILES = 4 / PARTS;
  static constexpr int LANE_HEADS = HALVES ? 1 : 2;  // in a tile

  const uint4* fragments;
  uint32_t held[HELD ? QUERY_CHUNKS * 4 : 1];
  uint32_t largest[BOUND_WORDS];  // of all heads' queries, of a 32nd of the channels

  __device__ __forceinline__ explicit ByteProducts(const uint4* all)
      : fragments(all + threadIdx.x % 32) {
    const int lane = threadIdx.x % 32;
    if constexpr (HELD) {
#pragma unroll
      for (int chunk = 0; chunk < QUERY_CHUNKS; ++chunk) {
        const uint4 q = fragments[chunk * 32];
        held[chunk * 4] = keep(q.x), held[chunk * 4 + 1] = keep(q.y);
        held[chunk * 4 + 2] = keep(q.z), held[chunk * 4 + 3] = keep(q.w);
      }
    }
    // Channels from lane * D / 32 on; here they are in the lanes of quarter lane / 8.
    const int of_quarter = lane % 8 * BOUND_WORDS;
    const uint32_t* q = reinterpret_cast<const uint32_t*>(all + of_quarter / 4 * 32 + lane / 8) +
                        of_quarter % 4;
#pragma unroll
    for (int i = 0; i < BOUND_WORDS; ++i) largest[i] = 0;
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; ++tile) {
#pragma unroll
      for (int column = 0; column < 8; column += HALVES ? 2 : 1) {
#pragma unroll
        for (int i = 0; i < BOUND_WORDS; ++i) {
          const uint32_t pair = q[(tile * QUERY_CHUNKS * 32 + column * 4) * 4 + i];
          largest[i] = max_half2(largest[i], pair & 0x7fff7fffu);
        }
      }
    }
  }

  __device__ __forceinline__ void read_queries(int tile, int chunk, uint32_t (&q)[4]) const {
    if constexpr (HELD) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = held[chunk * 4 + i];
    } else {
      words_of(fragments[(tile * QUERY_CHUNKS + chunk) * 32], q);
    }
  }

  __device__ __forceinline__ FixedPoint fixed_point(const uint4* stage, int sub) const {
    const int pair = threadIdx.x % 32 * BOUND_WORDS;
    const uint32_t* scales = reinterpret_cast<const uint32_t*>(
                                 stage + sub * Shape::SUB_CHUNKS + Shape::CODE_CHUNKS +
                                 spread(pair / 4)) +
                             pair % 4;
    uint32_t bound = 0;
#pragma unroll
    for (int i = 0; i < BOUND_WORDS; ++i) {
      bound = max_half2(bound, multiply_half2(largest[i], scales[i]));
    }
    // As an integer the pair whose upper half is larger.
    bound = max(bound, __byte_perm(bound, 0, 0x1032));
    return FixedPoint(__reduce_max_sync(ALL_LANES, bound) >> 16);
  }

  // q.z of the lane's columns, by group.
  __device__ __forceinline__ void zero_products(
      const uint4* stage, float (&zeros)[COLUMN_TILES][SUBS][LANE_HEADS]) const {
    // Lanes of odd rows take the second group. A chunk goes in as it was read: half of it for the
    // lane's row, half for the row 8 below, each summed by itself.
    const int mine = SUBS == 2 ? threadIdx.x / 4 & 1 : 0;
    float sums[COLUMN_TILES][2][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < QUERY_CHUNKS; ++chunk) {
      const uint4 z = scale_chunk<Shape, D>(stage, mine, true, chunk);
#pragma unroll
      for (int tile = 0; tile < COLUMN_TILES; ++tile) {
        uint32_t q[4];
        read_queries(tile, chunk, q);
        accumulate_tiles<Float16>(sums[tile][0], {z.x, z.y, z.z, z.w}, q[0], q[2]);
        accumulate_tiles<Float16>(sums[tile][1], {z.x, z.y, z.z, z.w}, q[1], q[3]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < LANE_HEADS; ++i) {
        const float sum = sums[tile][0][i] + sums[tile][1][2 + i];
        zeros[tile][0][i] = sum;
        if constexpr (SUBS == 2) {
          const float other = __shfl_xor_sync(ALL_LANES, sum, 4);
          zeros[tile][0][i] = mine ? other : sum;
          zeros[tile][1][i] = mine ? sum : other;
        }
      }
    }
  }

  // Right-hand sides of the digits of q s, of a pass.
  __device__ __forceinline__ void weights(const uint4* stage, int sub, int pass,
                                          const uint32_t high_unit, const uint32_t low_unit,
                                          uint32_t (&high)[COLUMN_TILES][WORDS],
                                          uint32_t (&low)[COLUMN_TILES][WORDS]) const {
    constexpr uint32_t OF_256 = 0x3bf03bf0u;  // 254 / 256
#pragma unroll
    for (int half = 0; half < CHUNKS / 2; ++half) {
      uint32_t s[2][4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int chunk = pass * CHUNKS + half + k * (CHUNKS / 2);
        words_of(scale_chunk<Shape, D>(stage, sub, false, chunk), s[k]);
      }
#pragma unroll
      for (int tile = 0; tile < COLUMN_TILES; ++tile) {
        uint32_t q[2][4], of_high[2], of_low[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          read_queries(tile, pass * CHUNKS + half + k * (CHUNKS / 2), q[k]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            of_high[k] = multiply_add_half2(q[k][i], s[k][i], high_unit);
            const uint32_t rest = multiply_add_half2(
                q[k][i], s[k][i], subtract_half2(high_unit, of_high[k]));
            of_low[k] = multiply_add_half2(rest, OF_256, low_unit);
          }
          // Bytes as the bits of a code word lie: of pairs of channels p + PAIRS / 2 and p, first
          // the even ones.
          const int word = WORDS - 1 - (half * 4 + i);
          high[tile][word] = __byte_perm(of_high[1], of_high[0], 0x6240);
          low[tile][word] = __byte_perm(of_low[1], of_low[0], 0x6240);
        }
      }
    }
  }

  // A lane's part of a token's code in a pass: bits j of its bytes are of word j of the weights.
  __device__ __forceinline__ uint32_t code(const uint4* stage, int token, int pass) const {
    const int quarter = threadIdx.x % 4;
    const uint32_t* codes = reinterpret_cast<const uint32_t*>(
                                stage + token / Shape::SUB * Shape::SUB_CHUNKS) +
                            token % Shape::SUB * (D / 32);
    if constexpr (D > 64) return codes[quarter * Shape::PASSES + pass];
    // Half a word: two bytes, whose upper halves go to bytes of their own.
    const uint32_t twice = __byte_perm(codes[quarter / 2], 0, quarter & 1 ? 0x2200 : 0x3311);
    return (twice & 0x00ff00ffu) | (twice >> 4 & 0xff00ff00u);
  }

  // Scores of a step, reduced over those heads that the lane's columns hold: best[v] is of token
  // 8 v + lane / 4.
  __device__ __forceinline__ void score_step(const uint4* stage, int heads, Reduction reduce,
                                             float (&best)[8]) const {
    const int quad = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    float zeros[COLUMN_TILES][SUBS][LANE_HEADS];
    zero_products(stage, zeros);
#pragma unroll
    for (int v = 0; v < 8; ++v) best[v] = reduce.neutral();

#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const FixedPoint lower = fixed_point(stage, part);
      const FixedPoint upper = HALVES && SUBS == 2 ? fixed_point(stage, 1) : lower;
      const int second = HALVES && SUBS == 2 ? quad & 1 : 0;
      const uint32_t high_unit = second ? upper.high : lower.high;
      const uint32_t low_unit = second ? upper.low : lower.low;

      int high_sums[ROW_TILES][COLUMN_TILES][4], low_sums[ROW_TILES][COLUMN_TILES][4];
      // Tokens of row `quad` and of row `quad` + 8 of a tile.
      auto token_of = [&](int rows, int i) {
        return HALVES ? i * 32 + rows * 8 + quad : (part * ROW_TILES + rows) * 16 + i * 8 + quad;
      };
      auto multiply_rows = [&](int rows, int pass, const uint32_t(&high)[COLUMN_TILES][WORDS],
                               const uint32_t(&low)[COLUMN_TILES][WORDS]) {
        const uint32_t a = code(stage, token_of(rows, 0), pass);
        const uint32_t b = code(stage, token_of(rows, 1), pass);
#pragma unroll
        for (int j = 0; j < WORDS; j += 2) {
          constexpr uint32_t TOPS = 0x80808080u;
          const uint32_t bits[4] = {a << (7 - j) & TOPS, b << (7 - j) & TOPS, a << (6 - j) & TOPS,
                                    b << (6 - j) & TOPS};
#pragma unroll
          for (int tile = 0; tile < COLUMN_TILES; ++tile) {
            accumulate_bytes(high_sums[rows][tile], bits, high[tile][j], high[tile][j + 1]);
            accumulate_bytes(low_sums[rows][tile], bits, low[tile][j], low[tile][j + 1]);
          }
        }
      };

      auto finish_rows = [&](int rows) {
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; ++tile) {
#pragma unroll
          for (int i = 0; i < LANE_HEADS; ++i) {
            const bool there = (tile * 4 + quarter) * LANE_HEADS + i < heads;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              // Of halves, the second one's column for the second one's row.
              const int c = HALVES ? 3 * r : 2 * r + i;
              const int sum = high_sums[rows][tile][c] * 254 + low_sums[rows][tile][c];
              const float zero = zeros[tile][!HALVES ? part : SUBS == 2 ? r : 0][i];
              const float undo = HALVES && r ? upper.undo : lower.undo;
              const float score = fmaf(static_cast<float>(sum), undo, zero);
              const int v = HALVES ? r * 4 + rows : (part * ROW_TILES + rows) * 2 + r;
              if (HALVES) {
                best[v] = there ? score : reduce.neutral();
              } else if (there) {
                best[v] = reduce(best[v], score);
              }
            }
          }
        }
      };

#pragma unroll
      for (int pass = 0; pass < Shape::PASSES; ++pass) {
        uint32_t high[COLUMN_TILES][WORDS], low[COLUMN_TILES][WORDS];
        weights(stage, HALVES ? second : part, pass, high_unit, low_unit, high, low);
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; ++tile) {
          int sum[2][4] = {};
#pragma unroll
          for (int j = 0; j < WORDS; j += 2) {
            constexpr uint32_t MINUS_64 = 0xc0c0c0c0u;
            accumulate_bytes_of(sum[0], MINUS_64, high[tile][j], high[tile][j + 1]);
            accumulate_bytes_of(sum[1], MINUS_64, low[tile][j], low[tile][j + 1]);
          }
#pragma unroll
          for (int rows = 0; rows < ROW_TILES; ++rows) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              int& h = high_sums[rows][tile][i];
              int& l = low_sums[rows][tile][i];
              h = pass ? h + sum[0][i] : sum[0][i];
              l = pass ? l + sum[1][i] : sum[1][i];
            }
          }
        }
#pragma unroll
        for (int rows = 0; rows < ROW_TILES; ++rows) {
          multiply_rows(rows, pass, high, low);
          if (pass == Shape::PASSES - 1) finish_rows(rows);
        }
      }
    }
  }
};

}  // namespace kvx
