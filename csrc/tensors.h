// Torch's tensors as the kernels take them, checked.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <climits>
#include <cstdint>

#include "params.h"

namespace kvx {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Tensors of a call are on one device, whose current stream the kernels go to.
struct Launch {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream = nullptr;

  explicit Launch(const Tensor& tensor) : guard(tensor.get_device_index()) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
    // This library's CUDA runtime is its own, and need not know what torch told its.
    const cudaError_t error = cudaSetDevice(tensor.get_device_index());
    STD_TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error));
  }
};

inline void check(const Tensor& tensor, const char* name, int64_t dims, ScalarType type,
           bool contiguous = true) {
  STD_TORCH_CHECK(tensor.is_cuda(), name, " must be on a GPU");
  STD_TORCH_CHECK(tensor.dim() == dims, name, " must have ", dims, " dimensions");
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " has the wrong dtype");
  STD_TORCH_CHECK(!contiguous || tensor.is_contiguous(), name, " must be contiguous");
}

// What is copied 16 bytes at a time must begin at multiples of 16 bytes, also along strides.
inline void check_aligned(const Tensor& tensor, const char* name, int64_t strided_dims) {
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i < strided_dims; ++i) {
    aligned = aligned && (tensor.size(i) == 1 ||
                          tensor.stride(i) * static_cast<int64_t>(tensor.element_size()) % 16 == 0);
  }
  STD_TORCH_CHECK(aligned, name, " is not aligned to 16 bytes");
}

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

inline int64_t byte_stride(const Tensor& tensor, int64_t dim) {
  return tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
}

inline Dtype dtype_of(const Tensor& tensor, const char* name, bool may_be_8_bits) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half: return Dtype::FLOAT16;
    case ScalarType::BFloat16: return Dtype::BFLOAT16;
    case ScalarType::Float8_e4m3fn:
      if (may_be_8_bits) return Dtype::FLOAT8_E4M3;
      break;
    case ScalarType::Float8_e5m2:
      if (may_be_8_bits) return Dtype::FLOAT8_E5M2;
      break;
    case ScalarType::Char:
      if (may_be_8_bits) return Dtype::INT8;
      break;
    default: break;
  }
  STD_TORCH_CHECK(false, name, " has a dtype that there is no kernel for");
}

inline Rows rows_of(const Tensor& block_table, const Tensor& tokens, const Tensor& requests,
                  const Tensor& lens, int64_t block_size) {
  check(block_table, "block_table", 2, ScalarType::Int, false);
  STD_TORCH_CHECK(block_table.stride(1) == 1, "block_table must be contiguous in its rows");
  check(tokens, "tokens", 1, ScalarType::Int);
  check(requests, "requests", 1, ScalarType::Int);
  check(lens, "lens", 1, ScalarType::Int);
  const int64_t rows = lens.size(0);
  STD_TORCH_CHECK(tokens.size(0) == rows && requests.size(0) == rows,
                  "tokens, requests and lens must have a value per row");
  STD_TORCH_CHECK(block_size > 1 && block_size <= INT_MAX, "block_size must be from 2 to 2^31 - 1");
  // n / block_size is n * factor / 2^32 / 2^shift, rounded down, for all n below 2^31: the factor
  // is at most block_size / 2^(32 + shift) too large, and 2^(shift + 1) no less than block_size.
  int shift = 0;
  while (int64_t{2} << shift < block_size) ++shift;
  const uint64_t factor = ((uint64_t{1} << (32 + shift)) + block_size - 1) / block_size;
  return {data<int>(tokens),      data<int>(requests),           data<int>(lens),
          data<int>(block_table), block_table.stride(0),         static_cast<int>(block_size),
          static_cast<int>(rows), static_cast<uint32_t>(factor), shift};
}

inline Queries queries_of(const Tensor& q, int64_t num_kv_heads) {
  STD_TORCH_CHECK(q.is_cuda() && q.dim() == 3 && q.stride(2) == 1,
                  "q must be (N, H, D) on a GPU, contiguous in D");
  check_aligned(q, "q", 2);
  const int64_t heads = q.size(1), head_dim = q.size(2);
  STD_TORCH_CHECK(heads % num_kv_heads == 0 && heads / num_kv_heads <= 16,
                  "q must have 1 to 16 query heads per KV head");
  STD_TORCH_CHECK(head_dim == 64 || head_dim == 128 || head_dim == 256,
                  "head dimension must be 64, 128 or 256");
  return {q.data_ptr(),
          q.stride(0),
          q.stride(1),
          dtype_of(q, "q", false),
          static_cast<int>(num_kv_heads),
          static_cast<int>(heads / num_kv_heads),
          static_cast<int>(head_dim)};
}

}  // namespace kvx
