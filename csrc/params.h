// What the kernels take, and the functions that launch them. No torch in here.
//
// R rows (tokens that retrieve), H query heads that share G KV heads, D channels.
// Strides of sidecar and cache are in bytes, all others in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kvx {

enum class Dtype { FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, INT8 };

// What a row is.
struct Rows {
  const int* tokens;         // (R,) row of the queries
  const int* requests;       // (R,) row of the block table
  const int* lens;           // (R,) entries it sees; 0: nothing to do
  const int* block_table;
  int64_t block_table_stride;
  int block_size;
  int count;                 // R
  uint32_t block_factor;     // block_of (device.cuh) divides by the block size by these
  int block_shift;
};

struct Queries {
  const void* data;          // (N, H, D)
  int64_t token_stride, head_stride;
  Dtype dtype;
  int num_kv_heads;          // G
  int heads;                 // H / G
  int head_dim;              // D
};

// Bytes. A run of 32 tokens' codes, a group's scales and blocks begin at multiples of it, so that
// 32 bits say where in a layer's cache they do.
constexpr int SIDECAR_UNIT = 256;

struct ScoreParams {
  Rows rows;
  Queries queries;
  const char* codes;         // (blocks, G, block_size, D / 32) int32
  int64_t code_block_bytes, code_head_bytes;
  const char* scales;        // (blocks, G, block_size / group, 2, D) float16
  int64_t scale_block_bytes, scale_head_bytes;
  const int64_t* offsets;    // (R,) a row's first unit in the scores
  float* scores;             // (G, capacity)
  int64_t score_stride;
  int* histogram;            // (R, G, 2048)
  int group;                 // tokens that share scales; of Quest, tokens of a page
  bool sum;                  // over query heads; else their maximum
  int splits;                // of Quest: CTAs per row and KV head
  int programs;              // of FIER: CTAs that run at once
};

struct SelectParams {
  float* scores;
  int64_t score_stride;
  int* histogram;
  const int *lens, *budgets;
  const int64_t* offsets;
  int* indices;              // (R, G, K)
  int* counts;               // (R, G)
  int rows, num_kv_heads, max_units, unit_tokens;
  int ctas;                  // that share a row and KV head: 1, 2, 4 or 8; 0 leaves it to `select`
  bool overlap;              // may start before the kernel before has ended
};

struct AttendParams {
  Rows rows;
  Queries queries;
  const char *keys, *values; // (blocks, G, block_size, D)
  int64_t block_bytes, head_bytes, entry_bytes;
  // Of INT8: what an entry's numbers are multiplied by, (blocks, G, block_size, 2) float32, its
  // key's and its value's. A value lies behind its key.
  const char* key_scales;
  int64_t scale_block_bytes, scale_head_bytes, scale_entry_bytes;
  const int *indices, *counts;
  int64_t list_stride;       // between lists of units; 0: all rows and KV heads read one
  int max_units, unit_tokens;
  float* partial_out;        // (R, H, splits, D)
  float* partial_lse;        // (R, H, splits), base 2
  int* tickets;              // (R, G), zero between launches
  void* out;                 // (N, H, D)
  int64_t out_token_stride, out_head_stride;
  float score_scale;         // of products, before a softmax of base 2, or before the soft cap
  float soft_cap;            // of the logits, base 2; 0 without
  const void* sinks;         // (H,) a logit more for each head, natural; nullptr without
  bool sinks_are_float;      // float32; else of the queries' dtype
  float value_scale;
  Dtype cache_dtype;
  int splits, programs;      // CTAs per row and KV head at most, and in all
  bool overlap;              // may start before the kernel before has ended
};

// Of one launch that scores, selects and attends: FIER, at most 8 query heads per KV head, `max`.
struct FusedParams {
  ScoreParams score;         // offsets, scores, histogram: unused
  AttendParams attend;       // indices, counts, tickets, programs: unused; splits: CTAs of a row
  const int* budgets;        // (R,)
  int max_units;
  int* state;                // (pairs, FUSED_STATE), zero between launches but for the lists
  int programs;              // multiprocessors: so many CTAs run at once
  int max_len;               // entries that a row has at most
  int room, stages;          // set by the launch: steps in shared memory; chunks under way
};
// Two histograms, the CTAs that have come and what they have listed, and candidates of 64 bits.
constexpr int FUSED_LISTED = 4096, FUSED_INDEX_BITS = 22;
constexpr int FUSED_COUNTERS = 2 * 2048, FUSED_LIST = FUSED_COUNTERS + 64;
constexpr int FUSED_STATE = FUSED_LIST + 2 * FUSED_LISTED;

void fused(const FusedParams& params, cudaStream_t stream);
// Entries that each of `rows` rows may have at most; heads: per KV head.
int64_t fused_longest(int device, int head_dim, int heads, int kv_heads, int rows, int splits,
                      int programs);
void score(const ScoreParams& params, cudaStream_t stream);
void score_pages(const ScoreParams& params, cudaStream_t stream);
void select(const SelectParams& params, cudaStream_t stream);
void attend(const AttendParams& params, cudaStream_t stream);

// One per head dimension, so that each compiles by itself.
void score_64(const ScoreParams& params, cudaStream_t stream);
void score_128(const ScoreParams& params, cudaStream_t stream);
void score_256(const ScoreParams& params, cudaStream_t stream);
void fused_64(const FusedParams& params, cudaStream_t stream);
void fused_128(const FusedParams& params, cudaStream_t stream);
void fused_256(const FusedParams& params, cudaStream_t stream);
void attend_64(const AttendParams& params, cudaStream_t stream);
void attend_128(const AttendParams& params, cudaStream_t stream);
void attend_256(const AttendParams& params, cudaStream_t stream);

// nullptr if this build has code for torch's current device, else what is wrong.
const char* device_error(int device);

}  // namespace kvx
