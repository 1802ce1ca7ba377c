// Attention of decode tokens over the selected entries of a paged cache.
//
// The CTAs of a row and KV head share its list; a warp takes 16 entries at a time, its head's
// queries as the 16 rows of a product. The CTA that finishes last merges what all have, always in
// the same order.
#pragma once

#include "entries.cuh"
#include "int8.cuh"
#include "launch.cuh"
#include "params.h"
#include "softmax.cuh"

namespace kvx {

constexpr int PANEL = 512;        // entries whose addresses are looked up at a time
constexpr int MAX_SPLITS = 128;   // whose weights fit where the addresses were

// What the cache holds.
enum class Cache { LIKE_QUERIES, FLOAT8, INT8 };

// WIDE: more than 8 query heads.
template <int D, bool WIDE, Cache CACHE, int OF_WARPS = D == 256 ? 2 : 4>
struct AttendShape {
  static constexpr bool FLOAT8 = CACHE == Cache::FLOAT8, INT8 = CACHE == Cache::INT8;
  static constexpr int WARPS = OF_WARPS;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int STAGES = INT8 ? 3 : 2;          // of half the bytes
  static constexpr int ROWS = WIDE ? 16 : 8;           // of query heads
  static constexpr int ROW_CHUNKS = D / 8;             // of 16 bytes, for 16-bit elements
  static constexpr int CACHE_CHUNKS = FLOAT8 || INT8 ? D / 16 : D / 8;
  static constexpr int TILE = CHUNK * ROW_CHUNKS;      // keys or values, as they are multiplied
  static constexpr int STAGE = 2 * CHUNK * CACHE_CHUNKS;
  static constexpr int SCALES = INT8 ? CHUNK * 8 / 16 : 0;  // of a stage, behind all stages
  static constexpr int WARP_CHUNKS = STAGES * (STAGE + SCALES) + (FLOAT8 ? 2 * TILE : 0);
  using Place = std::conditional_t<INT8, Int8Place, int64_t>;
  static constexpr int QUERY_CHUNKS = 16 * ROW_CHUNKS;
  static constexpr int SHARED_BYTES =
      (WARPS * WARP_CHUNKS + QUERY_CHUNKS) * 16 + PANEL * 8 + 2 * WARPS * 16 * 4 + 16;
  static_assert(WARP_CHUNKS % 8 == 0, "rows of 8-bit integers begin at multiples of 128 bytes");
  static_assert(WARP_CHUNKS * 16 >= ROWS * D * 4, "a warp's sums go where its entries were");
  static_assert(MAX_SPLITS * ROWS * 4 <= WARPS * WARP_CHUNKS * 16, "weights likewise");
};

__device__ __forceinline__ void add_scaled(float4& sum, float weight, float4 x) {
  sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}

// Four channels of a head's result.
template <typename T>
__device__ __forceinline__ void write_out(const AttendParams& p, int64_t token, int64_t head,
                                          int d, float4 x) {
  const float scale = p.value_scale;
  const int64_t at = token * p.out_token_stride + head * p.out_head_stride + d;
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) =
      make_uint2(T::pack(x.x * scale, x.y * scale), T::pack(x.z * scale, x.w * scale));
}

// The logit of a head's sink, base 2.
template <typename T>
__device__ __forceinline__ float sink_of(const AttendParams& p, int head) {
  constexpr float LOG2_E = 1.4426950408889634f;
  const float sink = p.sinks_are_float ? static_cast<const float*>(p.sinks)[head]
                                       : T::low(static_cast<const uint16_t*>(p.sinks)[head]);
  return sink * LOG2_E;
}

// Adds up what the CTAs of a row and KV head have, weighted by their share of the softmax.
template <typename T, int D, int WARPS>
__device__ __forceinline__ void merge(const AttendParams& p, int64_t pair, int token, int kv_head,
                                      int splits, float* weights) {
  const int heads = p.queries.heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first_head = pair * heads;
  constexpr int PER_LANE = MAX_SPLITS / 32;
  for (int head = warp; head < heads; head += WARPS) {
    const float* lse = p.partial_lse + (first_head + head) * p.splits;
    float mine[PER_LANE], top = -infinity(), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      mine[i] = lane + i * 32 < splits ? __ldcg(lse + lane + i * 32) : -infinity();
      top = fmaxf(top, mine[i]);
    }
    for (int step = 16; step; step /= 2) {
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
    }
    if (p.sinks != nullptr) {
      const float sink = sink_of<T>(p, kv_head * heads + head);
      top = fmaxf(top, sink);
      if (lane == 0) sum = exp2f(sink - top);
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      mine[i] = mine[i] == -infinity() ? 0.0f : exp2f(mine[i] - top);
      sum += mine[i];
    }
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    const float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      weights[head * MAX_SPLITS + lane + i * 32] = mine[i] * scale;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x * 4; i < heads * D; i += WARPS * 32 * 4) {
    const int head = i / D, d = i % D;
    const float* partial = p.partial_out + (first_head + head) * p.splits * D + d;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int j = 0; j < splits; ++j) {
      add_scaled(out, weights[head * MAX_SPLITS + j],
                 __ldcg(reinterpret_cast<const float4*>(partial + static_cast<int64_t>(j) * D)));
    }
    write_out<T>(p, token, kv_head * heads + head, d, out);
  }
}

// Adds up what the warps of a CTA have and writes it: the result if there is one split, else its
// part. warp_out: a warp's sums, `warp_floats` before the next one's. Index: an integer for places
// in the parts of all.
template <typename T, int D, int WARPS, typename Index>
__device__ __forceinline__ void write_part(const AttendParams& p, Index pair, int token,
                                           int kv_head, int split, int splits,
                                           const float* warp_out, int warp_floats,
                                           const float* largest, const float* sums) {
  const int heads = p.queries.heads;
  const Index first_head = pair * heads;
  for (int i = threadIdx.x * 4; i < heads * D; i += WARPS * 32 * 4) {
    const int head = i / D, d = i % D;
    float top = -infinity(), sum = 0.0f;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, largest[w * 16 + head]);
    if (splits == 1 && p.sinks != nullptr) {  // Of several CTAs the last one adds it.
      const float sink = sink_of<T>(p, kv_head * heads + head);
      top = fmaxf(top, sink);
      sum = exp2_or_zero(sink - top);
    }
    const float shift = top == -infinity() ? 0.0f : top;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float weight = exp2_or_zero(largest[w * 16 + head] - shift);
      sum += weight * sums[w * 16 + head];
      add_scaled(out, weight, reinterpret_cast<const float4*>(warp_out + w * warp_floats + i)[0]);
    }
    const float scale = sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f;  // it is 1 at least
    out = make_float4(out.x * scale, out.y * scale, out.z * scale, out.w * scale);
    if (splits == 1) {
      write_out<T>(p, token, kv_head * heads + head, d, out);
      continue;
    }
    const Index at = (first_head + head) * p.splits + split;
    *reinterpret_cast<float4*>(p.partial_out + at * D + d) = out;
    if (d == 0) p.partial_lse[at] = sum > 0.0f ? top + log2_of_normal(sum) : -infinity();
  }
}

template <typename T, int D, bool WIDE, Cache CACHE, bool CAPPED>
__global__ void __launch_bounds__(AttendShape<D, WIDE, CACHE>::THREADS)
    attend_kernel(const AttendParams p) {
  using Shape = AttendShape<D, WIDE, CACHE>;
  constexpr bool FLOAT8 = Shape::FLOAT8, INT8 = Shape::INT8;
  constexpr int WARPS = Shape::WARPS, THREADS = Shape::THREADS;
  const int split = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
  const int64_t pair = static_cast<int64_t>(row) * gridDim.y + kv_head;
  const int len = p.rows.lens[row];
  const int token = p.rows.tokens[row], request = p.rows.requests[row];
  if (len == 0) {
    wait_for_kernel_before();
    return;
  }
  // Of a CUDA graph's rows some are empty: the others have their CTAs.
  int most = 1;
  if (p.splits > 1) {
    int live = 0;
    for (int i = threadIdx.x % 32; i < p.rows.count; i += 32) live += p.rows.lens[i] > 0;
    live = __reduce_add_sync(ALL_LANES, live);
    most = min(p.splits, max(p.programs / (live * static_cast<int>(gridDim.y)), 1));
  }
  const int heads = p.queries.heads;
  const char* query = static_cast<const char*>(p.queries.data) +
                      (token * p.queries.token_stride +
                       static_cast<int64_t>(kv_head) * heads * p.queries.head_stride) * 2;
  // On their way while addresses are looked up.
  constexpr int QUERY_LOADS = Shape::QUERY_CHUNKS / THREADS;
  uint4 query_chunks[QUERY_LOADS];
#pragma unroll
  for (int k = 0; k < QUERY_LOADS; ++k) {
    const int i = k * THREADS + threadIdx.x;
    const int head = i / Shape::ROW_CHUNKS, chunk = i % Shape::ROW_CHUNKS;
    query_chunks[k] = head < heads ? load_16(query + head * p.queries.head_stride * 2 + chunk * 16)
                                   : make_uint4(0, 0, 0, 0);
  }
  wait_for_kernel_before();
  // A row most often selects as much as it may. What to read is looked up as if it did, while its
  // count is on its way, and anew if it did not: a trip to memory less.
  const int* indices = p.indices + pair * p.list_stride;
  constexpr int AHEAD = PANEL / THREADS;
  int units[AHEAD];  // of the first panel
  int entries = min((len + p.unit_tokens - 1) / p.unit_tokens, p.max_units) * p.unit_tokens;
  int splits, begin, end;
  auto look_up = [&] {
    const int chunks = (entries + CHUNK - 1) / CHUNK;
    // CTAs without a chunk for each warp would only make the merge longer.
    splits = max(1, min(most, (chunks + WARPS - 1) / WARPS));
    begin = share_begin(chunks, split, splits);
    end = share_begin(chunks, split + 1, splits);
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const int listed = begin * CHUNK + k * THREADS + threadIdx.x;
      const bool mine = split < splits && listed < min(entries, end * CHUNK);
      units[k] = mine ? indices[listed / p.unit_tokens] : 0;
    }
  };
  const int counted = p.counts[pair] * p.unit_tokens;  // not waited for yet
  look_up();
  if (counted != entries) {
    entries = counted;
    look_up();
  }
  if (split >= splits) return;

  const int warp = threadIdx.x / 32;
  uint4* shared = reinterpret_cast<uint4*>(dynamic_shared());
  uint4* stages = shared + warp * Shape::WARP_CHUNKS;
  uint4* queries = shared + WARPS * Shape::WARP_CHUNKS;
  using Place = typename Shape::Place;
  Place* places = reinterpret_cast<Place*>(queries + Shape::QUERY_CHUNKS);
  float* largest = reinterpret_cast<float*>(places + PANEL);
  float* sums = largest + WARPS * 16;
  int* last = reinterpret_cast<int*>(sums + WARPS * 16);

  const int* table = p.rows.block_table + request * p.rows.block_table_stride;
  auto fetch = [&](int chunk, int stage) {
    uint4* to = stages + stage * Shape::STAGE;
    if constexpr (INT8) {
      uint4* scales = stages + Shape::STAGES * Shape::STAGE + stage * Shape::SCALES;
      fetch_int8<D>(p, kv_head, places + chunk * CHUNK, to, scales);
    } else {
      fetch_entries<Shape>(p, places + chunk * CHUNK, to);
    }
  };

  std::conditional_t<INT8, Int8Softmax<D, WIDE, CAPPED>, Softmax<T, D, WIDE, CAPPED>> softmax;
  softmax.reset();
  for (int panel = begin; panel < end; panel += PANEL / CHUNK) {
    const int count = min(PANEL / CHUNK, end - panel);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const int i = k * THREADS + threadIdx.x, listed = panel * CHUNK + i;
      if (i >= count * CHUNK) break;
      int entry = len;
      if (listed < entries) {
        const int unit = panel == begin ? units[k] : indices[listed / p.unit_tokens];
        entry = unit * p.unit_tokens + listed % p.unit_tokens;
      }
      if constexpr (INT8) {
        places[i] = entry < len ? int8_place_of(p, table, entry) : NO_PLACE;
      } else {
        places[i] = entry < len ? offset_of(p, table, kv_head, entry) : -1;
      }
    }
    if (panel == begin) {
#pragma unroll
      for (int k = 0; k < QUERY_LOADS; ++k) {
        const int i = k * THREADS + threadIdx.x;
        const int head = i / Shape::ROW_CHUNKS, chunk = i % Shape::ROW_CHUNKS;
        uint4* of_head = queries + head * Shape::ROW_CHUNKS;
        if constexpr (INT8) {
          float factor;
          const uint4 x = query_to_float16<T, D>(query_chunks[k], factor);
          store_query_int8(of_head + swizzled(head, chunk & ~1),
                           of_head + swizzled(head, chunk | 1), chunk & 1, x);
          if (chunk == 0) largest[head] = factor;  // where none is yet
        } else {
          of_head[swizzled(head, chunk)] = query_chunks[k];
        }
      }
    }
    __syncthreads();
    constexpr int AT_ONCE = Shape::STAGES - 1;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (warp + i * WARPS < count) fetch(warp + i * WARPS, i);
      copy_commit();
    }
    if constexpr (INT8) {
      if (panel == begin) softmax.start(queries, largest, p.score_scale);
    }
    auto after = [](int stage) { return stage == AT_ONCE ? 0 : stage + 1; };
    for (int chunk = warp, stage = 0; chunk < count; chunk += WARPS, stage = after(stage)) {
      const int next = chunk + AT_ONCE * WARPS;
      if (next < count) fetch(next, stage ? stage - 1 : AT_ONCE);
      copy_commit();
      copy_wait<AT_ONCE>();
      __syncwarp();
      const uint4* keys = stages + stage * Shape::STAGE;
      if constexpr (INT8) {
        const uint4* scales = stages + Shape::STAGES * Shape::STAGE + stage * Shape::SCALES;
        softmax.add(queries, keys, scales, p.soft_cap);
      } else {
        const uint4* values = keys + CHUNK * Shape::CACHE_CHUNKS;
        if constexpr (FLOAT8) {
          uint4* wide = stages + Shape::STAGES * Shape::STAGE;
          widen<T, D>(keys, wide, p.cache_dtype == Dtype::FLOAT8_E5M2);
          widen<T, D>(values, wide + Shape::TILE, p.cache_dtype == Dtype::FLOAT8_E5M2);
          keys = wide, values = wide + Shape::TILE;
          __syncwarp();
        }
        softmax.add(queries, keys, values, places + chunk * CHUNK, p.score_scale, p.soft_cap);
      }
      __syncwarp();
    }
  }
  __syncthreads();

  // The warps' sums go where their entries were.
  float* warp_out = reinterpret_cast<float*>(stages);
  softmax.store(warp_out, largest + warp * 16, sums + warp * 16);
  __syncthreads();
  write_part<T, D, WARPS>(p, pair, token, kv_head, split, splits,
                          reinterpret_cast<const float*>(shared), Shape::WARP_CHUNKS * 4, largest,
                          sums);
  if (splits == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *last = atomicAdd(p.tickets + pair, 1) == splits - 1;
    if (*last) p.tickets[pair] = 0;
  }
  __syncthreads();
  if (!*last) return;
  __threadfence();
  merge<T, D, WARPS>(p, pair, token, kv_head, splits, reinterpret_cast<float*>(shared));
}

template <typename T, int D, bool WIDE, Cache CACHE, bool CAPPED>
void launch_capped(const AttendParams& p, cudaStream_t stream) {
  using Shape = AttendShape<D, WIDE, CACHE>;
  const dim3 grid(p.splits, p.queries.num_kv_heads, p.rows.count);
  launch<AttendParams, attend_kernel<T, D, WIDE, CACHE, CAPPED>>(
      grid, Shape::THREADS, Shape::SHARED_BYTES, 1, stream, p, p.overlap);
}

template <typename T, int D, Cache CACHE>
void launch_attend(const AttendParams& p, cudaStream_t stream) {
  const bool capped = p.soft_cap > 0.0f;
  if (p.queries.heads > 8) {
    capped ? launch_capped<T, D, true, CACHE, true>(p, stream)
           : launch_capped<T, D, true, CACHE, false>(p, stream);
  } else {
    capped ? launch_capped<T, D, false, CACHE, true>(p, stream)
           : launch_capped<T, D, false, CACHE, false>(p, stream);
  }
}

template <typename T, int D>
void attend_type(const AttendParams& p, cudaStream_t stream) {
  if (p.cache_dtype == p.queries.dtype) {
    launch_attend<T, D, Cache::LIKE_QUERIES>(p, stream);
  } else if (p.cache_dtype == Dtype::INT8) {
    launch_attend<T, D, Cache::INT8>(p, stream);
  } else {
    launch_attend<T, D, Cache::FLOAT8>(p, stream);
  }
}

template <int D>
void attend_dim(const AttendParams& p, cudaStream_t stream) {
  p.queries.dtype == Dtype::BFLOAT16 ? attend_type<BFloat16, D>(p, stream)
                                     : attend_type<Float16, D>(p, stream);
}

}  // namespace kvx
