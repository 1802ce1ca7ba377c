// Launches on a stream, with as much shared memory as a kernel asks for.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>

namespace kvx {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("vllm_kvx: ") + what + ": " + cudaGetErrorString(error));
  }
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Shared memory that a kernel may use is raised once per kernel and device.
template <typename Params, void (*KERNEL)(Params)>
void allow_shared_memory(int bytes) {
  static std::atomic<int> allowed[64];
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  std::atomic<int>& now = allowed[device % 64];
  if (bytes <= 48 * 1024 || now.load() >= bytes) return;
  check_cuda(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "this GPU has too little shared memory");
  now.store(bytes);
}

// overlap: the kernel may start before the one before it on the stream has ended, and waits for it
// by itself (device.cuh). Taken for false before Hopper.
// cooperative: it runs only once there is room for all of its CTAs.
template <typename Params, void (*KERNEL)(Params)>
void launch(dim3 grid, int threads, int shared_bytes, int cluster, cudaStream_t stream,
            const Params& params, bool overlap = false, bool cooperative = false) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  allow_shared_memory<Params, KERNEL>(shared_bytes);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[3];
  config.attrs = attributes;
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (overlap && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, KERNEL, params), "launch failed");
}

}  // namespace kvx
