// The units of highest score, exactly, in ascending order.
//
// A radix select on keys of 32 bits: the score kernel counted the top 11, which leaves few keys
// that may be the last one selected. These are listed, and the list settles the other 11 + 10 bits;
// as long as they are too many to list, a pass over all keys settles a digit. Of units at the
// threshold the first ones are taken. The CTAs of a cluster share a row and KV head; each keeps its
// share's keys in shared memory and reads the others' lists.
#include "device.cuh"
#include "launch.cuh"
#include "params.h"

namespace kvx {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int MOST_CTAS = 8;
constexpr int CANDIDATES = 4096;  // listed, by all CTAs together
constexpr int PER_THREAD = CANDIDATES / THREADS;
constexpr int LOW_BITS = (1 << KEY_SHIFT) - 1;
constexpr int AHEAD = 4;          // loads of a lane under way at a time, of keys not cached

struct SelectShared {
  int histogram[KEY_BINS];
  union {
    int second_histogram[KEY_BINS];
    uint32_t list[CANDIDATES];    // of this CTA: lower bits of the key, above them the owner
  };
  int warp_sums[WARPS];
  int found[3];
  int listed;
  int2 warp_counts[WARPS];        // of this CTA: keys above what is listed, keys at the threshold
  int2 owners[MOST_CTAS * WARPS]; // of all: selected keys above and at the threshold
  uint4 keys[1];                  // as many as SelectParams::cached / 4
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

// A warp's share of the units, in quads: four of them where scores are aligned to 16 bytes. The
// first quad and the last one may hold what is no unit; its key is 0, which no score has.
struct Share {
  const float4* scores;  // of the row and head, from the first quad on
  uint4* keys;           // in shared memory: those of quads [begin, cached_end)
  int begin, cached_end, end;
  int lead, units;       // the first unit is the first quad's element `lead`
};

__device__ __forceinline__ uint4 keys_of(const Share& share, int quad, float4 x) {
  uint4 keys = make_uint4(order_key(x.x), order_key(x.y), order_key(x.z), order_key(x.w));
  const int first = quad * 4 - share.lead;
  if (first < 0 || first + 4 > share.units) {
    auto held = [&](int i) { return first + i >= 0 && first + i < share.units; };
    if (!held(0)) keys.x = 0;
    if (!held(1)) keys.y = 0;
    if (!held(2)) keys.z = 0;
    if (!held(3)) keys.w = 0;
  }
  return keys;
}

// Both by the lane that will use the keys.
__device__ __forceinline__ void load_keys(const Share& share) {
  for (int quad = share.begin + threadIdx.x % 32; quad < share.cached_end; quad += 32) {
    copy_async(share.keys + (quad - share.begin), share.scores + quad);
  }
  copy_commit();
}

__device__ __forceinline__ void convert_keys(const Share& share) {
  copy_wait<0>();
#pragma unroll 4
  for (int quad = share.begin + threadIdx.x % 32; quad < share.cached_end; quad += 32) {
    uint4& keys = share.keys[quad - share.begin];
    keys = keys_of(share, quad, reinterpret_cast<const float4&>(keys));
  }
}

// Calls visit(quad, keys) for the warp's quads in order, all lanes together.
template <typename Visit>
__device__ __forceinline__ void for_each_quad(const Share& share, Visit visit) {
  const int lane = threadIdx.x % 32;
  int base = share.begin;
#pragma unroll 2
  for (; base < share.cached_end; base += 32) {
    const int quad = base + lane;
    uint4 keys = make_uint4(0, 0, 0, 0);
    if (quad < share.cached_end) keys = share.keys[quad - share.begin];
    visit(quad, keys);
  }
  for (; base < share.end; base += 32 * AHEAD) {
    float4 scores[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int quad = base + i * 32 + lane;
      if (quad < share.end) scores[i] = __ldg(share.scores + quad);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int quad = base + i * 32 + lane;
      uint4 keys = make_uint4(0, 0, 0, 0);
      if (quad < share.end) keys = keys_of(share, quad, scores[i]);
      visit(quad, keys);
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

template <int CTAS, typename T>
__device__ __forceinline__ T* in_peer(T* mine, int rank) {
  return CTAS == 1 ? mine : in_cta(mine, rank);
}

// Of keys that have the bits above `above` in common with `prefix`, counts (key >> shift) & mask,
// over the cluster. Returns this thread's bins.
template <int CTAS>
__device__ int4 count_digits(const Share& share, int* histogram, uint32_t prefix, int above,
                             int shift, uint32_t mask) {
  for (int i = threadIdx.x; i < KEY_BINS; i += THREADS) histogram[i] = 0;
  __syncthreads();
  for_each_quad(share, [&](int, uint4 keys) {
    auto count = [&](uint32_t key) {
      if (key >> above == prefix) atomicAdd(histogram + (key >> shift & mask), 1);
    };
    count(keys.x), count(keys.y), count(keys.z), count(keys.w);
  });
  sync_cluster<CTAS>();
  if constexpr (CTAS == 1) return read_bins(histogram);
  int4 sum = make_int4(0, 0, 0, 0);
#pragma unroll
  for (int cta = 0; cta < CTAS; ++cta) {
    const int4 bins = read_bins(in_peer<CTAS>(histogram, cta));
    sum.x += bins.x, sum.y += bins.y, sum.z += bins.z, sum.w += bins.w;
  }
  return sum;
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
  int* global_histogram = p.histogram + at * KEY_BINS;
  int* indices = p.indices + at * p.max_units;
  if (units <= budget || budget == 0) {
    for (int i = rank * THREADS + threadIdx.x; i < min(units, budget); i += CTAS * THREADS) {
      indices[i] = i;
    }
    for (int i = rank * THREADS + threadIdx.x; i < KEY_BINS; i += CTAS * THREADS) {
      global_histogram[i] = 0;
    }
    if (rank == 0 && threadIdx.x == 0) p.counts[at] = min(units, budget);
    return;
  }

  Share share;
  const float* scores = p.scores + head * p.score_stride + offset;
  share.lead = static_cast<int>(reinterpret_cast<uintptr_t>(scores) / 4 % 4);
  share.scores = reinterpret_cast<const float4*>(scores - share.lead);
  share.units = units;
  const int quads = (share.lead + units + 3) / 4;
  const int cta_begin = share_begin(quads, rank, CTAS);
  const int cta_quads = share_begin(quads, rank + 1, CTAS) - cta_begin;
  share.begin = cta_begin + share_begin(cta_quads, warp, WARPS);
  share.end = cta_begin + share_begin(cta_quads, warp + 1, WARPS);
  const int room = p.cached / (4 * WARPS);
  share.keys = shared.keys + warp * room;
  share.cached_end = min(share.end, share.begin + room);
  load_keys(share);

  // Bits of the threshold from `shift` on are known, and how many keys have them too.
  if (threadIdx.x == 0) shared.listed = 0;
  Bin found = find_bin(read_bins(global_histogram), budget, shared);
  uint32_t threshold = static_cast<uint32_t>(found.bin) << KEY_SHIFT;
  int shift = KEY_SHIFT;
  convert_keys(share);
  if (found.count > CANDIDATES) {
    found = find_bin(count_digits<CTAS>(share, shared.histogram, threshold >> KEY_SHIFT,
                                        KEY_SHIFT, 10, KEY_BINS - 1),
                     found.rank, shared);
    threshold |= static_cast<uint32_t>(found.bin) << 10;
    shift = 10;
    if (found.count > CANDIDATES) {
      found = find_bin(count_digits<CTAS>(share, shared.second_histogram, threshold >> 10, 10, 0,
                                          1023),
                       found.rank, shared);
      threshold |= found.bin;
      shift = 0;
    }
  }

  // Counts keys above those, and lists those.
  const uint32_t highest = threshold | ((1u << shift) - 1);
  const uint32_t owner = static_cast<uint32_t>(rank * WARPS + warp) << KEY_SHIFT;
  int above = 0, equal = 0;
  for_each_quad(share, [&](int, uint4 keys) {
    const uint32_t key[4] = {keys.x, keys.y, keys.z, keys.w};
    int inside = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      above += key[i] > highest;
      inside += key[i] >= threshold && key[i] <= highest;
    }
    equal += inside;
    if (inside == 0 || shift == 0) return;
    int to = atomicAdd(&shared.listed, inside);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key[i] < threshold || key[i] > highest) continue;
      if (to < CANDIDATES) shared.list[to] = (key[i] & LOW_BITS) | owner;
      ++to;
    }
  });
  above = __reduce_add_sync(ALL_LANES, above);
  equal = __reduce_add_sync(ALL_LANES, equal);
  if (lane == 0) shared.warp_counts[warp] = make_int2(above, shift == 0 ? equal : 0);
  for (int i = threadIdx.x; i < KEY_BINS; i += THREADS) {
    if (shift == KEY_SHIFT) shared.histogram[i] = 0;
  }
  sync_cluster<CTAS>();

  if (threadIdx.x < CTAS * WARPS) {
    shared.owners[threadIdx.x] =
        *in_peer<CTAS>(shared.warp_counts + threadIdx.x % WARPS, threadIdx.x / WARPS);
  }
  // Each thread takes some of the candidates of all CTAs.
  uint32_t candidates[PER_THREAD];
  int held = 0;
  if (shift > 0) {
    int ends[CTAS];
    int total = 0;
#pragma unroll
    for (int cta = 0; cta < CTAS; ++cta) {
      total += *in_peer<CTAS>(&shared.listed, cta);
      ends[cta] = total;
    }
    // A histogram that is not of these scores must not lead out of bounds.
    total = min(total, CANDIDATES);
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
      const int i = k * THREADS + threadIdx.x;
      if (i >= total) continue;
      int cta = 0, begin = 0;
#pragma unroll
      for (int other = 0; other < CTAS - 1; ++other) {
        if (i >= ends[other]) cta = other + 1, begin = ends[other];
      }
      candidates[k] = *in_peer<CTAS>(shared.list + (i - begin), cta);
      held = k + 1;
    }
  }
  // Shared memory must outlive its readers; every CTA has read the global histogram too.
  if constexpr (CTAS > 1) cluster_arrive();
  auto for_each_candidate = [&](auto visit) {
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
      if (k < held) visit(candidates[k]);
    }
  };
  while (shift > 0) {
    const int above_digit = shift;
    shift = shift == KEY_SHIFT ? 10 : 0;
    if (above_digit != KEY_SHIFT) {
      for (int i = threadIdx.x; i < KEY_BINS; i += THREADS) shared.histogram[i] = 0;
      __syncthreads();
    }
    const uint32_t prefix = (threshold & LOW_BITS) >> above_digit;
    for_each_candidate([&](uint32_t candidate) {
      const uint32_t low = candidate & LOW_BITS;
      if (low >> above_digit != prefix) return;
      atomicAdd(shared.histogram + (low >> shift & ((1u << (above_digit - shift)) - 1)), 1);
    });
    __syncthreads();
    found = find_bin(read_bins(shared.histogram), found.rank, shared);
    threshold |= static_cast<uint32_t>(found.bin) << shift;
  }

  // Selected are keys above `threshold` and the first `ties` of those that equal it.
  const int ties = found.rank;
  for_each_candidate([&](uint32_t candidate) {
    const uint32_t low = candidate & LOW_BITS, last = threshold & LOW_BITS;
    if (low < last) return;
    int2& counts = shared.owners[candidate >> KEY_SHIFT];
    atomicAdd(low > last ? &counts.x : &counts.y, 1);
  });
  __syncthreads();
  int2 before = make_int2(0, 0), sum = make_int2(0, 0);
  for (int i = lane; i < CTAS * WARPS; i += 32) {
    const int2 counts = shared.owners[i];
    sum.x += counts.x, sum.y += counts.y;
    if (i < rank * WARPS + warp) before.x += counts.x, before.y += counts.y;
  }
  before.x = __reduce_add_sync(ALL_LANES, before.x);
  before.y = __reduce_add_sync(ALL_LANES, before.y);
  if (rank == 0 && warp == 0) {
    sum.x = __reduce_add_sync(ALL_LANES, sum.x);
    sum.y = __reduce_add_sync(ALL_LANES, sum.y);
    if (lane == 0) p.counts[at] = min(sum.x + min(sum.y, ties), p.max_units);
  }

  equal = before.y;
  int to = before.x + min(equal, ties);
  const uint32_t lower = (1u << lane) - 1;
  for_each_quad(share, [&](int quad, uint4 keys) {
    const uint32_t key[4] = {keys.x, keys.y, keys.z, keys.w};
    bool taken[4], some = false, some_equal = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      taken[i] = key[i] >= threshold;
      some |= taken[i];
    }
    if (!__any_sync(ALL_LANES, some)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) some_equal |= key[i] == threshold;
    if (__any_sync(ALL_LANES, some_equal)) {
      int mine = equal;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t equals = __ballot_sync(ALL_LANES, key[i] == threshold);
        mine += __popc(equals & lower);
        equal += __popc(equals);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (key[i] == threshold) taken[i] = mine++ < ties;
      }
    }
    int mine = to;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t all = __ballot_sync(ALL_LANES, taken[i]);
      mine += __popc(all & lower);
      to += __popc(all);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!taken[i]) continue;
      if (mine < p.max_units) indices[mine] = quad * 4 - share.lead + i;
      ++mine;
    }
  });
  for (int i = rank * THREADS + threadIdx.x; i < KEY_BINS; i += CTAS * THREADS) {
    global_histogram[i] = 0;
  }
  if constexpr (CTAS > 1) cluster_wait();
}

template <int CTAS>
static void launch_select(SelectParams p, cudaStream_t stream) {
  static_assert(CTAS <= MOST_CTAS);
  // Two CTAs fit a multiprocessor of Hopper. What is not cached comes from L2 again.
  constexpr int CACHED = 22 * 1024, EVEN = WARPS * 128;
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int fixed = sizeof(SelectShared);
  const int room = (most - fixed) / 4;
  p.cached = (room < CACHED ? room : CACHED) / EVEN * EVEN;
  launch<SelectParams, select_kernel<CTAS>>(dim3(CTAS, p.num_kv_heads, p.rows), THREADS,
                                            fixed + p.cached * 4, CTAS, stream, p);
}

void select(const SelectParams& params, cudaStream_t stream) {
  const int pairs = params.rows * params.num_kv_heads;
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) {
    launch_select<1>(params, stream);
  } else if (pairs > 132) {
    launch_select<4>(params, stream);
  } else {
    launch_select<8>(params, stream);
  }
}

}  // namespace kvx
