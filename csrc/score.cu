#include "launch.cuh"
#include "params.h"
#include "queries.cuh"

namespace kvx {

void score(const ScoreParams& params, cudaStream_t stream) {
  switch (params.queries.head_dim) {
    case 64: return score_64(params, stream);
    case 128: return score_128(params, stream);
    default: return score_256(params, stream);
  }
}

// Quest: q.z + |q|.s bounds what a page's products can be, two products with pages as rows.
template <int D, int TILES>
struct PageShape {
  static constexpr int THREADS = 256, WARPS = 8, PAGES = 16;
  static constexpr int CHUNKS = D / 32, AT_ONCE = CHUNKS < 4 ? CHUNKS : 4;
  static constexpr int QUERY_CHUNKS = TILES * CHUNKS * 32;
  static constexpr int SHARED_BYTES = QUERY_CHUNKS * 16 + KEY_BINS * 4 + 32 * 4;
};

template <int D, int TILES>
__global__ void __launch_bounds__(PageShape<D, TILES>::THREADS, 2)
    score_pages_kernel(const ScoreParams p) {
  using Shape = PageShape<D, TILES>;
  const int row = blockIdx.z, head = blockIdx.y;
  let_next_kernel_start();
  // All at once: each is a trip to memory.
  const int len = p.rows.lens[row], token = p.rows.tokens[row], request = p.rows.requests[row];
  const int64_t offset = p.offsets[row];
  const int pages = (len + p.group - 1) / p.group, full = pages - 1;
  const int steps = (pages + Shape::PAGES - 1) / Shape::PAGES, warps = gridDim.x * Shape::WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, quarter = lane % 4;
  const int cta_warp = blockIdx.x * Shape::WARPS;
  if (share_begin(steps, cta_warp, warps) ==
      share_begin(steps, cta_warp + Shape::WARPS, warps)) {
    return;
  }
  const int first = share_begin(steps, cta_warp + warp, warps);
  const int last = share_begin(steps, cta_warp + warp + 1, warps);

  const QueryLoader<D, TILES, 8, false, Shape::THREADS> loader(p.queries, p.queries.dtype, token,
                                                               head);
  uint4* queries = reinterpret_cast<uint4*>(dynamic_shared());
  int* counted = reinterpret_cast<int*>(queries + Shape::QUERY_CHUNKS);
  float* scratch = reinterpret_cast<float*>(counted + KEY_BINS);

  const int* table = p.rows.block_table + request * p.rows.block_table_stride;
  const int per_block = p.rows.block_size / p.group;
  const char* scales = p.scales + head * p.scale_head_bytes + quarter * 16;
  auto block_of = [&](int page) { return page < full ? table[page / per_block] : -1; };
  int64_t blocks[2] = {-1, -1};
  if (first < last) {
    for (int i = 0; i < 2; ++i) blocks[i] = block_of(first * Shape::PAGES + i * 8 + quad);
  }

  for (int bin = threadIdx.x; bin < KEY_BINS; bin += Shape::THREADS) counted[bin] = 0;
  const float undo = loader.store(queries, scratch);
  const Reduction reduce{p.sum};
  float* out = p.scores + head * p.score_stride + offset;
  for (int step = first; step < last; ++step) {
    const char* at[2];
    bool held[2];
    for (int i = 0; i < 2; ++i) {
      const int page = step * Shape::PAGES + i * 8 + quad;
      held[i] = blocks[i] >= 0;
      at[i] = scales + blocks[i] * p.scale_block_bytes + page % per_block * (D * 4);
      blocks[i] = step + 1 < last ? block_of(page + Shape::PAGES) : -1;
    }
    float sums[TILES][4] = {};
#pragma unroll
    for (int begin = 0; begin < Shape::CHUNKS; begin += Shape::AT_ONCE) {
      uint4 s[Shape::AT_ONCE][2], z[Shape::AT_ONCE][2];
#pragma unroll
      for (int c = 0; c < Shape::AT_ONCE; ++c) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const char* from = at[i] + (begin + c) * 64;
          s[c][i] = held[i] ? load_16(from) : make_uint4(0, 0, 0, 0);
          z[c][i] = held[i] ? load_16(from + D * 2) : make_uint4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (int c = 0; c < Shape::AT_ONCE; ++c) {
        const uint4 s0 = s[c][0], s1 = s[c][1], z0 = z[c][0], z1 = z[c][1];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const uint4 q = queries[(tile * Shape::CHUNKS + begin + c) * 32 + lane];
          constexpr uint32_t magnitude = 0x7fff7fffu;
          accumulate_tiles<Float16>(sums[tile], {z0.x, z1.x, z0.y, z1.y}, q.x, q.y);
          accumulate_tiles<Float16>(sums[tile], {z0.z, z1.z, z0.w, z1.w}, q.z, q.w);
          accumulate_tiles<Float16>(sums[tile], {s0.x, s1.x, s0.y, s1.y}, q.x & magnitude,
                                    q.y & magnitude);
          accumulate_tiles<Float16>(sums[tile], {s0.z, s1.z, s0.w, s1.w}, q.z & magnitude,
                                    q.w & magnitude);
        }
      }
    }
    float best[2] = {reduce.neutral(), reduce.neutral()};
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (tile * 8 + quarter * 2 + i % 2 >= p.queries.heads) continue;
        best[i / 2] = reduce(best[i / 2], sums[tile][i]);
      }
    }
    // Of the two pages, a lane goes on with one; both halves of the quad end with the same.
    const bool odd = lane & 1;
    float score = reduce(odd ? best[1] : best[0],
                         __shfl_xor_sync(ALL_LANES, odd ? best[0] : best[1], 1));
    score = reduce(score, __shfl_xor_sync(ALL_LANES, score, 2)) * undo;
    const int page = step * Shape::PAGES + quarter * 8 + quad;
    if (quarter < 2 && page < pages) {
      if (isnan(score)) score = -infinity();
      if (page >= full) score = infinity();
      out[page] = score;
      atomicAdd(counted + (order_key(score) >> KEY_SHIFT), 1);
    }
  }
  __syncthreads();
  add_histogram<Shape::THREADS>(counted, p.histogram + (static_cast<int64_t>(row) * gridDim.y + head) * KEY_BINS);
}

template <int D>
static void score_pages_dim(const ScoreParams& p, cudaStream_t stream) {
  const dim3 grid(p.splits, p.queries.num_kv_heads, p.rows.count);
  if (p.queries.heads <= 8) {
    using Shape = PageShape<D, 1>;
    launch<ScoreParams, score_pages_kernel<D, 1>>(grid, Shape::THREADS, Shape::SHARED_BYTES, 1,
                                                  stream, p);
  } else {
    using Shape = PageShape<D, 2>;
    launch<ScoreParams, score_pages_kernel<D, 2>>(grid, Shape::THREADS, Shape::SHARED_BYTES, 1,
                                                  stream, p);
  }
}

void score_pages(const ScoreParams& params, cudaStream_t stream) {
  switch (params.queries.head_dim) {
    case 64: return score_pages_dim<64>(params, stream);
    case 128: return score_pages_dim<128>(params, stream);
    default: return score_pages_dim<256>(params, stream);
  }
}

}  // namespace kvx
