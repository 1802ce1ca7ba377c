// How the CTAs that score share out the rows.
#pragma once

#include <algorithm>

#include "device.cuh"
#include "params.h"

namespace kvx {

// A CTA's part of a row, the `part`-th of `parts`, and what the row is. Row -1: there is none left.
struct Part {
  int row, part, parts;
  int len, token, request;
  int64_t offset;
};

// Of this many steps for each warp on, a second wave of CTAs evens out what each of them gets.
constexpr int MANY_STEPS = 32;
// So it does where equal rows would leave more of a wave empty than this part of it.
constexpr float EMPTY = 0.15f;

// CTAs of a KV head that are launched. Of one row, one on each multiprocessor: that spares it what
// CTAs do before their first step. Else those of two waves, and one for each row that is rounded up.
inline int most_parts(int rows, int heads, int programs) {
  return rows == 1 ? std::max(programs / 2 / heads, 1) : 2 * std::max(programs / heads, 1) + rows;
}

// The `index`-th part of a KV head, of rows that have as many as their share of all steps: some
// are longer than others, and of a CUDA graph's some are empty. Each warp finds it for itself.
// ONE_WAVE: there are at most `launched` parts of a KV head in all, and `most` of a row; scores
// stay where they are made, so that a row has no offset.
template <int STEP, int WARPS, bool ONE_WAVE = false>
__device__ __forceinline__ Part find_part(const ScoreParams& p, int index, int heads, int launched,
                                          int most = 0) {
  const int lane = threadIdx.x % 32, rows = p.rows.count;
  if (ONE_WAVE && rows == 1) {
    const int len = p.rows.lens[0];
    const Part only = {0, index, min(launched, most), len, p.rows.tokens[0], p.rows.requests[0], 0};
    return len > 0 && index < only.parts ? only : Part{-1};
  }
  auto load = [&](int row) {
    if (row >= rows) return Part{};
    return Part{row, 0, 0, p.rows.lens[row], p.rows.tokens[row], p.rows.requests[row],
                ONE_WAVE ? 0 : p.offsets[row]};
  };
  auto steps_of = [](int len) { return (len + STEP - 1) / STEP; };
  Part mine = load(lane);  // all at once: each is a trip to memory
  int len = mine.len, all = steps_of(len), live = len > 0;
#pragma unroll 1
  for (int row = lane + 32; row < rows; row += 32) {
    const int other = p.rows.lens[row];
    all += steps_of(other), live += other > 0;
  }
  all = __reduce_add_sync(ALL_LANES, all);
  live = max(__reduce_add_sync(ALL_LANES, live), 1);
  const int wave = max(p.programs / heads, 1);
  const bool two = all / (wave * WARPS) >= MANY_STEPS || wave % live > EMPTY * wave;
  const int launch = rows == 1 ? launched : two ? 2 * wave : wave;
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < rows; first += 32) {
    if (first) len = first + lane < rows ? p.rows.lens[first + lane] : 0;
    const int64_t steps = steps_of(len);
    int parts = steps ? max(static_cast<int>(steps * launch / all), 1) : 0;
    if constexpr (ONE_WAVE) {
      parts = steps ? min(static_cast<int>(1 + steps * (launched - live) / all), most) : 0;
    }
    const int end = before + sum_up_to(parts);
    if (const unsigned past = __ballot_sync(ALL_LANES, end > index)) {
      const int from = __ffs(past) - 1;
      if (first) mine = load(first + from);
      auto of_row = [&](auto x) { return __shfl_sync(ALL_LANES, x, from); };
      return {first + from,       of_row(index - end + parts), of_row(parts),       of_row(len),
              of_row(mine.token), of_row(mine.request),        of_row(mine.offset)};
    }
    before = __shfl_sync(ALL_LANES, end, 31);
  }
  return {-1};
}

}  // namespace kvx
