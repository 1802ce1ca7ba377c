// The operators of namespace vllm_kvx, on torch's stable ABI: one build serves torch 2.10 and up.
#include <optional>

#include "tensors.h"

using namespace kvx;

namespace {

int* histogram_of(const Tensor& histogram, int64_t rows, int64_t heads) {
  check(histogram, "histogram", 3, ScalarType::Int);
  check_aligned(histogram, "histogram", 0);
  STD_TORCH_CHECK(histogram.size(0) >= rows && histogram.size(1) == heads &&
                      histogram.size(2) == 2048,
                  "histogram must be (R, G, 2048)");
  return data<int>(histogram);
}

// What all operators that score take.
kvx::ScoreParams score_params(const Tensor& q, const Tensor& scales, const Tensor& block_table,
                              const Tensor& tokens, const Tensor& requests, const Tensor& lens,
                              int64_t group, int64_t reduction) {
  check(scales, "scales", 5, ScalarType::Half, false);
  check_aligned(scales, "scales", 3);
  kvx::ScoreParams p = {};
  p.queries = queries_of(q, scales.size(1));
  const int64_t dim = p.queries.head_dim;
  STD_TORCH_CHECK(scales.size(3) == 2 && scales.size(4) == dim && scales.stride(4) == 1 &&
                      scales.stride(3) == dim &&
                      (scales.size(2) == 1 || scales.stride(2) == 2 * dim),
                  "scales must be (blocks, G, groups, 2, D), contiguous in the last three");
  p.rows = rows_of(block_table, tokens, requests, lens, scales.size(2) * group);
  STD_TORCH_CHECK(reduction == 0 || reduction == 1, "reduction must be 0 (max) or 1 (sum)");
  p.scales = data<char>(scales);
  p.scale_block_bytes = byte_stride(scales, 0);
  p.scale_head_bytes = byte_stride(scales, 1);
  p.group = static_cast<int>(group);
  p.sum = reduction == 1;
  return p;
}

// Where the operators write that leave scores.
void set_scores(kvx::ScoreParams& p, const Tensor& offsets, const Tensor& scores,
                const Tensor& histogram) {
  const int64_t rows = p.rows.count, heads = p.queries.num_kv_heads;
  check(offsets, "offsets", 1, ScalarType::Long);
  check(scores, "scores", 2, ScalarType::Float, false);
  STD_TORCH_CHECK(offsets.size(0) == rows, "offsets must have a value per row");
  STD_TORCH_CHECK(scores.size(0) == heads && scores.stride(1) == 1,
                  "scores must be (G, capacity), contiguous in the last");
  p.offsets = data<int64_t>(offsets);
  p.scores = data<float>(scores);
  p.score_stride = scores.stride(0);
  p.histogram = histogram_of(histogram, rows, heads);
}

// What operators take that score by 1-bit keys.
kvx::ScoreParams one_bit_params(const Tensor& q, const Tensor& codes, const Tensor& scales,
                                const Tensor& block_table, const Tensor& tokens,
                                const Tensor& requests, const Tensor& lens, int64_t group,
                                int64_t reduction, int64_t programs) {
  STD_TORCH_CHECK(group == 32 || group == 64 || group == 128 || group == 256,
                  "group must be 32, 64, 128 or 256");
  check(codes, "codes", 4, ScalarType::Int, false);
  check_aligned(codes, "codes", 2);
  STD_TORCH_CHECK(programs >= 1 && programs <= 4096, "programs must be 1 to 4096");
  kvx::ScoreParams p =
      score_params(q, scales, block_table, tokens, requests, lens, group, reduction);
  p.programs = static_cast<int>(programs);
  const int64_t words = p.queries.head_dim / 32;
  STD_TORCH_CHECK(codes.size(1) == scales.size(1) && codes.size(2) == p.rows.block_size &&
                      codes.size(3) == words && codes.stride(3) == 1 && codes.stride(2) == words,
                  "codes must be (blocks, G, block_size, D / 32), contiguous in the last two");
  for (const Tensor& tensor : {codes, scales}) {
    const int64_t apart = byte_stride(tensor, 0);
    STD_TORCH_CHECK(tensor.size(0) == 1 || apart % kvx::SIDECAR_UNIT == 0,
                    "blocks of codes and of scales must be multiples of ", kvx::SIDECAR_UNIT,
                    " bytes apart");
    STD_TORCH_CHECK(tensor.size(0) * apart < int64_t{kvx::SIDECAR_UNIT} << 32,
                    "a layer's cache must be less than 1 TiB");
  }
  p.codes = data<char>(codes);
  p.code_block_bytes = byte_stride(codes, 0);
  p.code_head_bytes = byte_stride(codes, 1);
  return p;
}

void kvx_score(const Tensor& q, const Tensor& codes, const Tensor& scales,
               const Tensor& block_table, const Tensor& tokens, const Tensor& requests,
               const Tensor& lens, const Tensor& offsets, const Tensor& scores,
               const Tensor& histogram, int64_t group, int64_t reduction, int64_t programs) {
  kvx::ScoreParams p = one_bit_params(q, codes, scales, block_table, tokens, requests, lens, group,
                                      reduction, programs);
  set_scores(p, offsets, scores, histogram);
  const Launch launch(q);
  kvx::score(p, launch.stream);
}

void kvx_score_pages(const Tensor& q, const Tensor& scales, const Tensor& block_table,
                     const Tensor& tokens, const Tensor& requests, const Tensor& lens,
                     const Tensor& offsets, const Tensor& scores, const Tensor& histogram,
                     int64_t page, int64_t reduction, int64_t splits) {
  STD_TORCH_CHECK(page >= 1, "page must be positive");
  STD_TORCH_CHECK(splits >= 1 && splits <= 4096, "splits must be 1 to 4096");
  kvx::ScoreParams p =
      score_params(q, scales, block_table, tokens, requests, lens, page, reduction);
  set_scores(p, offsets, scores, histogram);
  p.splits = static_cast<int>(splits);
  const Launch launch(q);
  kvx::score_pages(p, launch.stream);
}

void kvx_select(const Tensor& scores, const Tensor& histogram, const Tensor& lens,
                const Tensor& budgets, const Tensor& offsets, const Tensor& indices,
                const Tensor& counts, int64_t unit_tokens, bool overlap, int64_t ctas) {
  check(scores, "scores", 2, ScalarType::Float, false);
  check(lens, "lens", 1, ScalarType::Int);
  check(budgets, "budgets", 1, ScalarType::Int);
  check(offsets, "offsets", 1, ScalarType::Long);
  check(indices, "indices", 3, ScalarType::Int);
  check(counts, "counts", 2, ScalarType::Int);
  const int64_t rows = lens.size(0), heads = scores.size(0);
  STD_TORCH_CHECK(scores.stride(1) == 1, "scores must be contiguous in the last dimension");
  STD_TORCH_CHECK(budgets.size(0) == rows && offsets.size(0) == rows,
                  "budgets and offsets must have a value per row");
  STD_TORCH_CHECK(indices.size(0) >= rows && indices.size(1) == heads, "indices must be (R, G, K)");
  STD_TORCH_CHECK(counts.size(0) >= rows && counts.size(1) == heads, "counts must be (R, G)");
  STD_TORCH_CHECK(unit_tokens >= 1, "unit_tokens must be positive");
  STD_TORCH_CHECK(ctas == 0 || ctas == 1 || ctas == 2 || ctas == 4 || ctas == 8,
                  "ctas must be 0, 1, 2, 4 or 8");
  kvx::SelectParams p = {};
  p.scores = data<float>(scores);
  p.score_stride = scores.stride(0);
  p.histogram = histogram_of(histogram, rows, heads);
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

// The scales that 8-bit integers have, and no other entries.
void set_scales(kvx::AttendParams& p, const Tensor& keys, const Tensor& values,
                const std::optional<Tensor>& key_scales,
                const std::optional<Tensor>& value_scales) {
  const bool int8 = p.cache_dtype == Dtype::INT8;
  STD_TORCH_CHECK(key_scales.has_value() == int8 && value_scales.has_value() == int8,
                  "keys and values of int8 must have scales, and others none");
  if (!int8) return;
  check(*key_scales, "key_scales", 3, ScalarType::Float, false);
  check(*value_scales, "value_scales", 3, ScalarType::Float, false);
  for (int64_t i = 0; i < 3; ++i) {
    STD_TORCH_CHECK(key_scales->size(i) == keys.size(i) && value_scales->size(i) == keys.size(i),
                    "scales must be (blocks, G, block_size)");
    STD_TORCH_CHECK(keys.size(i) == 1 || key_scales->stride(i) == value_scales->stride(i),
                    "value_scales must be like key_scales");
  }
  const int64_t dim = keys.size(3);
  STD_TORCH_CHECK(data<char>(values) == data<char>(keys) + dim &&
                      data<float>(*value_scales) == data<float>(*key_scales) + 1,
                  "values of int8 must lie behind their keys, and so must their scales");
  p.key_scales = data<char>(*key_scales);
  p.scale_block_bytes = byte_stride(*key_scales, 0);
  p.scale_head_bytes = byte_stride(*key_scales, 1);
  p.scale_entry_bytes = byte_stride(*key_scales, 2);
  bool aligned = reinterpret_cast<uintptr_t>(p.key_scales) % 8 == 0;
  for (int64_t i = 0; i < 3; ++i) {
    aligned = aligned && (keys.size(i) == 1 || byte_stride(*key_scales, i) % 8 == 0);
  }
  STD_TORCH_CHECK(aligned, "pairs of scales are not aligned to 8 bytes");
  for (const Tensor& tensor : {keys, *key_scales}) {
    STD_TORCH_CHECK((tensor.size(0) == 1 || byte_stride(tensor, 0) <= UINT32_MAX) &&
                        byte_stride(tensor, 2) <= UINT32_MAX,
                    "a block of int8 must take less than 4 GiB");
  }
}

// What operators take that attend.
kvx::AttendParams attend_params(const Tensor& q, const Tensor& keys, const Tensor& values,
                                const Tensor& block_table, const Tensor& tokens,
                                const Tensor& requests, const Tensor& lens,
                                const Tensor& partial_out, const Tensor& partial_lse,
                                const Tensor& out, double scale, double key_scale,
                                double value_scale, int64_t splits, double soft_cap,
                                const std::optional<Tensor>& sinks,
                                const std::optional<Tensor>& key_scales,
                                const std::optional<Tensor>& value_scales) {
  STD_TORCH_CHECK(keys.dim() == 4 && values.dim() == 4 && keys.is_cuda() && values.is_cuda(),
                  "keys and values must be (blocks, G, block_size, D) on a GPU");
  kvx::AttendParams p = {};
  p.queries = queries_of(q, keys.size(1));
  p.rows = rows_of(block_table, tokens, requests, lens, keys.size(2));
  p.cache_dtype = dtype_of(keys, "keys (uint8 must be viewed as its float8 dtype)", true);
  STD_TORCH_CHECK(p.cache_dtype == p.queries.dtype || keys.element_size() == 1,
                  "keys must have the dtype of q, or 8 bits");
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
  check(partial_out, "partial_out", 4, ScalarType::Float);
  check(partial_lse, "partial_lse", 3, ScalarType::Float);
  check(out, "out", 3, q.scalar_type(), false);
  check_aligned(partial_out, "partial_out", 0);
  check_aligned(out, "out", 2);
  const int64_t rows = p.rows.count, heads = q.size(1), dim = q.size(2);
  STD_TORCH_CHECK(splits >= 1 && splits <= 128, "splits must be 1 to 128");
  STD_TORCH_CHECK(partial_out.size(0) >= rows && partial_out.size(1) == heads &&
                      partial_out.size(2) == splits && partial_out.size(3) == dim,
                  "partial_out must be (R, H, splits, D)");
  STD_TORCH_CHECK(partial_lse.size(0) >= rows && partial_lse.size(1) == heads &&
                      partial_lse.size(2) == splits,
                  "partial_lse must be (R, H, splits)");
  STD_TORCH_CHECK(out.size(1) == heads && out.size(2) == dim && out.stride(2) == 1,
                  "out must be like q");
  p.keys = data<char>(keys);
  p.values = data<char>(values);
  p.block_bytes = byte_stride(keys, 0);
  p.head_bytes = byte_stride(keys, 1);
  p.entry_bytes = byte_stride(keys, 2);
  p.partial_out = data<float>(partial_out);
  p.partial_lse = data<float>(partial_lse);
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
  set_scales(p, keys, values, key_scales, value_scales);
  return p;
}

void kvx_attend(const Tensor& q, const Tensor& keys, const Tensor& values,
                const Tensor& block_table, const Tensor& tokens, const Tensor& requests,
                const Tensor& lens, const Tensor& indices, const Tensor& counts,
                const Tensor& partial_out, const Tensor& partial_lse, const Tensor& tickets,
                const Tensor& out, double scale, double key_scale, double value_scale,
                int64_t unit_tokens, int64_t splits, int64_t programs, bool overlap,
                double soft_cap, const std::optional<Tensor>& sinks,
                const std::optional<Tensor>& key_scales,
                const std::optional<Tensor>& value_scales) {
  kvx::AttendParams p =
      attend_params(q, keys, values, block_table, tokens, requests, lens, partial_out, partial_lse,
                    out, scale, key_scale, value_scale, splits, soft_cap, sinks, key_scales,
                    value_scales);
  check(indices, "indices", 3, ScalarType::Int, false);
  // A dimension of one may have any stride.
  auto repeats = [&](int64_t i) { return indices.size(i) == 1 || indices.stride(i) == 0; };
  const bool one_list = repeats(0) && repeats(1) && indices.stride(2) == 1;
  STD_TORCH_CHECK(one_list || indices.is_contiguous(),
                  "indices must be contiguous, or one list for all rows and KV heads");
  check(counts, "counts", 2, ScalarType::Int);
  check(tickets, "tickets", 2, ScalarType::Int);
  const int64_t rows = p.rows.count, kv_heads = keys.size(1);
  STD_TORCH_CHECK(indices.size(0) >= rows && indices.size(1) == kv_heads,
                  "indices must be (R, G, K)");
  STD_TORCH_CHECK(counts.size(0) >= rows && counts.size(1) == kv_heads, "counts must be (R, G)");
  STD_TORCH_CHECK(tickets.size(0) >= rows && tickets.size(1) == kv_heads, "tickets must be (R, G)");
  STD_TORCH_CHECK(programs >= 1 && programs <= INT32_MAX, "programs must be positive, of 32 bits");
  STD_TORCH_CHECK(unit_tokens >= 1, "unit_tokens must be positive");
  p.indices = data<int>(indices);
  p.list_stride = one_list ? 0 : indices.size(2);
  p.counts = data<int>(counts);
  p.max_units = static_cast<int>(indices.size(2));
  p.unit_tokens = static_cast<int>(unit_tokens);
  p.tickets = data<int>(tickets);
  p.programs = static_cast<int>(programs);
  p.overlap = overlap;
  const Launch launch(q);
  kvx::attend(p, launch.stream);
}

void kvx_fused(const Tensor& q, const Tensor& codes, const Tensor& scales, const Tensor& keys,
               const Tensor& values, const Tensor& block_table, const Tensor& tokens,
               const Tensor& requests, const Tensor& lens, const Tensor& budgets,
               const Tensor& state, const Tensor& partial_out, const Tensor& partial_lse,
               const Tensor& out, int64_t group, double scale, double key_scale,
               double value_scale, int64_t max_units, int64_t splits, int64_t programs,
               const std::optional<Tensor>& sinks) {
  kvx::FusedParams p = {};
  p.score = one_bit_params(q, codes, scales, block_table, tokens, requests, lens, group, 0,
                           programs);
  p.attend = attend_params(q, keys, values, block_table, tokens, requests, lens, partial_out,
                           partial_lse, out, scale, key_scale, value_scale, splits, 0, sinks,
                           std::nullopt, std::nullopt);
  check(budgets, "budgets", 1, ScalarType::Int);
  check(state, "state", 2, ScalarType::Int);
  check_aligned(state, "state", 1);
  const int64_t rows = p.score.rows.count;
  STD_TORCH_CHECK(budgets.size(0) == rows, "budgets must have a value per row");
  STD_TORCH_CHECK(p.attend.cache_dtype == p.attend.queries.dtype, "keys must have the dtype of q");
  STD_TORCH_CHECK(p.score.queries.heads <= 8, "q must have 1 to 8 query heads per KV head");
  STD_TORCH_CHECK(keys.size(1) == scales.size(1) && keys.size(2) == p.score.rows.block_size,
                  "keys and scales must be of the same blocks");
  STD_TORCH_CHECK(state.size(0) >= rows * keys.size(1) && state.size(1) == kvx::FUSED_STATE,
                  "state must be (R G, ", kvx::FUSED_STATE, ")");
  STD_TORCH_CHECK(block_table.size(1) * keys.size(2) <= (int64_t{1} << kvx::FUSED_INDEX_BITS),
                  "rows must have at most 4,194,304 entries");
  STD_TORCH_CHECK(max_units >= 1 && max_units <= INT32_MAX, "max_units must be positive");
  p.budgets = data<int>(budgets);
  p.max_units = static_cast<int>(max_units);
  p.state = data<int>(state);
  p.programs = static_cast<int>(programs);
  p.max_len = static_cast<int>(block_table.size(1) * keys.size(2));
  const Launch launch(q);
  kvx::fused(p, launch.stream);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* kvx_device_error(int device) {
  return kvx::device_error(device);
}

// See kvx::fused_longest.
extern "C" __attribute__((visibility("default"))) int64_t kvx_fused_longest(
    int device, int head_dim, int heads, int kv_heads, int rows, int splits, int programs) {
  return kvx::fused_longest(device, head_dim, heads, kv_heads, rows, splits, programs);
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
      "float soft_cap, Tensor? sinks, Tensor? key_scales, Tensor? value_scales) -> ()");
  library.def(
      "kvx_fused(Tensor q, Tensor codes, Tensor scales, Tensor keys, Tensor values, "
      "Tensor block_table, Tensor tokens, Tensor requests, Tensor lens, Tensor budgets, "
      "Tensor(a!) state, Tensor(b!) partial_out, Tensor(c!) partial_lse, Tensor(d!) out, "
      "int group, float scale, float key_scale, float value_scale, int max_units, int splits, "
      "int programs, Tensor? sinks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_kvx, CUDA, library) {
  library.impl("kvx_score", TORCH_BOX(&kvx_score));
  library.impl("kvx_score_pages", TORCH_BOX(&kvx_score_pages));
  library.impl("kvx_select", TORCH_BOX(&kvx_select));
  library.impl("kvx_attend", TORCH_BOX(&kvx_attend));
  library.impl("kvx_fused", TORCH_BOX(&kvx_fused));
}
