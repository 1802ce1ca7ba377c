// The operators of namespace vllm_kvx, on torch's stable ABI: one build serves torch 2.10 and up.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "params.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

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

void check(const Tensor& tensor, const char* name, int64_t dims, ScalarType type,
           bool contiguous = true) {
  STD_TORCH_CHECK(tensor.is_cuda(), name, " must be on a GPU");
  STD_TORCH_CHECK(tensor.dim() == dims, name, " must have ", dims, " dimensions");
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " has the wrong dtype");
  STD_TORCH_CHECK(!contiguous || tensor.is_contiguous(), name, " must be contiguous");
}

// What is copied 16 bytes at a time must begin at multiples of 16 bytes, also along strides.
void check_aligned(const Tensor& tensor, const char* name, int64_t strided_dims) {
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

int64_t byte_stride(const Tensor& tensor, int64_t dim) {
  return tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
}

kvx::Dtype dtype_of(const Tensor& tensor, const char* name, bool may_be_float8) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half: return kvx::Dtype::FLOAT16;
    case ScalarType::BFloat16: return kvx::Dtype::BFLOAT16;
    case ScalarType::Float8_e4m3fn:
      if (may_be_float8) return kvx::Dtype::FLOAT8_E4M3;
      break;
    case ScalarType::Float8_e5m2:
      if (may_be_float8) return kvx::Dtype::FLOAT8_E5M2;
      break;
    default: break;
  }
  STD_TORCH_CHECK(false, name, " has a dtype that there is no kernel for");
}

kvx::Rows rows_of(const Tensor& block_table, const Tensor& tokens, const Tensor& requests,
                  const Tensor& lens, int64_t block_size) {
  check(block_table, "block_table", 2, ScalarType::Int, false);
  STD_TORCH_CHECK(block_table.stride(1) == 1, "block_table must be contiguous in its rows");
  check(tokens, "tokens", 1, ScalarType::Int);
  check(requests, "requests", 1, ScalarType::Int);
  check(lens, "lens", 1, ScalarType::Int);
  const int64_t rows = lens.size(0);
  STD_TORCH_CHECK(tokens.size(0) == rows && requests.size(0) == rows,
                  "tokens, requests and lens must have a value per row");
  return {data<int>(tokens),      data<int>(requests),   data<int>(lens),
          data<int>(block_table), block_table.stride(0), static_cast<int>(block_size),
          static_cast<int>(rows)};
}

kvx::Queries queries_of(const Tensor& q, int64_t num_kv_heads) {
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

// What both score operators take.
kvx::ScoreParams score_params(const Tensor& q, const Tensor& scales, const Tensor& block_table,
                              const Tensor& tokens, const Tensor& requests, const Tensor& lens,
                              const Tensor& offsets, const Tensor& scores,
                              const Tensor& histogram, int64_t group, int64_t reduction,
                              int64_t splits) {
  check(scales, "scales", 5, ScalarType::Half, false);
  check(offsets, "offsets", 1, ScalarType::Long);
  check(scores, "scores", 2, ScalarType::Float, false);
  check(histogram, "histogram", 3, ScalarType::Int);
  check_aligned(scales, "scales", 3);
  kvx::ScoreParams p = {};
  p.queries = queries_of(q, scales.size(1));
  const int64_t dim = p.queries.head_dim;
  STD_TORCH_CHECK(scales.size(3) == 2 && scales.size(4) == dim && scales.stride(4) == 1 &&
                      scales.stride(3) == dim &&
                      (scales.size(2) == 1 || scales.stride(2) == 2 * dim),
                  "scales must be (blocks, G, groups, 2, D), contiguous in the last three");
  p.rows = rows_of(block_table, tokens, requests, lens, scales.size(2) * group);
  STD_TORCH_CHECK(offsets.size(0) == p.rows.count, "offsets must have a value per row");
  STD_TORCH_CHECK(scores.size(0) == scales.size(1) && scores.stride(1) == 1,
                  "scores must be (G, capacity), contiguous in the last");
  STD_TORCH_CHECK(histogram.size(0) >= p.rows.count && histogram.size(1) == scales.size(1) &&
                      histogram.size(2) == 2048,
                  "histogram must be (R, G, 2048)");
  STD_TORCH_CHECK(reduction == 0 || reduction == 1, "reduction must be 0 (max) or 1 (sum)");
  STD_TORCH_CHECK(splits >= 1 && splits <= 4096, "splits must be 1 to 4096");
  p.scales = data<char>(scales);
  p.scale_block_bytes = byte_stride(scales, 0);
  p.scale_head_bytes = byte_stride(scales, 1);
  p.offsets = data<int64_t>(offsets);
  p.scores = data<float>(scores);
  p.score_stride = scores.stride(0);
  p.histogram = data<int>(histogram);
  p.group = static_cast<int>(group);
  p.sum = reduction == 1;
  p.splits = static_cast<int>(splits);
  return p;
}

void kvx_score(const Tensor& q, const Tensor& codes, const Tensor& scales,
               const Tensor& block_table, const Tensor& tokens, const Tensor& requests,
               const Tensor& lens, const Tensor& offsets, const Tensor& scores,
               const Tensor& histogram, int64_t group, int64_t reduction, int64_t programs) {
  STD_TORCH_CHECK(group == 32 || group == 64 || group == 128 || group == 256,
                  "group must be 32, 64, 128 or 256");
  check(codes, "codes", 4, ScalarType::Int, false);
  check_aligned(codes, "codes", 2);
  STD_TORCH_CHECK(programs >= 1 && programs <= 4096, "programs must be 1 to 4096");
  kvx::ScoreParams p = score_params(q, scales, block_table, tokens, requests, lens, offsets,
                                    scores, histogram, group, reduction, 1);
  p.programs = static_cast<int>(programs);
  const int64_t words = p.queries.head_dim / 32;
  STD_TORCH_CHECK(codes.size(1) == scales.size(1) && codes.size(2) == p.rows.block_size &&
                      codes.size(3) == words && codes.stride(3) == 1 && codes.stride(2) == words,
                  "codes must be (blocks, G, block_size, D / 32), contiguous in the last two");
  constexpr int64_t MOST_BYTES = int64_t{16} << 32;
  STD_TORCH_CHECK(codes.size(0) * byte_stride(codes, 0) < MOST_BYTES &&
                      scales.size(0) * byte_stride(scales, 0) < MOST_BYTES,
                  "a layer's cache must be less than 64 GiB");
  p.codes = data<char>(codes);
  p.code_block_bytes = byte_stride(codes, 0);
  p.code_head_bytes = byte_stride(codes, 1);
  const Launch launch(q);
  kvx::score(p, launch.stream);
}

void kvx_score_pages(const Tensor& q, const Tensor& scales, const Tensor& block_table,
                     const Tensor& tokens, const Tensor& requests, const Tensor& lens,
                     const Tensor& offsets, const Tensor& scores, const Tensor& histogram,
                     int64_t page, int64_t reduction, int64_t splits) {
  STD_TORCH_CHECK(page >= 1, "page must be positive");
  const kvx::ScoreParams p = score_params(q, scales, block_table, tokens, requests, lens, offsets,
                                          scores, histogram, page, reduction, splits);
  const Launch launch(q);
  kvx::score_pages(p, launch.stream);
}

void kvx_select(const Tensor& scores, const Tensor& histogram, const Tensor& lens,
                const Tensor& budgets, const Tensor& offsets, const Tensor& indices,
                const Tensor& counts, int64_t unit_tokens, bool overlap, int64_t ctas) {
  check(scores, "scores", 2, ScalarType::Float, false);
  check(histogram, "histogram", 3, ScalarType::Int);
  check_aligned(histogram, "histogram", 0);
  check(lens, "lens", 1, ScalarType::Int);
  check(budgets, "budgets", 1, ScalarType::Int);
  check(offsets, "offsets", 1, ScalarType::Long);
  check(indices, "indices", 3, ScalarType::Int);
  check(counts, "counts", 2, ScalarType::Int);
  const int64_t rows = lens.size(0), heads = scores.size(0);
  STD_TORCH_CHECK(scores.stride(1) == 1, "scores must be contiguous in the last dimension");
  STD_TORCH_CHECK(budgets.size(0) == rows && offsets.size(0) == rows,
                  "budgets and offsets must have a value per row");
  STD_TORCH_CHECK(histogram.size(0) >= rows && histogram.size(1) == heads &&
                      histogram.size(2) == 2048,
                  "histogram must be (R, G, 2048)");
  STD_TORCH_CHECK(indices.size(0) >= rows && indices.size(1) == heads, "indices must be (R, G, K)");
  STD_TORCH_CHECK(counts.size(0) >= rows && counts.size(1) == heads, "counts must be (R, G)");
  STD_TORCH_CHECK(unit_tokens >= 1, "unit_tokens must be positive");
  STD_TORCH_CHECK(ctas == 0 || ctas == 1 || ctas == 2 || ctas == 4 || ctas == 8,
                  "ctas must be 0, 1, 2, 4 or 8");
  kvx::SelectParams p = {};
  p.scores = data<float>(scores);
  p.score_stride = scores.stride(0);
  p.histogram = data<int>(histogram);
  p.lens = data<int>(lens);
  p.budgets = data<int>(budgets);
  p.offsets = data<int64_t>(offsets);
  p.indices = data<int>(indices);
  p.counts = data<int>(counts);
  p.rows = static_cast<int>(rows);
  p.num_kv_heads = static_cast<int>(heads);
  p.max_units = static_cast<int>(indices.size(2));
  p.unit_tokens = static_cast<int>(unit_tokens);
  p.overlap = overlap;
  p.ctas = static_cast<int>(ctas);
  const Launch launch(scores);
  kvx::select(p, launch.stream);
}

void kvx_attend(const Tensor& q, const Tensor& keys, const Tensor& values,
                const Tensor& block_table, const Tensor& tokens, const Tensor& requests,
                const Tensor& lens, const Tensor& indices, const Tensor& counts,
                const Tensor& partial_out, const Tensor& partial_lse, const Tensor& tickets,
                const Tensor& out, double scale, double key_scale, double value_scale,
                int64_t unit_tokens, int64_t splits, int64_t programs, bool overlap,
                double soft_cap, const std::optional<Tensor>& sinks) {
  STD_TORCH_CHECK(keys.dim() == 4 && values.dim() == 4 && keys.is_cuda() && values.is_cuda(),
                  "keys and values must be (blocks, G, block_size, D) on a GPU");
  kvx::AttendParams p = {};
  p.queries = queries_of(q, keys.size(1));
  p.rows = rows_of(block_table, tokens, requests, lens, keys.size(2));
  p.cache_dtype = dtype_of(keys, "keys (uint8 must be viewed as its float8 dtype)", true);
  STD_TORCH_CHECK(p.cache_dtype == p.queries.dtype || keys.element_size() == 1,
                  "keys must have the dtype of q, or float8");
  STD_TORCH_CHECK(values.scalar_type() == keys.scalar_type(), "values must be like keys");
  for (int64_t i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(values.size(i) == keys.size(i) &&
                        (keys.size(i) == 1 || values.stride(i) == keys.stride(i)),
                    "values must be like keys");
  }
  STD_TORCH_CHECK(keys.size(3) == q.size(2) && keys.stride(3) == 1,
                  "keys must be contiguous in D, and have that of q");
  check_aligned(keys, "keys", 3);
  check_aligned(values, "values", 3);
  check(indices, "indices", 3, ScalarType::Int);
  check(counts, "counts", 2, ScalarType::Int);
  check(partial_out, "partial_out", 4, ScalarType::Float);
  check(partial_lse, "partial_lse", 3, ScalarType::Float);
  check(tickets, "tickets", 2, ScalarType::Int);
  check(out, "out", 3, q.scalar_type(), false);
  check_aligned(partial_out, "partial_out", 0);
  check_aligned(out, "out", 2);
  const int64_t rows = p.rows.count, kv_heads = keys.size(1), heads = q.size(1), dim = q.size(2);
  STD_TORCH_CHECK(indices.size(0) >= rows && indices.size(1) == kv_heads,
                  "indices must be (R, G, K)");
  STD_TORCH_CHECK(counts.size(0) >= rows && counts.size(1) == kv_heads, "counts must be (R, G)");
  STD_TORCH_CHECK(tickets.size(0) >= rows && tickets.size(1) == kv_heads, "tickets must be (R, G)");
  STD_TORCH_CHECK(splits >= 1 && splits <= 128, "splits must be 1 to 128");
  STD_TORCH_CHECK(programs >= 1 && programs <= INT32_MAX, "programs must be positive, of 32 bits");
  STD_TORCH_CHECK(partial_out.size(0) >= rows && partial_out.size(1) == heads &&
                      partial_out.size(2) == splits && partial_out.size(3) == dim,
                  "partial_out must be (R, H, splits, D)");
  STD_TORCH_CHECK(partial_lse.size(0) >= rows && partial_lse.size(1) == heads &&
                      partial_lse.size(2) == splits,
                  "partial_lse must be (R, H, splits)");
  STD_TORCH_CHECK(out.size(1) == heads && out.size(2) == dim && out.stride(2) == 1,
                  "out must be like q");
  STD_TORCH_CHECK(unit_tokens >= 1, "unit_tokens must be positive");
  p.keys = data<char>(keys);
  p.values = data<char>(values);
  p.block_bytes = byte_stride(keys, 0);
  p.head_bytes = byte_stride(keys, 1);
  p.entry_bytes = byte_stride(keys, 2);
  p.indices = data<int>(indices);
  p.counts = data<int>(counts);
  p.max_units = static_cast<int>(indices.size(2));
  p.unit_tokens = static_cast<int>(unit_tokens);
  p.partial_out = data<float>(partial_out);
  p.partial_lse = data<float>(partial_lse);
  p.tickets = data<int>(tickets);
  p.out = out.data_ptr();
  p.out_token_stride = out.stride(0);
  p.out_head_stride = out.stride(1);
  constexpr double LOG2_E = 1.4426950408889634;
  STD_TORCH_CHECK(soft_cap >= 0, "soft_cap must be positive, or 0 for none");
  if (soft_cap > 0) {
    p.score_scale = static_cast<float>(2 * LOG2_E * (scale * key_scale) / soft_cap);
    p.soft_cap = static_cast<float>(soft_cap * LOG2_E);
  } else {
    p.score_scale = static_cast<float>(scale * key_scale * LOG2_E);
  }
  if (sinks.has_value()) {
    p.sinks_are_float = sinks->scalar_type() == ScalarType::Float;
    check(*sinks, "sinks", 1, p.sinks_are_float ? ScalarType::Float : q.scalar_type());
    STD_TORCH_CHECK(sinks->size(0) == heads, "sinks must have a value per query head");
    p.sinks = sinks->data_ptr();
  }
  p.value_scale = static_cast<float>(value_scale);
  p.splits = static_cast<int>(splits);
  p.programs = static_cast<int>(programs);
  p.overlap = overlap;
  const Launch launch(q);
  kvx::attend(p, launch.stream);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* kvx_device_error(int device) {
  return kvx::device_error(device);
}

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_kvx, library) {
  library.def(
      "kvx_score(Tensor q, Tensor codes, Tensor scales, Tensor block_table, Tensor tokens, "
      "Tensor requests, Tensor lens, Tensor offsets, Tensor(a!) scores, Tensor(b!) histogram, "
      "int group, int reduction, int programs) -> ()");
  library.def(
      "kvx_score_pages(Tensor q, Tensor scales, Tensor block_table, Tensor tokens, "
      "Tensor requests, Tensor lens, Tensor offsets, Tensor(a!) scores, Tensor(b!) histogram, "
      "int page, int reduction, int splits) -> ()");
  library.def(
      "kvx_select(Tensor(a!) scores, Tensor(b!) histogram, Tensor lens, Tensor budgets, "
      "Tensor offsets, Tensor(c!) indices, Tensor(d!) counts, int unit_tokens, "
      "bool overlap, int ctas) -> ()");
  library.def(
      "kvx_attend(Tensor q, Tensor keys, Tensor values, Tensor block_table, Tensor tokens, "
      "Tensor requests, Tensor lens, Tensor indices, Tensor counts, Tensor(a!) partial_out, "
      "Tensor(b!) partial_lse, Tensor(c!) tickets, Tensor(d!) out, float scale, float key_scale, "
      "float value_scale, int unit_tokens, int splits, int programs, bool overlap, "
      "float soft_cap, Tensor? sinks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_kvx, CUDA, library) {
  library.impl("kvx_score", TORCH_BOX(&kvx_score));
  library.impl("kvx_score_pages", TORCH_BOX(&kvx_score_pages));
  library.impl("kvx_select", TORCH_BOX(&kvx_select));
  library.impl("kvx_attend", TORCH_BOX(&kvx_attend));
}
