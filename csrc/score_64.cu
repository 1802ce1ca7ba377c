#include "score_kernel.cuh"

namespace kvx {

void score_64(const ScoreParams& params, cudaStream_t stream) {
  score_dim<64>(params, stream);
}

}  // namespace kvx
