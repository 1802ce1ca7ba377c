#include "score_kernel.cuh"

namespace kvx {

void score_256(const ScoreParams& params, cudaStream_t stream) {
  score_dim<256>(params, stream);
}

}  // namespace kvx
