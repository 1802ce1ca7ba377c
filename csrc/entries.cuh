// Entries of a paged cache: where they lie, and how a warp copies them.
#pragma once

#include "params.h"
#include "softmax.cuh"

namespace kvx {

// A warp's copies of the keys and values of 16 entries; offsets: of these, below 0 for those that
// do not count.
template <typename Shape>
__device__ __forceinline__ void fetch_entries(const AttendParams& p, const int64_t* offsets,
                                              uint4* to) {
  constexpr int PIECES = Shape::CACHE_CHUNKS, AT_ONCE = 32 / PIECES;  // entries, powers of two
  static_assert(AT_ONCE >= 1);
  const int lane = threadIdx.x % 32, first = lane / PIECES, piece = lane % PIECES;
  const char *keys = keep(p.keys + piece * 16), *values = keep(p.values + piece * 16);
  const uint32_t of_first =
      shared_address(to + first * PIECES + (Shape::FLOAT8 ? piece : swizzled(first, piece)));
  int64_t mine[CHUNK / AT_ONCE];
#pragma unroll
  for (int i = 0; i < CHUNK / AT_ONCE; ++i) mine[i] = offsets[i * AT_ONCE + first];
#pragma unroll
  for (int i = 0; i < CHUNK / AT_ONCE; ++i) {
    const int entry = i * AT_ONCE;  // and `first`
    const int64_t offset = mine[i];
    const int none = static_cast<int>(offset >> 32);  // negative
    const int64_t from = offset & ~(offset >> 63);
    // swizzled(entry + first, piece), as in pair_at: the sum is one of different bits.
    const uint32_t key = (of_first ^ (Shape::FLOAT8 ? 0 : entry & 7) * 16) + entry * PIECES * 16;
    copy_async_or_zero(key, keys + from, none);
    copy_async_or_zero(key + CHUNK * PIECES * 16, values + from, none);
  }
}

// Where an entry of a row lies in keys and in values, in bytes. table: the row's.
__device__ __forceinline__ int64_t offset_of(const AttendParams& p, const int* table, int kv_head,
                                             int entry) {
  const int block = block_of(p.rows, entry);
  return table[block] * p.block_bytes + kv_head * p.head_bytes +
         (entry - block * p.rows.block_size) * p.entry_bytes;
}

}  // namespace kvx
