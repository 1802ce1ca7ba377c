// The units of highest score, exactly, in ascending order.
//
// A radix select on keys of 32 bits: the score kernel counted the top 11, which leaves few keys
// that may be the last one selected. These are listed, and the list settles the other 11 + 10 bits;
// as long as they are too many to list, a pass over all keys settles a digit. Of units at the
// threshold the first ones are taken. The CTAs of a cluster share a row and KV head; each has its
// share's scores in shared memory, a tile at a time, and reads the others' lists.
#include "bins.cuh"
#include "device.cuh"
#include "launch.cuh"
#include "params.h"

namespace kvx {

// Most of the code runs once per launch, so what it costs is fetching it: loops stay loops.
constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int MOST_CTAS = 8;
constexpr int LOW_BITS = (1 << KEY_SHIFT) - 1;
constexpr int MOST_QUADS = 8;  // of a thread at a time: 32 keys, one bit each
constexpr int KEY_QUADS = THREADS * (MOST_QUADS | 1);

// Candidates that can be listed, by all CTAs together: as many as leave room for two CTAs on a
// multiprocessor, or for one if each row and head has many.
template <int CTAS>
constexpr int CANDIDATES = CTAS == 1 ? 4096 : CTAS < MOST_CTAS ? 3072 : 8192;

template <int CTAS>
struct SelectShared {
  int histogram[KEY_BINS];
  union {
    int second_histogram[KEY_BINS];
    uint32_t list[CANDIDATES<CTAS>];  // of this CTA: lower bits of the key, above them the owner
  };
  uint32_t all[CTAS == 1 ? 1 : CANDIDATES<CTAS>];  // the lists of all
  int warp_sums[2][WARPS];
  int found[3];
  int listed;
  int2 warp_counts[WARPS];       // of this CTA: keys above what is listed, keys at the threshold
  int2 owners[CTAS * WARPS];     // of all: selected keys above and at the threshold
  uint4 scores[KEY_QUADS];
};

// A CTA's share of the units, in quads: four of them where scores are aligned to 16 bytes. The
// first quad and the last one may hold what is no unit. A thread has `per` quads side by side at a
// time; a tile is what all threads have.
struct Share {
  const float4* scores;  // of the row and head, from the first quad on
  uint4* tile;           // in shared memory, of this warp
  int begin, end;        // quads
  int per, tiles;
  int lead, units;       // the first unit is the first quad's element `lead`
  int loaded;            // the tile that is in shared memory, or on its way there

  // A thread's quads start an odd number of quads after its neighbour's: no bank conflicts.
  __device__ int stride() const { return per | 1; }
  __device__ int first_quad(int index) const {
    return begin + (index * THREADS + static_cast<int>(threadIdx.x)) * per;
  }

  // Each warp what its lanes will read.
  __device__ void load(int index) {
    const int lane = threadIdx.x % 32, first = first_quad(index) - lane * per;
    const int count = min(32 * per, end - first);
    const uint32_t inverse = 65536u / per + 1;
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      const int owner = i * inverse >> 16;
      copy_async(tile + owner * stride() + (i - owner * per), scores + first + i);
    }
    copy_commit();
    loaded = index;
  }

  // For all tiles in order calls visit(i, scores) for each of the thread's quads, of number i in
  // the tile, then tile_ends(index, valid): a bit for each element that is a unit.
  template <typename Visit, typename End>
  __device__ __forceinline__ void for_each(Visit visit, End tile_ends) {
#pragma unroll 1
    for (int index = 0; index < tiles; ++index) {
      if (loaded != index) {
        __syncwarp();
        load(index);
      }
      copy_wait<0>();
      __syncwarp();
      const int first = first_quad(index), count = min(per, end - first);
      const uint4* mine = tile + threadIdx.x % 32 * stride();
#pragma unroll 2
      for (int i = 0; i < count; ++i) visit(i, reinterpret_cast<const float4&>(mine[i]));
      const int skip = max(lead - first * 4, 0), till = min(units + lead - first * 4, count * 4);
      const uint32_t upper = till <= 0 ? 0 : ALL_LANES >> (32 - till);
      tile_ends(index, upper & ALL_LANES << skip);
    }
  }

  __device__ const float* elements() const {
    return reinterpret_cast<const float*>(tile + threadIdx.x % 32 * stride());
  }
};

// A bit for each element of quad `i` that `has` what is asked.
template <typename Has>
__device__ __forceinline__ uint32_t bits(int i, float4 x, Has has) {
  const uint32_t four = (has(x.x) ? 1u : 0u) | (has(x.y) ? 2u : 0u) | (has(x.z) ? 4u : 0u) |
                        (has(x.w) ? 8u : 0u);
  return four << i * 4;
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
__device__ __noinline__ Bins<THREADS> count_digits(Share share, int* histogram, uint32_t prefix,
                                                   int above, int shift, uint32_t mask) {
#pragma unroll 1
  for (int i = threadIdx.x; i < KEY_BINS; i += THREADS) histogram[i] = 0;
  __syncthreads();
  share.for_each(
      [](int, float4) {},
      [&](int, uint32_t valid) {
        const float* mine = share.elements();
#pragma unroll 2
        for (int i = 0; i < share.per * 4; ++i) {
          const uint32_t key = order_key(mine[i]);
          if (valid >> i & 1 && key >> above == prefix) {
            atomicAdd(histogram + (key >> shift & mask), 1);
          }
        }
      });
  sync_cluster<CTAS>();
  if constexpr (CTAS == 1) return read_bins<THREADS>(histogram);
  Bins<THREADS> sum = {};
#pragma unroll 2
  for (int cta = 0; cta < CTAS; ++cta) sum.add(read_bins<THREADS>(in_peer<CTAS>(histogram, cta)));
  return sum;
}

template <int CTAS>
__global__ void __launch_bounds__(THREADS, CTAS == MOST_CTAS ? 1 : 2)
    select_kernel(const SelectParams p) {
  constexpr int LISTED = CANDIDATES<CTAS>;
  auto& shared = *reinterpret_cast<SelectShared<CTAS>*>(dynamic_shared());
  const int rank = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t at = static_cast<int64_t>(row) * gridDim.y + head;
  const int len = p.lens[row], row_budget = p.budgets[row];
  const int64_t offset = p.offsets[row];
  let_next_kernel_start();
  wait_for_kernel_before();
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
  share.begin = share_begin(quads, rank, CTAS);
  share.end = share_begin(quads, rank + 1, CTAS);
  const int each = (share.end - share.begin + THREADS - 1) / THREADS;
  share.tiles = max((each + MOST_QUADS - 1) / MOST_QUADS, 1);
  share.per = max((each + share.tiles - 1) / share.tiles, 1);
  share.tile = shared.scores + warp * 32 * share.stride();
  share.load(0);

  // Bits of the threshold from `shift` on are known, and how many keys have them too.
  if (threadIdx.x == 0) shared.listed = 0;
  auto find = [&](const Bins<THREADS>& bins, int wanted) {
    return find_bin(bins, wanted, shared.warp_sums[0], shared.found);
  };
  Bin found = find(read_bins<THREADS>(global_histogram), budget);
  uint32_t threshold = static_cast<uint32_t>(found.bin) << KEY_SHIFT;
  int shift = KEY_SHIFT;
  while (shift > 0 && found.count > LISTED) {
    const int known = shift;
    shift = known == KEY_SHIFT ? 10 : 0;
    int* histogram = known == KEY_SHIFT ? shared.histogram : shared.second_histogram;
    const uint32_t mask = (1u << (known - shift)) - 1;
    found = find(count_digits<CTAS>(share, histogram, threshold >> known, known, shift, mask),
                 found.rank);
    share.loaded = share.tiles - 1;
    threshold |= static_cast<uint32_t>(found.bin) << shift;
  }

  // Counts keys above those, and lists those.
  const float lowest = float_of(threshold), highest = float_of(threshold | ((1u << shift) - 1));
  const uint32_t owner = static_cast<uint32_t>(rank * WARPS + warp) << KEY_SHIFT;
  int above = 0, equal = 0;
  uint32_t greater = 0, equals = 0;  // a bit for each of a tile's keys
  share.for_each(
      [&](int i, float4 x) {
        greater |= bits(i, x, [&](float x) { return x > highest; });
        equals |= bits(i, x, [&](float x) { return x >= lowest && x <= highest; });
      },
      [&](int, uint32_t valid) {
        uint32_t inside = equals & valid;
        const int count = __popc(inside);
        above += __popc(greater & valid), equal += count;
        greater = equals = 0;
        if (shift == 0 || !__any_sync(ALL_LANES, count)) return;
        const int up_to = sum_up_to(count);
        int to = lane == 31 ? atomicAdd(&shared.listed, up_to) : 0;
        to = __shfl_sync(ALL_LANES, to, 31) + up_to - count;
        const float* mine = share.elements();
#pragma unroll 1
        for (; inside; inside &= inside - 1) {
          const uint32_t low = order_key(mine[__ffs(inside) - 1]) & LOW_BITS;
          if (to < LISTED) shared.list[to] = low | owner;
          ++to;
        }
      });
  above = __reduce_add_sync(ALL_LANES, above);
  equal = __reduce_add_sync(ALL_LANES, equal);
  if (lane == 0) shared.warp_counts[warp] = make_int2(above, shift == 0 ? equal : 0);
  sync_cluster<CTAS>();

  // A histogram that is not of these scores must not lead out of bounds.
  const uint32_t* candidates = shared.list;
  int listed = min(shared.listed, LISTED);
  if constexpr (CTAS > 1) {
    if (threadIdx.x < CTAS * WARPS) {
      shared.owners[threadIdx.x] =
          *in_peer<CTAS>(shared.warp_counts + threadIdx.x % WARPS, threadIdx.x / WARPS);
    }
    const int mine = lane < CTAS ? *in_peer<CTAS>(&shared.listed, lane) : 0;
    const int end = sum_up_to(mine), peer = warp % CTAS;
    const int first = __shfl_sync(ALL_LANES, end - mine, peer);
    listed = min(__shfl_sync(ALL_LANES, end, CTAS - 1), LISTED);
    const int count = min(__shfl_sync(ALL_LANES, mine, peer), LISTED - first);
    const uint32_t* from = in_peer<CTAS>(shared.list, peer);
#pragma unroll 4
    for (int i = warp / CTAS * 32 + lane; i < count; i += WARPS / CTAS * 32) {
      shared.all[first + i] = from[i];
    }
    candidates = shared.all;
    // Shared memory must outlive its readers; every CTA has read the global histogram too.
    cluster_arrive();
  }
#pragma unroll 1
  while (shift > 0) {
    const int known = shift;
    shift = known == KEY_SHIFT ? 10 : 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < KEY_BINS; i += THREADS) shared.histogram[i] = 0;
    __syncthreads();
    const uint32_t prefix = (threshold & LOW_BITS) >> known, mask = (1u << (known - shift)) - 1;
#pragma unroll 2
    for (int i = threadIdx.x; i < listed; i += THREADS) {
      const uint32_t low = candidates[i] & LOW_BITS;
      if (low >> known == prefix) atomicAdd(shared.histogram + (low >> shift & mask), 1);
    }
    __syncthreads();
    found = find(read_bins<THREADS>(shared.histogram), found.rank);
    threshold |= static_cast<uint32_t>(found.bin) << shift;
  }

  // Selected are keys above `threshold` and the first `ties` of those that equal it. Of CTAs before
  // this one, their lists tell how many those are.
  const int ties = found.rank;
  int2 before = make_int2(0, 0);
  if constexpr (CTAS > 1) {
    const uint32_t last = threshold & LOW_BITS;
#pragma unroll 2
    for (int i = threadIdx.x; i < listed; i += THREADS) {
      const uint32_t candidate = candidates[i], low = candidate & LOW_BITS;
      if (low < last) continue;
      int2& counts = shared.owners[candidate >> KEY_SHIFT];
      atomicAdd(low > last ? &counts.x : &counts.y, 1);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = lane; i < rank * WARPS; i += 32) {
      const int2 counts = shared.owners[i];
      before.x += counts.x, before.y += counts.y;
    }
    before.x = __reduce_add_sync(ALL_LANES, before.x);
    before.y = __reduce_add_sync(ALL_LANES, before.y);
  }

  const float last = float_of(threshold);
  share.for_each(
      [&](int i, float4 x) {
        greater |= bits(i, x, [&](float x) { return x > last; });
        equals |= bits(i, x, [&](float x) { return x == last; });
      },
      [&](int index, uint32_t valid) {
        greater &= valid, equals &= valid;
        // Both counts in one word: a tile has less than 2^15 keys.
        const int counts = __popc(greater) << 16 | __popc(equals);
        int up_to = sum_up_to(counts);
        int* sums = shared.warp_sums[index % 2];
        if (lane == 31) sums[warp] = up_to;
        __syncthreads();
        const int of_warp = lane < WARPS ? sums[lane] : 0;
        const int total = __reduce_add_sync(ALL_LANES, of_warp);
        up_to += __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0) - counts;
        int equal_before = before.y + (up_to & 0xffff);
        int to = before.x + (up_to >> 16) + min(equal_before, ties);
        const int first = share.first_quad(index) * 4 - share.lead;
#pragma unroll 1
        for (uint32_t left = greater | equals; left; left &= left - 1) {
          const int bit = __ffs(left) - 1;
          if (equals >> bit & 1 && equal_before++ >= ties) continue;
          if (to < p.max_units) indices[to] = first + bit;
          ++to;
        }
        before.x += total >> 16, before.y += total & 0xffff;
        greater = equals = 0;
      });
  if (rank == CTAS - 1 && threadIdx.x == 0) {
    p.counts[at] = min(before.x + min(before.y, ties), p.max_units);
  }
#pragma unroll 1
  for (int i = rank * THREADS + threadIdx.x; i < KEY_BINS; i += CTAS * THREADS) {
    global_histogram[i] = 0;
  }
  if constexpr (CTAS > 1) cluster_wait();
}

template <int CTAS>
static void launch_select(const SelectParams& p, cudaStream_t stream) {
  static_assert(CTAS <= MOST_CTAS);
  launch<SelectParams, select_kernel<CTAS>>(dim3(CTAS, p.num_kv_heads, p.rows), THREADS,
                                            sizeof(SelectShared<CTAS>), CTAS, stream, p, p.overlap);
}

void select(const SelectParams& params, cudaStream_t stream) {
  const int pairs = params.rows * params.num_kv_heads;
  int ctas = params.ctas;
  // The fewer pairs there are, the more CTAs share one. With 8 pairs eight were the fastest, with 16,
  // 32 and 48 four, with 128 one and two took as long. With 64 pairs two are faster if all rows have
  // something to do, four if two of eight have not, of a graph for more
  // (benchmarks/results/ops/h100-retrieval-step.json, h100-retrieval-tried.json).
  if (ctas == 0) ctas = pairs > 128 ? 1 : pairs > 64 ? 2 : pairs > 8 ? 4 : 8;
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) ctas = 1;
  switch (ctas) {
    case 1: return launch_select<1>(params, stream);
    case 2: return launch_select<2>(params, stream);
    case 4: return launch_select<4>(params, stream);
    default: return launch_select<8>(params, stream);
  }
}

}  // namespace kvx
