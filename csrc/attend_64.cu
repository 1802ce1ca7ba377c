#include "attend.cuh"

namespace kvx {

void attend_64(const AttendParams& params, cudaStream_t stream) {
  attend_dim<64>(params, stream);
}

}  // namespace kvx
