#include "score_kernel.cuh"

namespace kvx {

void score_128(const ScoreParams& params, cudaStream_t stream) {
  score_dim<128>(params, stream);
}

}  // namespace kvx
