#include "fused_parts.cuh"

namespace kvx {

void fused(const FusedParams& params, cudaStream_t stream) {
  switch (params.score.queries.head_dim) {
    case 64: return fused_64(params, stream);
    case 128: return fused_128(params, stream);
    default: return fused_256(params, stream);
  }
}

int64_t fused_longest(int device, int head_dim, int heads, int kv_heads, int rows, int splits,
                      int programs) {
  const int each = fused_parts(programs, kv_heads, rows, splits);
  if (each < rows) return 0;
  int bytes = 0;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  auto of = [&](auto few, auto many) {
    return heads <= 4 ? few.longest(bytes, 1, each, rows) : many.longest(bytes, 1, each, rows);
  };
  switch (head_dim) {
    case 64: return of(FusedShape<64, 4>(), FusedShape<64, 8>());
    case 128: return of(FusedShape<128, 4>(), FusedShape<128, 8>());
    default: return of(FusedShape<256, 4>(), FusedShape<256, 8>());
  }
}

}  // namespace kvx
