#include "attend.cuh"

namespace kvx {

void attend_128(const AttendParams& params, cudaStream_t stream) {
  attend_dim<128>(params, stream);
}

}  // namespace kvx
