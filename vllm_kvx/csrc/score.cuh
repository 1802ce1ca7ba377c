// FIER: products of queries and 1-bit keys (Algorithm 1 of the paper), on tensor cores.
//
// k~ = z + s b with b = -1 or 1, so q.k~ = q.z + (q s).b. Tokens are the rows of the product and
// query heads its columns. The left-hand side is made of code words: bits 15 - j and 31 - j of a
// word, channels 2j and 2j + 1, become a pair of float16 by a shift and one logical operation. For
// even j a bit is the sign of 1.0, for odd j, which the same shift serves, the top bit of the
// exponent of 2.0: b = 2.0 bit - 1, and the -1 is a product of its own, once per group.
// A float16 q s would cost half of its digits: its rounding error is a column of its own. Lanes of
// such a column compute -q s + q s, the others q s + 0 s, without a branch.
#pragma once

#include "launch.cuh"
#include "queries.cuh"

namespace kvx {

// Tokens that a warp takes at a time.
constexpr int STEP = 64;
constexpr uint32_t MINUS_ONES = 0xbc00bc00u;  // two of float16

// SUBS: groups in a step, 2 of 32 tokens or (part of) one. TILES: columns / 8.
template <int D, int TILES, int SUBS>
struct ScoreShape {
  static constexpr int WARPS = D == 256 ? 4 : 8;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int STAGES = 4;
  static constexpr int SUB = STEP / SUBS;
  static constexpr int PASSES = D == 256 ? 2 : 1;  // 32-bit words of a token that a lane holds
  static constexpr int PAIRS = D == 64 ? 8 : 16;   // pairs of channels in a pass
  static constexpr int TILES_AT_ONCE = TILES < 2 ? TILES : 2;
  // Of 16 bytes, in shared memory: codes, then scales, then zeros.
  static constexpr int CODE_CHUNKS = SUB * D / 128;
  static constexpr int SCALE_CHUNKS = D / 4;
  // What is left free keeps reads of both groups' zeros at once off each other's banks.
  static constexpr int SUB_CHUNKS = CODE_CHUNKS + SCALE_CHUNKS + SCALE_CHUNKS / 8 + D / 64;
  static constexpr int STAGE_CHUNKS = SUBS * SUB_CHUNKS;
  static constexpr int QUERY_CHUNKS = TILES * (D / 32) * 32;
  static constexpr int SHARED_BYTES =
      (WARPS * STAGES * STAGE_CHUNKS + QUERY_CHUNKS) * 16 + KEY_BINS * 4 + 32 * 4;
};

// Lanes of a quad read scales a quarter of the channels apart: this spreads them over the banks.
__device__ __forceinline__ int spread(int chunk) { return chunk + chunk / 8; }

__device__ __forceinline__ uint32_t sign_pair(uint32_t word) {
  return not_and_or(word, 0x80008000u, 0x3c003c00u);  // bit 15: 1.0, else -1.0
}
__device__ __forceinline__ uint32_t two_pair(uint32_t word) {
  return word & 0x40004000u;  // bit 14: 2.0, else 0.0
}

__device__ __forceinline__ void words_of(const uint4& chunk, uint32_t (&words)[4]) {
  words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
}

// Queries as QueryLoader left them, in registers if there are few.
template <int D, int TILES>
struct QueryFragments {
  static constexpr bool HELD = TILES == 1 && D <= 128;
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
template <int D, int TILES, int SUBS>
__device__ __forceinline__ void score_step(const uint4* stage,
                                           const QueryFragments<D, TILES>& queries, int heads,
                                           Reduction reduce, float (&best)[8]) {
  using Shape = ScoreShape<D, TILES, SUBS>;
  constexpr int AT_ONCE = Shape::TILES_AT_ONCE, PAIRS = Shape::PAIRS, CHUNKS = PAIRS / 4;
  constexpr int TOKEN_TILES = Shape::SUB / 16;
  const int lane = threadIdx.x % 32, quad = lane / 4, quarter = lane % 4;
  const uint32_t minus_ones[4] = {MINUS_ONES, MINUS_ONES, MINUS_ONES, MINUS_ONES};
  for (int v = 0; v < 8; ++v) best[v] = reduce.neutral();

  auto scale_chunk = [&](int sub, bool zeros, int chunk) {
    const int row = Shape::CODE_CHUNKS + (zeros ? spread(D / 8) : 0);
    return stage[sub * Shape::SUB_CHUNKS + row + spread(quarter * (D / 32)) + chunk];
  };

#pragma unroll 1
  for (int round = 0; round < TILES / AT_ONCE; ++round) {
    const int first_tile = round * AT_ONCE;
    // q.z: lanes of odd rows take the second group. With registers to spare a chunk goes in as it
    // was read: half of it for the lane's row, half for the row 8 below, each summed by itself.
    constexpr bool HELD = QueryFragments<D, TILES>::HELD;
    float zero[AT_ONCE][2][4] = {};
    const int mine = SUBS == 2 ? quad & 1 : 0;
#pragma unroll
    for (int chunk = 0; chunk < D / 32; ++chunk) {
      const uint4 z = scale_chunk(mine, true, chunk);
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
          words_of(scale_chunk(sub, false, pass * CHUNKS + chunk), s);
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

// Reduces over the lanes of a quad: score i is of token 32 i + 8 (lane % 4) + lane / 4.
template <bool SUM>
__device__ __forceinline__ void reduce_quad(const float (&best)[8], float (&scores)[2]) {
  const Reduction reduce{SUM};
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  float half[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float mine = odd ? best[2 * i + 1] : best[2 * i];
    const float other = odd ? best[2 * i] : best[2 * i + 1];
    half[i] = reduce(mine, __shfl_xor_sync(ALL_LANES, other, 1));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float mine = high ? half[2 * i + 1] : half[2 * i];
    const float other = high ? half[2 * i] : half[2 * i + 1];
    scores[i] = reduce(mine, __shfl_xor_sync(ALL_LANES, other, 2));
  }
}

template <int D, int TILES, int SUBS>
__global__ void __launch_bounds__(ScoreShape<D, TILES, SUBS>::THREADS, D == 256 ? 3 : 2)
    score_kernel(const ScoreParams p) {
  using Shape = ScoreShape<D, TILES, SUBS>;
  const int row = blockIdx.z, head = blockIdx.y;
  let_next_kernel_start();
  // All at once: each is a trip to memory.
  const int len = p.rows.lens[row], token = p.rows.tokens[row], request = p.rows.requests[row];
  const int64_t offset = p.offsets[row];
  const int steps = (len + STEP - 1) / STEP, warps = gridDim.x * Shape::WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int cta_warp = blockIdx.x * Shape::WARPS;
  if (share_begin(steps, cta_warp, warps) ==
      share_begin(steps, cta_warp + Shape::WARPS, warps)) {
    return;
  }
  const int first = share_begin(steps, cta_warp + warp, warps);
  const int last = share_begin(steps, cta_warp + warp + 1, warps);
  const int group_bits = SUBS == 2 ? 5 : 31 - __clz(p.group);
  const int full = (len - 1) >> group_bits << group_bits;  // tokens of full groups

  // Under way while addresses are looked up.
  const QueryLoader<D, TILES, true, Shape::THREADS> loader(p.queries, token, head);
  uint4* shared = reinterpret_cast<uint4*>(dynamic_shared());
  uint4* fragments = shared + Shape::WARPS * Shape::STAGES * Shape::STAGE_CHUNKS;
  int* counted = reinterpret_cast<int*>(fragments + Shape::QUERY_CHUNKS);
  float* scratch = reinterpret_cast<float*>(counted + KEY_BINS);

  // Where the groups of the next steps are, one per lane, in units of 16 bytes.
  const int* table = p.rows.block_table + request * p.rows.block_table_stride;
  const uint4* codes = reinterpret_cast<const uint4*>(p.codes + head * p.code_head_bytes);
  const uint4* scales = reinterpret_cast<const uint4*>(p.scales + head * p.scale_head_bytes);
  const uint4 *lane_codes = keep(codes + lane), *lane_scales = keep(scales + lane);
  const uint32_t spread_lane = keep(spread(lane));
  uint4* stages = shared + keep(warp * Shape::STAGES * Shape::STAGE_CHUNKS);
  auto stage_of = [&](int step) {
    return stages + static_cast<unsigned>(step - first) % Shape::STAGES * Shape::STAGE_CHUNKS;
  };
  int window = -64;
  uint32_t codes_at = 0, scales_at = 0;
  auto fetch = [&](int step) {
    if ((step + 1) * SUBS > window + 32) {
      window = step * SUBS;
      const int first_token = (window + lane) * Shape::SUB, slot = first_token % p.rows.block_size;
      const uint32_t block = first_token < full ? table[first_token / p.rows.block_size] : 0;
      codes_at = block * static_cast<uint32_t>(p.code_block_bytes / 16) + slot * D / 128;
      scales_at = block * static_cast<uint32_t>(p.scale_block_bytes / 16) +
                  (slot >> group_bits) * Shape::SCALE_CHUNKS;
    }
    uint4* stage = stage_of(step);
#pragma unroll
    for (int sub = 0; sub < SUBS; ++sub) {
      const int from = step * SUBS + sub - window;
      const uint32_t code = __shfl_sync(ALL_LANES, codes_at, from);
      const uint32_t scale = __shfl_sync(ALL_LANES, scales_at, from);
      if (step * STEP + sub * Shape::SUB >= full) continue;
#pragma unroll
      for (int i = 0; i < Shape::CODE_CHUNKS + Shape::SCALE_CHUNKS; i += 32) {
        const int of_scale = i - Shape::CODE_CHUNKS;
        const bool is_code = lane + of_scale < 0;
        uint4* to = stage + sub * Shape::SUB_CHUNKS;
        if (lane + of_scale >= Shape::SCALE_CHUNKS) continue;
        copy_async(to + (is_code ? lane + i
                                 : static_cast<int>(spread_lane) + Shape::CODE_CHUNKS +
                                       spread(of_scale)),
                   is_code ? lane_codes + code + i : lane_scales + scale + of_scale);
      }
    }
  };
#pragma unroll 1
  for (int i = 0; i < Shape::STAGES - 1; ++i) {
    if (first + i < last) fetch(first + i);
    copy_commit();
  }

  for (int bin = threadIdx.x; bin < KEY_BINS; bin += Shape::THREADS) counted[bin] = 0;
  const float undo = loader.store(fragments, scratch);
  const QueryFragments<D, TILES> queries(fragments);
  const Reduction reduce{p.sum};
  const int lane_token = lane % 4 * 8 + lane / 4;
  float* out = p.scores + head * p.score_stride + offset + lane_token;
  for (int step = first; step < last; ++step) {
    copy_wait<Shape::STAGES - 2>();
    __syncwarp();
    if (step + Shape::STAGES - 1 < last) fetch(step + Shape::STAGES - 1);
    copy_commit();

    float best[8], scores[2] = {};
    if (step * STEP < full) {
      const uint4* stage = stage_of(step);
      score_step<D, TILES, SUBS>(stage, queries, p.queries.heads, reduce, best);
      p.sum ? reduce_quad<true>(best, scores) : reduce_quad<false>(best, scores);
    }
    const bool inner = (step + 1) * STEP <= full;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float score = scores[i] * undo;
      if (isnan(score)) score = -infinity();  // as every comparison of the selection has it
      if (!inner) {
        const int token = step * STEP + i * 32 + lane_token;
        if (token >= len) continue;
        if (token >= full) score = infinity();
      }
      out[step * STEP + i * 32] = score;
      atomicAdd(counted + (order_key(score) >> KEY_SHIFT), 1);
    }
  }
  __syncthreads();
  add_histogram(counted, p.histogram + (static_cast<int64_t>(row) * gridDim.y + head) * KEY_BINS);
}

template <int D, int TILES, int SUBS>
void launch_score(const ScoreParams& p, cudaStream_t stream) {
  using Shape = ScoreShape<D, TILES, SUBS>;
  const dim3 grid(p.splits, p.queries.num_kv_heads, p.rows.count);
  launch<ScoreParams, score_kernel<D, TILES, SUBS>>(grid, Shape::THREADS, Shape::SHARED_BYTES, 1,
                                                    stream, p);
}

template <int D>
void score_dim(const ScoreParams& p, cudaStream_t stream) {
  const bool two = p.group * 2 == STEP;
  if (p.queries.heads <= 4) {
    two ? launch_score<D, 1, 2>(p, stream) : launch_score<D, 1, 1>(p, stream);
  } else if (p.queries.heads <= 8) {
    two ? launch_score<D, 2, 2>(p, stream) : launch_score<D, 2, 1>(p, stream);
  } else {
    two ? launch_score<D, 4, 2>(p, stream) : launch_score<D, 4, 1>(p, stream);
  }
}

}  // namespace kvx
