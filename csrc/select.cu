// The units of highest score, exactly, in ascending order.
//
// A radix select on keys of 32 bits: the score kernel counted the top 11 bits, two passes over the
// scores settle the other 11 + 10. Of units at the threshold the first ones are taken. The CTAs of
// a cluster share a row and KV head; each keeps its share's keys in shared memory.
#include <climits>

#include "device.cuh"
#include "launch.cuh"
#include "params.h"

namespace kvx {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int BATCH = 8;  // loads of a warp under way at a time

struct SelectShared {
  int histogram[KEY_BINS];  // this CTA's
  int total[KEY_BINS];      // the cluster's
  int warp_sums[WARPS];
  int found[3];
  int2 warp_counts[WARPS];
  int2 cta_count;
  uint32_t keys[1];         // as many as SelectParams::cached
};

// Of bins in descending order the one in which the `wanted`-th unit is.
struct Bin {
  int bin, rank, count;  // rank: of the wanted unit among the bin's `count`, from 1
};

// Each thread has four neighbouring bins, the first thread the highest.
__device__ __forceinline__ int4 read_bins(const int* bins) {
  return reinterpret_cast<const int4*>(bins)[THREADS - 1 - threadIdx.x];
}

__device__ Bin find_bin(int4 bins, int wanted, SelectShared& shared) {
  static_assert(KEY_BINS == THREADS * 4);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int counts[4] = {bins.w, bins.z, bins.y, bins.x};
  const int sum = bins.x + bins.y + bins.z + bins.w;
  int before = sum;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(ALL_LANES, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) shared.warp_sums[warp] = before;
  if (threadIdx.x < 3) shared.found[threadIdx.x] = 0;
  __syncthreads();
  before -= sum;
  for (int i = 0; i < warp; ++i) before += shared.warp_sums[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (before < wanted && wanted <= before + counts[i]) {
      shared.found[0] = KEY_BINS - 1 - (threadIdx.x * 4 + i);
      shared.found[1] = wanted - before;
      shared.found[2] = counts[i];
    }
    before += counts[i];
  }
  __syncthreads();
  return {shared.found[0], shared.found[1], shared.found[2]};
}

// A CTA's share of the units, and of it a warp's.
struct Share {
  const float* scores;  // of the row and head
  uint32_t* keys;       // in shared memory: those of units [begin, cached_end)
  int begin, cached_end, warp_begin, warp_end;
};

__device__ __forceinline__ uint32_t key_at(const Share& share, int unit) {
  return order_key(__ldg(share.scores + unit));
}

// Puts the keys of the warp's units into shared memory, as far as there is room.
__device__ __forceinline__ void load_keys(const Share& share) {
  const int end = min(share.warp_end, share.cached_end);
  for (int base = share.warp_begin + threadIdx.x % 32; base < end; base += 32 * BATCH) {
    uint32_t keys[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (base + i * 32 < end) keys[i] = key_at(share, base + i * 32);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (base + i * 32 < end) share.keys[base + i * 32 - share.begin] = keys[i];
    }
  }
}

// Calls visit(unit, key, valid) for the warp's units in order, all lanes together.
template <typename Visit>
__device__ __forceinline__ void for_each_unit(const Share& share, Visit visit) {
  const int lane = threadIdx.x % 32;
  for (int base = share.warp_begin; base < share.warp_end; base += 32 * BATCH) {
    uint32_t keys[BATCH] = {};
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int unit = base + i * 32 + lane;
      if (unit >= share.warp_end) continue;
      keys[i] = unit < share.cached_end ? share.keys[unit - share.begin] : key_at(share, unit);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (base + i * 32 >= share.warp_end) break;
      const int unit = base + i * 32 + lane;
      visit(unit, keys[i], unit < share.warp_end);
    }
  }
}

template <int CTAS>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (CTAS == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
}

// Counts (key >> shift) & mask of those units whose key >> above is `prefix`, over the cluster.
template <int CTAS>
__device__ const int* count_digits(const Share& share, SelectShared& shared, uint32_t prefix,
                                   int above, int shift, uint32_t mask) {
  for (int i = threadIdx.x; i < KEY_BINS; i += THREADS) shared.histogram[i] = 0;
  __syncthreads();
  for_each_unit(share, [&](int, uint32_t key, bool valid) {
    if (valid && key >> above == prefix) atomicAdd(shared.histogram + (key >> shift & mask), 1);
  });
  sync_cluster<CTAS>();
  if constexpr (CTAS == 1) return shared.histogram;
  // Each CTA adds up its part of the bins and tells all of them.
  constexpr int PART = KEY_BINS / CTAS;
  const int rank = blockIdx.x;
  for (int i = threadIdx.x; i < PART; i += THREADS) {
    const int bin = rank * PART + i;
    int sum = 0;
#pragma unroll
    for (int cta = 0; cta < CTAS; ++cta) sum += *in_cta(shared.histogram + bin, cta);
#pragma unroll
    for (int cta = 0; cta < CTAS; ++cta) *in_cta(shared.total + bin, cta) = sum;
  }
  sync_cluster<CTAS>();
  return shared.total;
}

template <int CTAS>
__global__ void __launch_bounds__(THREADS, 2) select_kernel(const SelectParams p) {
  SelectShared& shared = *reinterpret_cast<SelectShared*>(dynamic_shared());
  const int rank = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t at = static_cast<int64_t>(row) * gridDim.y + head;
  const int len = p.lens[row], row_budget = p.budgets[row];
  const int64_t offset = p.offsets[row];
  if (len == 0) {
    if (rank == 0 && threadIdx.x == 0) p.counts[at] = 0;
    return;
  }
  const int units = (len + p.unit_tokens - 1) / p.unit_tokens;
  const int budget = max(min(row_budget, p.max_units), 0);
  int* histogram = p.histogram + at * KEY_BINS;
  int* indices = p.indices + at * p.max_units;
  if (units <= budget || budget == 0) {
    for (int i = rank * THREADS + threadIdx.x; i < min(units, budget); i += CTAS * THREADS) {
      indices[i] = i;
    }
    for (int i = rank * THREADS + threadIdx.x; i < KEY_BINS; i += CTAS * THREADS) histogram[i] = 0;
    if (rank == 0 && threadIdx.x == 0) p.counts[at] = min(units, budget);
    return;
  }

  Share share;
  share.scores = p.scores + head * p.score_stride + offset;
  share.keys = shared.keys;
  share.begin = share_begin(units, rank, CTAS);
  const int end = share_begin(units, rank + 1, CTAS);
  share.cached_end = min(end, share.begin + p.cached);
  share.warp_begin = share.begin + share_begin(end - share.begin, warp, WARPS);
  share.warp_end = share.begin + share_begin(end - share.begin, warp + 1, WARPS);

  // Selected are keys above `threshold` and the first `ties` of those that equal it.
  const int4 top_bins = read_bins(histogram);
  load_keys(share);
  Bin found = find_bin(top_bins, budget, shared);
  uint32_t threshold = static_cast<uint32_t>(found.bin) << KEY_SHIFT;
  int ties = INT_MAX;
  if (found.rank < found.count) {
    const int* bins =
        count_digits<CTAS>(share, shared, found.bin, KEY_SHIFT, 10, KEY_BINS - 1);
    found = find_bin(read_bins(bins), found.rank, shared);
    threshold |= static_cast<uint32_t>(found.bin) << 10;
    if (found.rank < found.count) {
      bins = count_digits<CTAS>(share, shared, threshold >> 10, 10, 0, 1023);
      found = find_bin(read_bins(bins), found.rank, shared);
      threshold |= found.bin;
      ties = found.rank;
    }
  }

  int above = 0, equal = 0;
  for_each_unit(share, [&](int, uint32_t key, bool valid) {
    above += valid && key > threshold;
    equal += valid && key == threshold;
  });
  above = __reduce_add_sync(ALL_LANES, above);
  equal = __reduce_add_sync(ALL_LANES, equal);
  if (lane == 0) shared.warp_counts[warp] = make_int2(above, equal);
  __syncthreads();
  int2 before = make_int2(0, 0), sum = make_int2(0, 0);
  for (int i = 0; i < WARPS; ++i) {
    if (i == warp) before = sum;
    sum.x += shared.warp_counts[i].x;
    sum.y += shared.warp_counts[i].y;
  }
  if (threadIdx.x == 0) shared.cta_count = sum;
  sync_cluster<CTAS>();
  if constexpr (CTAS > 1) {
    for (int cta = 0; cta < rank; ++cta) {
      const int2 other = *in_cta(&shared.cta_count, cta);
      before.x += other.x, before.y += other.y;
      sum.x += other.x, sum.y += other.y;
    }
    // Shared memory must outlive its readers; every CTA has read the histogram too.
    cluster_arrive();
  }

  above = before.x, equal = before.y;
  const uint32_t lower = (1u << lane) - 1;
  for_each_unit(share, [&](int unit, uint32_t key, bool valid) {
    const bool is_above = valid && key > threshold, is_equal = valid && key == threshold;
    const uint32_t aboves = __ballot_sync(ALL_LANES, is_above);
    const uint32_t equals = __ballot_sync(ALL_LANES, is_equal);
    if ((aboves | equals) == 0) return;
    const int equal_before = equal + __popc(equals & lower);
    const int to = above + __popc(aboves & lower) + min(equal_before, ties);
    const bool taken = is_above || (is_equal && equal_before < ties);
    // A histogram that is not of these scores must not lead out of bounds.
    if (taken && to < p.max_units) indices[to] = unit;
    above += __popc(aboves);
    equal += __popc(equals);
  });
  if (rank == CTAS - 1 && threadIdx.x == 0)
    p.counts[at] = min(sum.x + min(sum.y, ties), p.max_units);
  if constexpr (CTAS > 1) cluster_wait();
  for (int i = rank * THREADS + threadIdx.x; i < KEY_BINS; i += CTAS * THREADS) histogram[i] = 0;
}

template <int CTAS>
static void launch_select(SelectParams p, cudaStream_t stream) {
  // Two CTAs fit a multiprocessor of Hopper. What is not cached comes from L2 again.
  constexpr int CACHED = 24 * 1024;
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int fixed = sizeof(SelectShared);
  const int room = (most - fixed) / 4;
  p.cached = room < CACHED ? room : CACHED;
  launch<SelectParams, select_kernel<CTAS>>(dim3(CTAS, p.num_kv_heads, p.rows), THREADS,
                                            fixed + p.cached * 4, CTAS, stream, p);
}

void select(const SelectParams& params, cudaStream_t stream) {
  // As many CTAs as run at once.
  const int pairs = params.rows * params.num_kv_heads;
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9 || pairs > 132) {
    launch_select<1>(params, stream);
  } else if (pairs > 64) {
    launch_select<2>(params, stream);
  } else if (pairs > 32) {
    launch_select<4>(params, stream);
  } else {
    launch_select<8>(params, stream);
  }
}

}  // namespace kvx
