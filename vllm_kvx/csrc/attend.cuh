// Attention of decode tokens over the selected entries of a paged cache.
//
// The CTAs of a row and KV head share its list; a warp takes 16 entries at a time, its head's
// queries as the 16 rows of a product. The CTA that finishes last merges what all have, always in
// the same order.
#pragma once

#include <type_traits>

#include "device.cuh"
#include "launch.cuh"
#include "params.h"

namespace kvx {

constexpr int CHUNK = 16;         // entries that a warp takes at a time
constexpr int PANEL = 512;        // entries whose addresses are looked up at a time
constexpr int MAX_SPLITS = 128;   // whose weights fit where the addresses were

// WIDE: more than 8 query heads. FLOAT8: of the cache.
template <int D, bool WIDE, bool FLOAT8>
struct AttendShape {
  static constexpr int WARPS = D == 256 ? 2 : 4;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int STAGES = 2;
  static constexpr int ROWS = WIDE ? 16 : 8;           // of query heads
  static constexpr int ROW_CHUNKS = D / 8;             // of 16 bytes, for 16-bit elements
  static constexpr int CACHE_CHUNKS = FLOAT8 ? D / 16 : D / 8;
  static constexpr int TILE = CHUNK * ROW_CHUNKS;      // keys or values, as they are multiplied
  static constexpr int STAGE = 2 * CHUNK * CACHE_CHUNKS;
  static constexpr int WARP_CHUNKS = STAGES * STAGE + (FLOAT8 ? 2 * TILE : 0);
  static constexpr int QUERY_CHUNKS = 16 * ROW_CHUNKS;
  static constexpr int SHARED_BYTES =
      (WARPS * WARP_CHUNKS + QUERY_CHUNKS) * 16 + PANEL * 8 + 2 * WARPS * 16 * 4 + 16;
  static_assert(WARP_CHUNKS * 16 >= ROWS * D * 4, "a warp's sums go where its entries were");
  static_assert(MAX_SPLITS * ROWS * 4 <= WARPS * WARP_CHUNKS * 16, "weights likewise");
};

// Rows of 16-bit elements, their chunks of 16 bytes in an order that spares bank conflicts.
__device__ __forceinline__ int swizzled(int row, int chunk) { return chunk ^ (row & 7); }

template <typename T, int D, bool WIDE>
struct Softmax {
  float out[D / 8][WIDE ? 4 : 2];
  float largest[2], sum[2];  // of heads lane / 4 and, if WIDE, lane / 4 + 8; sum: of this lane

  __device__ void reset() {
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
#pragma unroll
      for (int j = 0; j < (WIDE ? 4 : 2); ++j) out[i][j] = 0.0f;
    }
    largest[0] = largest[1] = -infinity();
    sum[0] = sum[1] = 0.0f;
  }

  // Adds 16 entries. offsets: below 0 for those that do not count.
  __device__ void add(const uint4* queries, const uint4* keys, const uint4* values,
                      const int64_t* offsets, float scale) {
    constexpr int ROW = D / 8;
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    float s[2][4] = {};
    const int key_row = lane % 8 + lane / 16 * 8, key_half = lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[4], b[4];
      const int row = lane % 16;
      load_matrices(a, queries + row * ROW + swizzled(row, k * 2 + lane / 16));
      load_matrices(b, keys + key_row * ROW + swizzled(key_row, k * 2 + key_half));
      accumulate_tiles<T>(s[0], a, b[0], b[1]);
      accumulate_tiles<T>(s[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool counts = offsets[i * 8 + quarter * 2 + j % 2] >= 0;
        s[i][j] = counts ? s[i][j] * scale : -infinity();
      }
    }
    uint32_t weights[4] = {};
#pragma unroll
    for (int half = 0; half < (WIDE ? 2 : 1); ++half) {
      float top = largest[half];
#pragma unroll
      for (int i = 0; i < 2; ++i) top = fmaxf(top, fmaxf(s[i][2 * half], s[i][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
      top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
      const float shift = top == -infinity() ? 0.0f : top;
      const float rescale = exp2f(largest[half] - shift);
      largest[half] = top;
      float added = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = exp2f(s[i][2 * half] - shift), y = exp2f(s[i][2 * half + 1] - shift);
        added += x + y;
        weights[2 * i + half] = T::pack(x, y);
      }
      sum[half] = sum[half] * rescale + added;
      if (__any_sync(ALL_LANES, rescale != 1.0f)) {
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
          out[i][2 * half] *= rescale;
          out[i][2 * half + 1] *= rescale;
        }
      }
    }
    const int value_row = lane % 16;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      uint32_t b[4];
      load_matrices_transposed(b,
                               values + value_row * ROW + swizzled(value_row, i * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float(&o)[WIDE ? 4 : 2] = out[2 * i + j];
        if constexpr (WIDE) {
          accumulate_tiles<T>(o, weights, b[2 * j], b[2 * j + 1]);
        } else {
          float none[2];
          multiply_tiles<T>(o[0], o[1], none[0], none[1], weights, b[2 * j], b[2 * j + 1], o[0],
                            o[1], 0.0f, 0.0f);
        }
      }
    }
  }

  // Writes rows of D sums, and each row's largest score and sum.
  __device__ void store(float* to, float* to_largest, float* to_sum) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < (WIDE ? 2 : 1); ++half) {
      const int row = lane / 4 + half * 8;
      sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 1);
      sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 2);
      if (lane % 4 == 0) to_largest[row] = largest[half], to_sum[row] = sum[half];
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        *reinterpret_cast<float2*>(to + row * D + i * 8 + lane % 4 * 2) =
            make_float2(out[i][2 * half], out[i][2 * half + 1]);
      }
    }
  }
};

// 16 rows of float8 to the 16-bit type that queries have.
template <typename T, int D>
__device__ __forceinline__ void widen(const uint4* from, uint4* to, bool e5m2) {
  constexpr int CACHE_CHUNKS = D / 16, ROW_CHUNKS = D / 8;
  auto pair = [&](uint32_t bits) {
    const uint32_t half = float8_to_half2(bits, e5m2);
    if constexpr (std::is_same_v<T, Float16>) return half;
    return T::pack(Float16::low(half), Float16::high(half));
  };
#pragma unroll
  for (int i = threadIdx.x % 32; i < CHUNK * CACHE_CHUNKS; i += 32) {
    const int row = i / CACHE_CHUNKS, chunk = i % CACHE_CHUNKS * 2;
    const uint4 x = from[i];
    to[row * ROW_CHUNKS + swizzled(row, chunk)] =
        make_uint4(pair(x.x), pair(x.x >> 16), pair(x.y), pair(x.y >> 16));
    to[row * ROW_CHUNKS + swizzled(row, chunk + 1)] =
        make_uint4(pair(x.z), pair(x.z >> 16), pair(x.w), pair(x.w >> 16));
  }
}

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

template <typename T, int D, bool WIDE, bool FLOAT8>
__global__ void __launch_bounds__(AttendShape<D, WIDE, FLOAT8>::THREADS)
    attend_kernel(const AttendParams p) {
  using Shape = AttendShape<D, WIDE, FLOAT8>;
  constexpr int WARPS = Shape::WARPS, THREADS = Shape::THREADS;
  const int split = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
  const int64_t pair = static_cast<int64_t>(row) * gridDim.y + kv_head;
  const int len = p.rows.lens[row];
  const int token = p.rows.tokens[row], request = p.rows.requests[row];
  if (len == 0) {
    wait_for_kernel_before();
    return;
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
  const int entries = p.counts[pair] * p.unit_tokens;
  const int chunks = (entries + CHUNK - 1) / CHUNK;
  // CTAs without a chunk for each warp would only make the merge longer.
  const int splits = max(1, min(p.splits, (chunks + WARPS - 1) / WARPS));
  if (split >= splits) return;
  const int begin = share_begin(chunks, split, splits);
  const int end = share_begin(chunks, split + 1, splits);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint4* shared = reinterpret_cast<uint4*>(dynamic_shared());
  uint4* stages = shared + warp * Shape::WARP_CHUNKS;
  uint4* queries = shared + WARPS * Shape::WARP_CHUNKS;
  int64_t* offsets = reinterpret_cast<int64_t*>(queries + Shape::QUERY_CHUNKS);
  float* largest = reinterpret_cast<float*>(offsets + PANEL);
  float* sums = largest + WARPS * 16;
  int* last = reinterpret_cast<int*>(sums + WARPS * 16);

  const int* table = p.rows.block_table + request * p.rows.block_table_stride;
  const int* indices = p.indices + pair * p.max_units;
  auto fetch = [&](int chunk, int stage) {
    uint4* to = stages + stage * Shape::STAGE;
#pragma unroll
    for (int i = lane; i < CHUNK * Shape::CACHE_CHUNKS; i += 32) {
      const int entry = i / Shape::CACHE_CHUNKS, piece = i % Shape::CACHE_CHUNKS;
      const int64_t offset = offsets[chunk * CHUNK + entry];
      const int64_t from = max(offset, static_cast<int64_t>(0)) + piece * 16;
      const int at = FLOAT8 ? i : entry * Shape::CACHE_CHUNKS + swizzled(entry, piece);
      copy_async_or_zero(to + at, p.keys + from, offset >= 0);
      copy_async_or_zero(to + CHUNK * Shape::CACHE_CHUNKS + at, p.values + from, offset >= 0);
    }
  };

  Softmax<T, D, WIDE> softmax;
  softmax.reset();
  for (int panel = begin; panel < end; panel += PANEL / CHUNK) {
    const int count = min(PANEL / CHUNK, end - panel);
    __syncthreads();
    for (int i = threadIdx.x; i < count * CHUNK; i += THREADS) {
      const int listed = panel * CHUNK + i;
      int64_t offset = -1;
      if (listed < entries) {
        const int entry = indices[listed / p.unit_tokens] * p.unit_tokens + listed % p.unit_tokens;
        if (entry < len) {
          offset = table[entry / p.rows.block_size] * p.block_bytes + kv_head * p.head_bytes +
                   entry % p.rows.block_size * p.entry_bytes;
        }
      }
      offsets[i] = offset;
    }
    if (panel == begin) {
#pragma unroll
      for (int k = 0; k < QUERY_LOADS; ++k) {
        const int i = k * THREADS + threadIdx.x;
        const int head = i / Shape::ROW_CHUNKS, chunk = i % Shape::ROW_CHUNKS;
        queries[head * Shape::ROW_CHUNKS + swizzled(head, chunk)] = query_chunks[k];
      }
    }
    __syncthreads();
    if (warp < count) fetch(warp, 0);
    copy_commit();
    for (int chunk = warp, stage = 0; chunk < count; chunk += WARPS, stage ^= 1) {
      if (chunk + WARPS < count) fetch(chunk + WARPS, stage ^ 1);
      copy_commit();
      copy_wait<1>();
      __syncwarp();
      const uint4* keys = stages + stage * Shape::STAGE;
      const uint4* values = keys + CHUNK * Shape::CACHE_CHUNKS;
      if constexpr (FLOAT8) {
        uint4* wide = stages + Shape::STAGES * Shape::STAGE;
        widen<T, D>(keys, wide, p.cache_dtype == Dtype::FLOAT8_E5M2);
        widen<T, D>(values, wide + Shape::TILE, p.cache_dtype == Dtype::FLOAT8_E5M2);
        keys = wide, values = wide + Shape::TILE;
        __syncwarp();
      }
      softmax.add(queries, keys, values, offsets + chunk * CHUNK, p.score_scale);
      __syncwarp();
    }
  }
  __syncthreads();

  // The warps' sums go where their entries were.
  float* warp_out = reinterpret_cast<float*>(stages);
  softmax.store(warp_out, largest + warp * 16, sums + warp * 16);
  __syncthreads();
  const float* shared_out = reinterpret_cast<const float*>(shared);
  const int64_t first_head = pair * heads;
  for (int i = threadIdx.x * 4; i < heads * D; i += THREADS * 4) {
    const int head = i / D, d = i % D;
    float top = -infinity(), sum = 0.0f;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, largest[w * 16 + head]);
    for (int w = 0; w < WARPS; ++w) {
      if (largest[w * 16 + head] == -infinity()) continue;
      const float weight = exp2f(largest[w * 16 + head] - top);
      sum += weight * sums[w * 16 + head];
      add_scaled(out, weight,
                 reinterpret_cast<const float4*>(shared_out + w * (Shape::WARP_CHUNKS * 4) + i)[0]);
    }
    const float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
    out = make_float4(out.x * scale, out.y * scale, out.z * scale, out.w * scale);
    if (splits == 1) {
      write_out<T>(p, token, kv_head * heads + head, d, out);
      continue;
    }
    const int64_t at = (first_head + head) * p.splits + split;
    *reinterpret_cast<float4*>(p.partial_out + at * D + d) = out;
    if (d == 0) p.partial_lse[at] = sum > 0.0f ? top + log2f(sum) : -infinity();
  }
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

template <typename T, int D, bool WIDE, bool FLOAT8>
void launch_attend(const AttendParams& p, cudaStream_t stream) {
  using Shape = AttendShape<D, WIDE, FLOAT8>;
  const dim3 grid(p.splits, p.queries.num_kv_heads, p.rows.count);
  launch<AttendParams, attend_kernel<T, D, WIDE, FLOAT8>>(grid, Shape::THREADS,
                                                          Shape::SHARED_BYTES, 1, stream, p,
                                                          p.overlap);
}

template <typename T, int D>
void attend_type(const AttendParams& p, cudaStream_t stream) {
  const bool wide = p.queries.heads > 8;
  if (p.cache_dtype == p.queries.dtype) {
    wide ? launch_attend<T, D, true, false>(p, stream)
         : launch_attend<T, D, false, false>(p, stream);
  } else {
    wide ? launch_attend<T, D, true, true>(p, stream)
         : launch_attend<T, D, false, true>(p, stream);
  }
}

template <int D>
void attend_dim(const AttendParams& p, cudaStream_t stream) {
  p.queries.dtype == Dtype::BFLOAT16 ? attend_type<BFloat16, D>(p, stream)
                                     : attend_type<Float16, D>(p, stream);
}

}  // namespace kvx
