// How the launch that scores, selects and attends is made.
#pragma once

#include <string>

#include "fused.cuh"
#include "launch.cuh"

namespace kvx {

template <typename T, int D, int HEADS>
void launch_fused(FusedParams p, cudaStream_t stream) {
  using Shape = FusedShape<D, HEADS>;
  const int heads = p.score.queries.num_kv_heads, rows = p.score.rows.count;
  const dim3 grid(heads, fused_parts(p.programs, heads, rows, p.attend.splits));
  const int each = static_cast<int>(grid.y);
  if (each < rows) throw std::runtime_error("vllm_kvx: more rows than CTAs that run at once");
  const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  for (p.stages = MOST_STAGES; p.stages > 0; --p.stages) {
    p.room = Shape::room(bytes, p.stages);
    if (p.max_len <= Shape::longest(bytes, p.stages, each, rows)) break;
  }
  if (p.stages == 0) {
    throw std::runtime_error("vllm_kvx: scores of " + std::to_string(rows) + " rows of up to " +
                             std::to_string(p.max_len) + " entries do not fit in shared memory");
  }
  // CTAs wait for one another, so all must run at once: a cooperative launch begins when there is
  // room for all of them, whatever else runs on the GPU, and fails where there never can be.
  launch<FusedParams, fused_kernel<T, D, HEADS>>(grid, Shape::THREADS, bytes / 128 * 128, 1, stream,
                                                 p, false, true);
}

template <int D>
void fused_dim(const FusedParams& p, cudaStream_t stream) {
  const bool few = p.score.queries.heads <= 4;
  if (p.score.queries.dtype == Dtype::BFLOAT16) {
    few ? launch_fused<BFloat16, D, 4>(p, stream) : launch_fused<BFloat16, D, 8>(p, stream);
  } else {
    few ? launch_fused<Float16, D, 4>(p, stream) : launch_fused<Float16, D, 8>(p, stream);
  }
}

}  // namespace kvx
