#include "fused_launch.cuh"

namespace kvx {

void fused_64(const FusedParams& params, cudaStream_t stream) {
  fused_dim<64>(params, stream);
}

}  // namespace kvx
