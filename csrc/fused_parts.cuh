// What one launch that scores, selects and attends is made of: its shared memory, keys, barriers
// between CTAs, and how the last one merges their parts.
#pragma once

#include <algorithm>

#include "attend.cuh"
#include "bins.cuh"
#include "score.cuh"

namespace kvx {

constexpr int INDEX_BITS = FUSED_INDEX_BITS;
constexpr int FIRST_SHIFT = KEY_SHIFT + INDEX_BITS;
constexpr int DIGIT_MASK = KEY_BINS - 1;
constexpr int FEW = 32;  // candidates that a warp puts in order by itself
constexpr int MOST_STAGES = 2;  // chunks of entries under way, where there is room

// CTAs of a KV head.
inline int fused_parts(int programs, int kv_heads, int rows, int splits) {
  return std::min(programs / kv_heads, splits * rows);
}

template <int D, int HEADS>
struct FusedShape {
  using Score = ScoreShape<D, 1, HEADS>;
  static constexpr int WARPS = Score::WARPS, THREADS = Score::THREADS;
  using Attend = AttendShape<D, false, Cache::LIKE_QUERIES, WARPS>;
  static_assert(Score::THREADS == Attend::THREADS);
  static_assert(Score::SHARED_BYTES % 128 == 0, "queries' rows begin at multiples of it (Softmax)");
  static_assert(WARPS * Score::STAGES * Score::STAGE_CHUNKS * 16 >= FUSED_LISTED * 8,
                "the list goes where codes were, before the counts");
  // Shared memory: first that of scoring and then entries; what both need; what each step has.
  static constexpr int OTHERS =
      Attend::QUERY_CHUNKS * 16 + PANEL * 8 + 2 * WARPS * 16 * 4 + FEW * 8 + WARPS * 4 + 48;
  static constexpr int STEP_BYTES = STEP * 4 + STEP / 32 * 8 + RUNS * 4;
  __host__ __device__ static constexpr int first_bytes(int stages) {
    const int score = (Score::SHARED_BYTES + 15) / 16 * 16;
    const int attend = WARPS * stages * Attend::STAGE * 16;
    return score > attend ? score : attend;
  }
  __host__ __device__ static constexpr int fixed_bytes(int stages) {
    return (first_bytes(stages) + OTHERS + 15) / 16 * 16;
  }
  // Of a tile of steps a thread has 32 scores.
  static constexpr int TILE_STEPS = THREADS * 32 / STEP;

  // Steps that have room in `bytes` of shared memory, and the entries of `rows` rows that `each`
  // CTAs of a KV head surely have room for. A part of a row with s of all `a` steps has, rounded
  // up, s / (1 + s (each - live) / a) at most (find_part): less than a / (each - live) rounded up.
  static int room(int bytes, int stages) {
    return (bytes / 128 * 128 - fixed_bytes(stages) - THREADS * 8) / STEP_BYTES;
  }
  static int64_t longest(int bytes, int stages, int each, int rows) {
    const int64_t most = std::max(room(bytes, stages) - 1, 0);
    const int64_t steps = std::max(most * (each - rows) / rows, most);
    return std::min(steps * STEP, int64_t{1} << INDEX_BITS);
  }
};

__device__ __forceinline__ uint64_t key_of(float score, int index) {
  constexpr uint32_t LAST = (1u << INDEX_BITS) - 1;
  return static_cast<uint64_t>(order_key_unless_negative_zero(score)) << INDEX_BITS |
         (LAST - static_cast<uint32_t>(index));
}

// The score that has this key, to compare scores with. None is below the lowest key that there is,
// and none at or above what is beyond the highest, which is no number.
__device__ __forceinline__ float score_of_key(uint32_t key) {
  key = max(key, 0x007fffffu);
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Digits of 11 bits, but for the last of the score, which has 10.
__device__ __forceinline__ int next_shift(int shift) { return shift == 32 ? 22 : shift - 11; }

// Of those keys listed that have the bits from `shift` on in common with the threshold, and are FEW
// at most, the one of the rank that was found. few: zeros before, as is how many are listed there.
template <int THREADS>
__device__ __forceinline__ uint64_t ranked(const uint64_t* list, int listed, uint64_t threshold,
                                           int shift, Bin found, uint64_t* few, int* few_listed) {
  static_assert(FEW == 32, "one for each lane");
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int begin = threadIdx.x; begin < listed; begin += 4 * THREADS) {
    unsigned which = 0;  // of four, that are read at once
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = begin + i * THREADS;
      if (at < listed && list[at] >> shift == threshold >> shift) which |= 1u << i;
    }
#pragma unroll 1
    for (; which; which &= which - 1) {
      few[atomicAdd(few_listed, 1) % FEW] = list[begin + (__ffs(which) - 1) * THREADS];
    }
  }
  __syncthreads();
  // Every warp for itself.
  const uint64_t key = few[lane];
  int rank = 1;
#pragma unroll 1
  for (int i = 0; i < found.count; i += 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) rank += few[i + j] > key;
  }
  const unsigned who = __ballot_sync(ALL_LANES, lane < found.count && rank == found.rank);
  return few[who ? __ffs(who) - 1 : 0];
}

// A barrier of all CTAs of a row and head, in two halves: what they wrote before they came is
// there to read for who has waited. `times`: of all barriers of the launch. Waiting for CTAs is
// safe since all of the grid run at once (fused_launch.cuh). Should one be gone, the launch fails
// rather than hang.
__device__ __forceinline__ void arrive(int* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(arrived) : "memory");
  }
}

__device__ __forceinline__ void wait_for_parts(int* arrived, int parts, int times) {
  constexpr int64_t TOO_LONG = int64_t{1} << 34;  // clocks, some 9 s
  if (threadIdx.x == 0) {
    const int64_t begin = clock64();
    int now;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
      if (clock64() - begin > TOO_LONG) asm volatile("trap;");
    } while (now < parts * times);
  }
  __syncthreads();
}

// What parts of a head's result add up to: four channels.
struct Merged {
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
  float top = -infinity(), sum = 0.0f;

  // All at once: what is none has a top of minus infinity.
  template <int N>
  __device__ __forceinline__ void add(const float (&tops)[N], const float (&of_sums)[N],
                                      const float4 (&outs)[N]) {
    float now = top;
#pragma unroll
    for (int i = 0; i < N; ++i) now = fmaxf(now, tops[i]);
    const float shift = now == -infinity() ? 0.0f : now, mine = exp2_or_zero(top - shift);
    sum *= mine, top = now;
    out = make_float4(out.x * mine, out.y * mine, out.z * mine, out.w * mine);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float others = exp2_or_zero(tops[i] - shift);
      sum += of_sums[i] * others;
      add_scaled(out, others, outs[i]);
    }
  }
};

// As merge (attend.cuh), but what it reads is all on its way at once. Its code is short, since no
// other CTA has brought it near when the last one comes here: so it takes threads for HEADS heads,
// whether there are as many or not. All threads of the CTA take part.
template <typename T, int D, int HEADS, int THREADS>
__device__ __forceinline__ void merge_at_once(const AttendParams& p, int pair, int token,
                                              int kv_head, int parts, float* shared) {
  // Several threads share a column, of which a thread then has one. Two of them take the 33 parts
  // that 132 multiprocessors have of each of 4 KV heads in two rounds.
  constexpr int AT_ONCE = 9, PIECES = D / 4, COLUMNS = HEADS * PIECES;
  constexpr int SHARES = THREADS > COLUMNS ? THREADS / COLUMNS : 1;
  static_assert(SHARES == 1 || SHARES * COLUMNS == THREADS);
  const int heads = p.queries.heads, share = SHARES > 1 ? threadIdx.x / COLUMNS : 0;
#pragma unroll 1
  for (int column = SHARES > 1 ? threadIdx.x % COLUMNS : threadIdx.x;
       column < (SHARES > 1 ? COLUMNS : heads * PIECES); column += THREADS) {
    const int head = min(column / PIECES, heads - 1), piece = column % PIECES;
    const int at = (pair * heads + head) * p.splits;
    const float* lse = p.partial_lse + at;
    const float4* out = reinterpret_cast<const float4*>(p.partial_out) + at * PIECES + piece;
    Merged merged;
    if (p.sinks != nullptr && share == 0) {
      merged.top = sink_of<T>(p, kv_head * heads + head), merged.sum = 1.0f;
    }
#pragma unroll 1
    for (int begin = share; begin < parts; begin += AT_ONCE * SHARES) {
      float tops[AT_ONCE], sums[AT_ONCE];
      float4 outs[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int part = begin + i * SHARES;
        tops[i] = -infinity(), sums[i] = 1.0f;
        outs[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (part < parts) tops[i] = __ldcg(lse + part), outs[i] = __ldcg(out + part * PIECES);
      }
      merged.add(tops, sums, outs);
    }
    if constexpr (SHARES > 1) {
      Merged* mine = reinterpret_cast<Merged*>(shared);
      mine[threadIdx.x] = merged;
      __syncthreads();
      if (share > 0 || column >= heads * PIECES) return;
      float tops[SHARES - 1], sums[SHARES - 1];
      float4 outs[SHARES - 1];
#pragma unroll
      for (int i = 0; i < SHARES - 1; ++i) {
        const Merged& other = mine[(i + 1) * COLUMNS + column];
        tops[i] = other.top, sums[i] = other.sum, outs[i] = other.out;
      }
      merged.add(tops, sums, outs);
    }
    const float scale = merged.sum > 0.0f ? __fdividef(1.0f, merged.sum) : 0.0f;
    const float4 x = merged.out;
    write_out<T>(p, token, kv_head * heads + head, piece * 4,
                 make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale));
  }
}

}  // namespace kvx
