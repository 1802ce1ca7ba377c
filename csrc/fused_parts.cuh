// What one launch that scores, selects and attends is made of: its shared memory, keys, barriers
// between CTAs, and how the last one merges their parts.
#pragma once

#include <algorithm>

#include "attend.cuh"
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

// Digits of 11 bits, but for the last of the score, which has 10.
__device__ __forceinline__ int next_shift(int shift) { return shift == 32 ? 22 : shift - 11; }

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

// What parts of a head's result add up to, of every `apart`-th of them: four channels.
struct Merged {
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
  float top = -infinity(), sum = 0.0f;

  // All at once: parts that are none have a top of minus infinity and no sum.
  template <int N>
  __device__ __forceinline__ void add(const float (&tops)[N], const float (&of_sums)[N],
                                      const float4 (&outs)[N]) {
    float now = top;
#pragma unroll
    for (int i = 0; i < N; ++i) now = fmaxf(now, tops[i]);
    const float shift = now == -infinity() ? 0.0f : now, mine = exp2f(top - shift);
    sum *= mine, top = now;
    out = make_float4(out.x * mine, out.y * mine, out.z * mine, out.w * mine);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float others = exp2f(tops[i] - shift);
      sum += of_sums[i] * others;
      add_scaled(out, others, outs[i]);
    }
  }

  __device__ __forceinline__ void add_one(float of_top, float of_sum, float4 of_out) {
    const float tops[] = {of_top}, of_sums[] = {of_sum};
    const float4 outs[] = {of_out};
    add(tops, of_sums, outs);
  }
};

// As merge (attend.cuh), but what it reads is all on its way at once. Its code is short, since no
// other CTA has brought it near when the last one comes here.
template <typename T, int D, int THREADS>
__device__ __forceinline__ void merge_at_once(const AttendParams& p, int64_t pair, int token,
                                              int kv_head, int parts, float* shared) {
  constexpr int AT_ONCE = 8;
  const int heads = p.queries.heads, columns = heads * (D / 4);
  // Several threads share a column, of which a thread then has one at most.
  const int shares = max(THREADS / columns, 1), apart = shares > 1 ? columns : THREADS;
  const int share = shares > 1 ? threadIdx.x / columns : 0;
#pragma unroll 1
  for (int column = threadIdx.x - share * apart; column < columns; column += THREADS) {
    const int head = column / (D / 4), d = column % (D / 4) * 4;
    const int64_t at = (pair * heads + head) * p.splits;
    const float *lse = p.partial_lse + at, *out = p.partial_out + at * D + d;
    Merged merged;
#pragma unroll 1
    for (int begin = share < shares ? share : parts; begin < parts; begin += AT_ONCE * shares) {
      float tops[AT_ONCE], sums[AT_ONCE];
      float4 outs[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int part = begin + i * shares;
        const bool there = part < parts;
        tops[i] = there ? __ldcg(lse + part) : -infinity();
        outs[i] = there ? __ldcg(reinterpret_cast<const float4*>(out + part * D))
                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        sums[i] = 1.0f;
      }
      merged.add(tops, sums, outs);
    }
    if (shares > 1) {
      Merged* mine = reinterpret_cast<Merged*>(shared);
      mine[threadIdx.x] = merged;
      __syncthreads();
      if (share > 0) return;
#pragma unroll 1
      for (int i = 1; i < shares; ++i) {
        const Merged other = mine[i * columns + column];
        merged.add_one(other.top, other.sum, other.out);
      }
    }
    if (p.sinks != nullptr) {
      merged.add_one(sink_of<T>(p, kv_head * heads + head), 1.0f,
                     make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
    const float scale = merged.sum > 0.0f ? 1.0f / merged.sum : 0.0f;
    const float4 x = merged.out;
    write_out<T>(p, token, kv_head * heads + head, d,
                 make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale));
  }
}

}  // namespace kvx
