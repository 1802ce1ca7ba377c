#include "fused_launch.cuh"

namespace kvx {

void fused_128(const FusedParams& params, cudaStream_t stream) {
  fused_dim<128>(params, stream);
}

}  // namespace kvx
