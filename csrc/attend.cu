#include "params.h"

namespace kvx {

void attend(const AttendParams& params, cudaStream_t stream) {
  switch (params.queries.head_dim) {
    case 64: return attend_64(params, stream);
    case 128: return attend_128(params, stream);
    default: return attend_256(params, stream);
  }
}

}  // namespace kvx
