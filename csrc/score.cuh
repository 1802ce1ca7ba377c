// FIER: products of queries and 1-bit keys (Algorithm 1 of the paper), on tensor cores.
//
// k~ = z + s b with b = -1 or 1, so q.k~ = q.z + q.(s b). Tokens are the rows of the products and
// query heads their columns. The left-hand side is made of code words and scales: bits 15 - j and
// 31 - j of a word are what channels 2j and 2j + 1 of a token are multiplied by, so a shift brings
// them to the signs of a pair of float16, the channels' scales. Every product is exact.
//
// A step of 64 tokens costs the instructions that the warp issues. Most of them make signs, so all
// else that can be is computed once, before the loop.
#pragma once

#include "parts.cuh"
#include "queries.cuh"

namespace kvx {

// Tokens that a warp takes at a time: two runs, the upper and the lower rows of products. A run
// lies in one group of tokens that share scales.
constexpr int STEP = 64, RUNS = 2, RUN = STEP / RUNS;
// Pieces of 16 bytes in a unit of a sidecar's places.
constexpr int UNIT_CHUNKS = SIDECAR_UNIT / 16;

// HEADS: query heads in a product's 8 columns. Of 4 heads, a second copy serves the second run.
template <int D, int TILES, int HEADS, int OF_WARPS = D == 256 ? 4 : 8, int OF_STAGES = 4>
struct ScoreShape {
  static constexpr int WARPS = OF_WARPS;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int STAGES = OF_STAGES;
  static constexpr int PASSES = D == 256 ? 2 : 1;  // 32-bit words of a token that a lane holds
  static constexpr int CHUNKS = D / 32;            // of 8 channels that a lane holds
  // Of 16 bytes, in shared memory: codes, then scales, then zeros.
  static constexpr int CODE_CHUNKS = RUN * D / 128;
  static constexpr int SCALE_CHUNKS = D / 4;
  static_assert(CODE_CHUNKS % UNIT_CHUNKS == 0 && SCALE_CHUNKS % UNIT_CHUNKS == 0);
  // What is left free keeps reads of both runs' scales at once off each other's banks.
  static constexpr int RUN_CHUNKS = CODE_CHUNKS + SCALE_CHUNKS + SCALE_CHUNKS / 8 + D / 64;
  static constexpr int STAGE_CHUNKS = RUNS * RUN_CHUNKS;
  static constexpr int QUERY_CHUNKS = TILES * CHUNKS * 32;
  static constexpr int SHARED_BYTES =
      (WARPS * STAGES * STAGE_CHUNKS + QUERY_CHUNKS) * 16 + KEY_BINS * 4 + 32 * 4;
};

// Lanes of a quad read scales a quarter of the channels apart: this spreads them over the banks.
__device__ __forceinline__ int spread(int chunk) { return chunk + chunk / 8; }

__device__ __forceinline__ void words_of(const uint4& chunk, uint32_t (&words)[4]) {
  words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
}

// Queries as QueryLoader left them, in registers if there are few.
template <int D, int TILES>
struct QueryFragments {
  static constexpr bool HELD = TILES == 1 && D <= 128;
  static constexpr int CHUNKS = D / 32;
  const uint4* shared;
  uint32_t held[HELD ? CHUNKS * 4 : 1];

  __device__ __forceinline__ explicit QueryFragments(const uint4* fragments)
      : shared(fragments + threadIdx.x % 32) {
    if constexpr (HELD) {
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        uint32_t q[4];
        words_of(shared[chunk * 32], q);
#pragma unroll
        for (int i = 0; i < 4; ++i) held[chunk * 4 + i] = q[i];
      }
    }
  }

  // Eight channels.
  __device__ __forceinline__ void read(int tile, int chunk, uint32_t (&q)[4]) const {
    if constexpr (HELD) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = held[chunk * 4 + i];
    } else {
      words_of(shared[(tile * CHUNKS + chunk) * 32], q);
    }
  }
};

// Where in a stage a lane reads, and what it adds to products of columns that have no head.
template <int D, int TILES, int HEADS>
struct ScoreLane {
  using Shape = ScoreShape<D, TILES, HEADS>;
  const char *codes, *scales[RUNS], *zeros;  // of the first stage; zeros of run lane / 4 % 2
  float none[TILES][2];

  __device__ __forceinline__ ScoreLane(const uint4* stages, int heads, bool two_groups, bool sum) {
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    const int second = two_groups ? Shape::RUN_CHUNKS : 0;
    const int scale = Shape::CODE_CHUNKS + spread(quarter * Shape::CHUNKS);
    codes = bytes(stages) + keep((D == 64 ? lane / 2 : lane * (D / 128)) * 4);
    scales[0] = bytes(stages) + keep(scale * 16);
    scales[1] = bytes(stages) + keep((scale + second) * 16);
    zeros = bytes(stages) + keep((scale + spread(D / 8) + (lane / 4 % 2 ? second : 0)) * 16);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int head = HEADS == 4 ? quarter % 2 * 2 + i : tile * 8 + quarter * 2 + i;
        none[tile][i] = keep(head < heads || sum ? 0.0f : -infinity());
      }
    }
  }
  __device__ __forceinline__ static const char* bytes(const uint4* from) {
    return reinterpret_cast<const char*>(from);
  }
};

// How many scores a lane has of a step before lanes share theirs.
template <int HEADS>
constexpr int SCORES = HEADS == 4 ? 4 : 8;

// Scores of the step whose stage begins so many bytes after the first, reduced over those heads
// that the lane's columns hold. With 4 heads in a product best[i] is of token 8 i + lane / 4 of run
// lane % 4 / 2, else of token 8 (i % 4) + lane / 4 of run i / 4.
template <int D, int TILES, int HEADS, bool SUM>
__device__ __forceinline__ void score_step(int stage, const QueryFragments<D, TILES>& queries,
                                           const ScoreLane<D, TILES, HEADS>& at,
                                           float (&best)[SCORES<HEADS>]) {
  using Shape = ScoreShape<D, TILES, HEADS>;
  constexpr int RUN_TILES = RUN / 8, CHUNKS = Shape::CHUNKS / Shape::PASSES;
  constexpr Reduction reduce{SUM};
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  const uint32_t* codes = reinterpret_cast<const uint32_t*>(at.codes + stage);
  const uint4* zeros = reinterpret_cast<const uint4*>(at.zeros + stage);
  const uint4* scales[RUNS];
  for (int run = 0; run < RUNS; ++run) {
    scales[run] = reinterpret_cast<const uint4*>(at.scales[run] + stage);
  }

  // Of q.z a chunk goes in as it was read: half of it for the lane's row, half for the row 8 below,
  // each summed by itself.
  float zero[TILES][2][4] = {}, sums[RUN_TILES][TILES][4] = {};
#pragma unroll
  for (int pass = 0; pass < Shape::PASSES; ++pass) {
    uint32_t words[RUN_TILES][RUNS];
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
#pragma unroll
      for (int rows = 0; rows < RUN_TILES; ++rows) {
        const uint32_t word = codes[run * Shape::RUN_CHUNKS * 4 + rows * (D / 4) + pass];
        words[rows][run] = D == 64 ? word << quarter % 2 * 8 : word;
      }
    }
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
      const int chunk = pass * CHUNKS + k;
      uint32_t q[TILES][4], s[RUNS][4], z[4];
#pragma unroll
      for (int run = 0; run < RUNS; ++run) words_of(scales[run][chunk], s[run]);
      words_of(zeros[chunk], z);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        queries.read(tile, chunk, q[tile]);
        accumulate_tiles<Float16>(zero[tile][0], z, q[tile][0], q[tile][1]);
        accumulate_tiles<Float16>(zero[tile][1], z, q[tile][2], q[tile][3]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int rows = 0; rows < RUN_TILES; ++rows) {
          uint32_t a[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int run = j % 2, pair = i + j / 2 * 2;
            a[j] = with_sign(s[run][pair], words[rows][run] << (4 * k + pair));
          }
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) {
            accumulate_tiles<Float16>(sums[rows][tile], a, q[tile][2 * i], q[tile][2 * i + 1]);
          }
        }
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    // A lane's rows of q.z are those of one run, its neighbour's in the next quad of the other.
    float mine[2], other[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mine[i] = zero[tile][0][i] + zero[tile][1][2 + i] + at.none[tile][i];
      other[i] = __shfl_xor_sync(ALL_LANES, mine[i], 4);
    }
    if constexpr (HEADS == 4) {
      const bool second = lane & 2, swap = (lane >> 2 ^ lane >> 1) & 1;
#pragma unroll
      for (int i = 0; i < 2; ++i) mine[i] = swap ? other[i] : mine[i];
#pragma unroll
      for (int rows = 0; rows < RUN_TILES; ++rows) {
        const float(&x)[4] = sums[rows][tile];
        best[rows] = reduce((second ? x[2] : x[0]) + mine[0], (second ? x[3] : x[1]) + mine[1]);
      }
    } else {
      const bool odd = lane & 4;
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
        const bool swap = run ? !odd : odd;
        const float a = swap ? other[0] : mine[0], b = swap ? other[1] : mine[1];
#pragma unroll
        for (int rows = 0; rows < RUN_TILES; ++rows) {
          const float(&x)[4] = sums[rows][tile];
          const float both = reduce(x[run * 2] + a, x[run * 2 + 1] + b);
          float& to = best[run * RUN_TILES + rows];
          to = tile ? reduce(to, both) : both;
        }
      }
    }
  }
}

// Reduces over pairs of lanes that differ in `bit`: of each two scores a lane goes on with one, the
// upper lane with the second.
template <bool SUM, int N>
__device__ __forceinline__ void reduce_pair(const float (&best)[N], float (&half)[N / 2], int bit) {
  constexpr Reduction reduce{SUM};
  const bool upper = threadIdx.x & bit;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float mine = upper ? best[2 * i + 1] : best[2 * i];
    const float other = upper ? best[2 * i] : best[2 * i + 1];
    half[i] = reduce(mine, __shfl_xor_sync(ALL_LANES, other, bit));
  }
}

// Reduces over the lanes of a quad: score i is of token 32 i + 8 (lane % 4) + lane / 4.
template <bool SUM>
__device__ __forceinline__ void reduce_quad(const float (&best)[8], float (&scores)[2]) {
  float half[4];
  reduce_pair<SUM>(best, half, 1);
  reduce_pair<SUM>(half, scores, 2);
}

// The same of four: score i is of token 16 i + 8 (lane % 2) + lane / 4 of run lane % 4 / 2.
template <bool SUM>
__device__ __forceinline__ void reduce_quad(const float (&best)[4], float (&scores)[2]) {
  reduce_pair<SUM>(best, scores, 1);
}

// Steps of a warp: `count` of them, from `first` on every `apart`-th. Its scores go `out_apart`
// floats apart, step by step, from `out` on.
struct WarpSteps {
  int first, apart, count;
  float* out;
  int out_apart;
};

// Scores a warp's steps and counts them. All warps of the CTA take part, of one row and head; the
// shared memory is that of ScoreShape. Returns counts by the top 11 bits, of the CTA.
// dtype: of the queries, a constant where it is known. before_last is called by every warp when all
// that it reads is under way.
template <typename Shape, int D, int TILES, int HEADS, bool SUM, typename BeforeLast>
__device__ __forceinline__ int* score_steps(const ScoreParams& p, Dtype dtype, const Part& row,
                                            int head, const WarpSteps& steps, uint4* shared,
                                            BeforeLast before_last) {
  const int len = row.len;
  // From one lane: the compiler then knows that it is the same in all.
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int group_bits = 31 - __clz(p.group);
  const int full = keep((len - 1) >> group_bits << group_bits);  // tokens of full groups
  const bool two_groups = p.group < STEP;

  // Under way while addresses are looked up.
  const QueryLoader<D, TILES, HEADS, true, Shape::THREADS> loader(p.queries, dtype, row.token,
                                                                  head);
  uint4* fragments = shared + Shape::WARPS * Shape::STAGES * Shape::STAGE_CHUNKS;
  int* counted = reinterpret_cast<int*>(fragments + Shape::QUERY_CHUNKS);
  float* scratch = reinterpret_cast<float*>(counted + KEY_BINS);

  // Where the runs of the next steps are, one per lane, in units of SIDECAR_UNIT.
  const int* table = p.rows.block_table + row.request * p.rows.block_table_stride;
  const uint4* codes = reinterpret_cast<const uint4*>(p.codes + head * p.code_head_bytes);
  const uint4* scales = reinterpret_cast<const uint4*>(p.scales + head * p.scale_head_bytes);
  const uint4 *lane_codes = keep(codes + lane), *lane_scales = keep(scales + lane);
  uint4* stages = shared + warp * Shape::STAGES * Shape::STAGE_CHUNKS;
  char* to_codes = reinterpret_cast<char*>(stages) + keep(lane * 16);
  char* to_scales =
      reinterpret_cast<char*>(stages) + keep((Shape::CODE_CHUNKS + spread(lane)) * 16);
  auto stage_of = [&](int index) {
    return static_cast<unsigned>(index) % Shape::STAGES * Shape::STAGE_CHUNKS * 16;
  };
  auto token_of = [&](int run) {
    return (steps.first + run / RUNS * steps.apart) * STEP + run % RUNS * RUN;
  };
  auto block_at = [&](int run) {
    const int first_token = token_of(run + lane);
    return first_token < full ? table[block_of(p.rows, first_token)] : 0;
  };
  int window = -32, next_block = steps.count > 0 ? block_at(0) : 0;
  uint32_t codes_at = 0, scales_at = 0;
  // Of tokens that are in no full group something else is read, and not used.
  auto fetch = [&](int index) {
    if (index * RUNS >= window + 32) {
      window += 32;
      const uint32_t block = next_block;
      next_block = block_at(window + 32);  // not waited for
      const int token = token_of(window + lane);
      const int slot = token - block_of(p.rows, token) * p.rows.block_size;
      codes_at = block * static_cast<uint32_t>(p.code_block_bytes / SIDECAR_UNIT) +
                 static_cast<unsigned>(slot) / RUN * (Shape::CODE_CHUNKS / UNIT_CHUNKS);
      scales_at = block * static_cast<uint32_t>(p.scale_block_bytes / SIDECAR_UNIT) +
                  (slot >> group_bits) * (Shape::SCALE_CHUNKS / UNIT_CHUNKS);
    }
    const int stage = stage_of(index);
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      const int from = index * RUNS + run - window;
      const uint64_t code_unit = __shfl_sync(ALL_LANES, codes_at, from);
      const uint64_t scale_unit = __shfl_sync(ALL_LANES, scales_at, from);
      const uint4* code = lane_codes + code_unit * UNIT_CHUNKS;
      const uint4* scale = lane_scales + scale_unit * UNIT_CHUNKS;
#pragma unroll
      for (int i = 0; i < Shape::CODE_CHUNKS + Shape::SCALE_CHUNKS; i += 32) {
        const int of_scale = i - Shape::CODE_CHUNKS;
        const bool is_code = lane + of_scale < 0;
        if (lane + of_scale >= Shape::SCALE_CHUNKS) continue;
        if (run && !is_code && !two_groups) continue;
        const int to = run * Shape::RUN_CHUNKS + (is_code ? i : spread(of_scale));
        copy_async((is_code ? to_codes : to_scales) + stage + to * 16,
                   is_code ? code + i : scale + of_scale);
      }
    }
  };
#pragma unroll 1
  for (int i = 0; i < Shape::STAGES - 1; ++i) {
    if (i < steps.count) fetch(i);
    copy_commit();
  }

  fill_zeros<KEY_BINS, Shape::THREADS>(counted);
  const float undo = loader.store(fragments, scratch);
  const QueryFragments<D, TILES> queries(fragments);
  const ScoreLane<D, TILES, HEADS> at(stages, p.queries.heads, two_groups, SUM);
  constexpr int APART = HEADS == 4 ? 16 : 32;  // tokens, of the lane's two scores
  const int lane_token =
      keep((HEADS == 4 ? lane % 4 / 2 * RUN + lane % 2 * 8 : lane % 4 * 8) + lane / 4);
  float* out = steps.out + lane_token;
  auto count = [&](float score) {
    atomicAdd(counted + (order_key_unless_negative_zero(score) >> KEY_SHIFT), 1);
  };
  for (int index = 0, step = steps.first; index < steps.count;
       ++index, step += steps.apart, out += steps.out_apart) {
    copy_wait<Shape::STAGES - 2>();
    __syncwarp();
    if (index + Shape::STAGES - 1 < steps.count) {
      fetch(index + Shape::STAGES - 1);
    } else if (index + Shape::STAGES - 1 == steps.count) {
      before_last();
    }
    copy_commit();

    float best[SCORES<HEADS>], scores[2];
    score_step<D, TILES, HEADS, SUM>(stage_of(index), queries, at, best);
    reduce_quad<SUM>(best, scores);
    // NaN becomes -inf, as every comparison of the selection has it, and -0.0 becomes 0.0.
#pragma unroll
    for (int i = 0; i < 2; ++i) scores[i] = fmaxf(fmaf(scores[i], undo, 0.0f), -infinity());
    if ((step + 1) * STEP <= full) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        out[i * APART] = scores[i];
        count(scores[i]);
      }
      continue;
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int token = step * STEP + i * APART + lane_token;
      if (token >= len) continue;
      const float score = token >= full ? infinity() : i ? scores[1] : scores[0];
      out[i * APART] = score;
      count(score);
    }
  }
  __syncthreads();
  return counted;
}

}  // namespace kvx
