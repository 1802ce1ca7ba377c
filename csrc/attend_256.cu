#include "attend.cuh"

namespace kvx {

void attend_256(const AttendParams& params, cudaStream_t stream) {
  attend_dim<256>(params, stream);
}

}  // namespace kvx
