// FIER: scores by themselves, for the selection to read.
#pragma once

#include "launch.cuh"
#include "score.cuh"

namespace kvx {

template <int D, int TILES, int HEADS, bool SUM>
__global__ void __launch_bounds__(ScoreShape<D, TILES, HEADS>::THREADS, D == 256 ? 3 : 2)
    score_kernel(const ScoreParams p) {
  using Shape = ScoreShape<D, TILES, HEADS>;
  let_next_kernel_start();
  const int head = blockIdx.x;
  const Part mine = find_part<STEP, Shape::WARPS>(p, blockIdx.y, gridDim.x, gridDim.y);
  if (mine.row < 0) return;
  const int all = (mine.len + STEP - 1) / STEP, warps = mine.parts * Shape::WARPS;
  const int cta_warp = mine.part * Shape::WARPS;
  if (share_begin(all, cta_warp, warps) == share_begin(all, cta_warp + Shape::WARPS, warps)) {
    return;
  }
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
  const int first = share_begin(all, cta_warp + warp, warps);
  const int last = share_begin(all, cta_warp + warp + 1, warps);
  float* out = p.scores + head * p.score_stride + mine.offset + first * STEP;
  const WarpSteps steps = {first, 1, last - first, out, STEP};
  const int* counted = score_steps<Shape, D, TILES, HEADS, SUM>(
      p, p.queries.dtype, mine, head, steps, reinterpret_cast<uint4*>(dynamic_shared()), [] {});
  const int64_t pair = static_cast<int64_t>(mine.row) * gridDim.x + head;
  add_histogram<Shape::THREADS>(counted, p.histogram + pair * KEY_BINS);
}

template <int D, int TILES, int HEADS>
void launch_score(const ScoreParams& p, cudaStream_t stream) {
  using Shape = ScoreShape<D, TILES, HEADS>;
  const int heads = p.queries.num_kv_heads;
  const dim3 grid(heads, p.rows.count ? most_parts(p.rows.count, heads, p.programs) : 0);
  if (p.sum) {
    launch<ScoreParams, score_kernel<D, TILES, HEADS, true>>(grid, Shape::THREADS,
                                                             Shape::SHARED_BYTES, 1, stream, p);
  } else {
    launch<ScoreParams, score_kernel<D, TILES, HEADS, false>>(grid, Shape::THREADS,
                                                              Shape::SHARED_BYTES, 1, stream, p);
  }
}

template <int D>
void score_dim(const ScoreParams& p, cudaStream_t stream) {
  if (p.queries.heads <= 4) {
    launch_score<D, 1, 4>(p, stream);
  } else if (p.queries.heads <= 8) {
    launch_score<D, 1, 8>(p, stream);
  } else {
    launch_score<D, 2, 8>(p, stream);
  }
}

}  // namespace kvx
