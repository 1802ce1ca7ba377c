#include "params.h"

namespace kvx {

__global__ void probe_kernel() {}

const char* device_error(int device) {
  cudaError_t error = cudaSetDevice(device);
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, probe_kernel);
  cudaGetLastError();  // leaves no error behind for others to find
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace kvx
