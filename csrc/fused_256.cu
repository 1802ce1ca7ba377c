#include "fused_launch.cuh"

namespace kvx {

void fused_256(const FusedParams& params, cudaStream_t stream) {
  fused_dim<256>(params, stream);
}

}  // namespace kvx
