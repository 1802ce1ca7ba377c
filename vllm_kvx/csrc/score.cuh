// FIER: products of queries and 1-bit keys (Algorithm 1 of the paper), on tensor cores.
//
// k~ = z + s b with b = -1 or 1, so q.k~ = q.z + (q s).b. Tokens are the rows of the product and
// query heads its columns. How the right one of the two products is computed: score_bytes.cuh, or
// score_float16.cuh.
#pragma once

#include "launch.cuh"
#include "score_bytes.cuh"
#include "score_float16.cuh"

namespace kvx {

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

// PRODUCTS: ByteProducts or Float16Products.
template <template <int, int, int, int> class PRODUCTS, int D, int TILES, int SUBS, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, PRODUCTS<D, TILES, SUBS, WARPS>::CTAS)
    score_kernel(const ScoreParams p) {
  using Products = PRODUCTS<D, TILES, SUBS, WARPS>;
  using Shape = typename Products::Shape;
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
  const typename Products::Loader loader(p.queries, token, head);
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
  const float undo = loader.store(fragments, scratch, Products::QUERY_EXPONENT);
  const Products products(fragments);
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
      products.score_step(stage, p.queries.heads, reduce, best);
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

template <template <int, int, int, int> class PRODUCTS, int D, int TILES, int WARPS>
void launch_score(const ScoreParams& p, cudaStream_t stream) {
  const dim3 grid(p.splits, p.queries.num_kv_heads, p.rows.count);
  if (p.group * 2 == STEP) {
    using Shape = typename PRODUCTS<D, TILES, 2, WARPS>::Shape;
    launch<ScoreParams, score_kernel<PRODUCTS, D, TILES, 2, WARPS>>(
        grid, Shape::THREADS, Shape::SHARED_BYTES, 1, stream, p);
  } else {
    using Shape = typename PRODUCTS<D, TILES, 1, WARPS>::Shape;
    launch<ScoreParams, score_kernel<PRODUCTS, D, TILES, 1, WARPS>>(
        grid, Shape::THREADS, Shape::SHARED_BYTES, 1, stream, p);
  }
}

template <template <int, int, int, int> class PRODUCTS, int D>
void score_dim_with(const ScoreParams& p, cudaStream_t stream) {
  constexpr int WARPS = D == 256 ? 4 : 8, MORE = D == 256 ? 4 : 12;
  if (p.queries.heads <= 4) {
    p.more_warps ? launch_score<PRODUCTS, D, 1, MORE>(p, stream)
                 : launch_score<PRODUCTS, D, 1, WARPS>(p, stream);
  } else if (p.queries.heads <= 8) {
    launch_score<PRODUCTS, D, 2, WARPS>(p, stream);
  } else {
    launch_score<PRODUCTS, D, 4, WARPS>(p, stream);
  }
}

template <int D>
void score_dim(const ScoreParams& p, cudaStream_t stream) {
  p.float16_products ? score_dim_with<Float16Products, D>(p, stream)
                     : score_dim_with<ByteProducts, D>(p, stream);
}

}  // namespace kvx
