// FIER in one launch: scores, selection and attention of a layer.
//
// The CTAs of a row and KV head score every `parts`-th step of 64 tokens, so that neighbours, which
// are often selected together, are spread over them. Each keeps its scores in shared memory, and
// attends to what it itself selected. What they tell one another goes through global memory,
// between barriers of these CTAs: counts of a digit, then the keys that may be the last one
// selected. A key of 54 bits has the score above the complement of the index, so that no two are
// equal, of equal scores the first ones are selected, and the selection is all keys from a
// threshold on.
#pragma once

#include "bins.cuh"
#include "fused_parts.cuh"

namespace kvx {

template <typename T, int D, int HEADS>
__global__ void __launch_bounds__(FusedShape<D, HEADS>::THREADS, 1)
    fused_kernel(const FusedParams p) {
#if __CUDA_ARCH__ >= 900  // elsewhere nothing launches it
  using Shape = FusedShape<D, HEADS>;
  using Attend = typename Shape::Attend;
  constexpr int WARPS = Shape::WARPS, THREADS = Shape::THREADS;
  const int head = blockIdx.x, rows = p.score.rows.count;
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int lane_budget = lane < rows ? p.budgets[lane] : 0;  // on its way with what the row is
  const Part mine = find_part<STEP, WARPS, true>(p.score, blockIdx.y, gridDim.x, gridDim.y,
                                                 p.attend.splits);
  if (mine.row < 0) return;
  const int len = mine.len, part = mine.part, parts = mine.parts;
  const int pair = mine.row * gridDim.x + head;  // there is a CTA for each
  int budget = __shfl_sync(ALL_LANES, lane_budget, mine.row % 32);
  if (mine.row >= 32) budget = p.budgets[mine.row];
  budget = max(min(budget, p.max_units), 0);

  char* shared = dynamic_shared();
  uint4* queries = reinterpret_cast<uint4*>(shared + Shape::first_bytes(p.stages));
  int64_t* offsets = reinterpret_cast<int64_t*>(queries + Attend::QUERY_CHUNKS);
  uint64_t* few = reinterpret_cast<uint64_t*>(offsets + PANEL);
  float* largest = reinterpret_cast<float*>(few + FEW);
  float* sums = largest + WARPS * 16;
  int* warp_sums = reinterpret_cast<int*>(sums + WARPS * 16);
  int *found_at = warp_sums + WARPS, *few_listed = found_at + 3, *last = found_at + 4;
  float* scores = reinterpret_cast<float*>(shared + Shape::fixed_bytes(p.stages));
  int* blocks = reinterpret_cast<int*>(scores + p.room * STEP);
  uint2* marks = reinterpret_cast<uint2*>(blocks + p.room * RUNS);
  uint64_t* list = reinterpret_cast<uint64_t*>(shared);

  int* state = p.state + pair * FUSED_STATE;
  int *arrived = state + FUSED_COUNTERS, *global_listed = arrived + 32;
  uint64_t* global_list = reinterpret_cast<uint64_t*>(state + FUSED_LIST);

  // Queries as attention reads them and the blocks that tokens lie in, on their way while scores
  // are made. A run of tokens lies in one block.
  const int heads = p.attend.queries.heads;
  const char* query = static_cast<const char*>(p.attend.queries.data) +
                      (mine.token * p.attend.queries.token_stride +
                       static_cast<int64_t>(head) * heads * p.attend.queries.head_stride) * 2;
  static_assert(Attend::QUERY_CHUNKS % THREADS == 0 || Attend::QUERY_CHUNKS < THREADS);
#pragma unroll 1
  for (int begin = 0; begin < Attend::QUERY_CHUNKS; begin += THREADS) {
    const int i = begin + threadIdx.x;
    if (Attend::QUERY_CHUNKS < THREADS && i >= Attend::QUERY_CHUNKS) break;
    const int row = i / Attend::ROW_CHUNKS, chunk = i % Attend::ROW_CHUNKS;
    copy_async_or_zero(queries + row * Attend::ROW_CHUNKS + swizzled(row, chunk),
                       query + min(row, heads - 1) * p.attend.queries.head_stride * 2 + chunk * 16,
                       heads - 1 - row);
  }
  const int all = (len + STEP - 1) / STEP;
  const int own = static_cast<unsigned>(all - part + parts - 1) / parts;
  const int* table = p.attend.rows.block_table + mine.request * p.attend.rows.block_table_stride;
#pragma unroll 1
  for (int run = threadIdx.x; run < own * RUNS; run += THREADS) {
    const int token = (part + run / RUNS * parts) * STEP + run % RUNS * RUN;
    if (token < len) copy_async_4(blocks + run, table + block_of(p.attend.rows, token));
  }
  if (threadIdx.x < FEW) few[threadIdx.x] = 0;
  if (threadIdx.x == 0) *few_listed = 0;
  const bool selects = len > budget;

  // This CTA's scores by tiles: of each a thread has eight times four neighbours, of element
  // 4 i + j of the tile bit 4 i + j of its marks.
  const int quads = own * (STEP / 4), tiles = (own + Shape::TILE_STEPS - 1) / Shape::TILE_STEPS;
  auto quad_of = [&](int tile, int i) { return (tile * 8 + i) * THREADS + threadIdx.x; };
  auto token_of = [&](unsigned quad) -> int {
    return (part + quad / (STEP / 4) * parts) * STEP + quad % (STEP / 4) * 4;
  };
  auto quad_and_token = [&](int tile, int bit, int& quad) {
    quad = quad_of(tile, bit / 4);
    return token_of(quad) + bit % 4;
  };
  auto score_of = [&](int quad, int bit) { return scores[quad * 4 + bit % 4]; };
  auto offset_at = [&](int quad, int token) {
    const uint32_t block = blocks[quad / (RUN / 4)];  // unsigned, and products are shorter
    const uint32_t slot = token - block_of(p.attend.rows, token) * p.attend.rows.block_size;
    return static_cast<int64_t>(block) * p.attend.block_bytes + head * p.attend.head_bytes +
           static_cast<int64_t>(slot) * p.attend.entry_bytes;
  };
  // Calls visit(i, quad, valid) for each of a tile's quads, with a bit for each of the four that
  // is a token. Beyond the CTA's quads there is none, and `quad` is the last one, to be read.
  auto for_quads = [&](int tile, auto visit) {
#pragma unroll 2
    for (int i = 0; i < 8; ++i) {
      const int quad = quad_of(tile, i), left = min(max(len - token_of(quad), 0), 4);
      visit(i, min(quad, quads - 1), 15u >> (4 - left));
    }
  };

  uint64_t threshold = 0;
  int barriers = 0;
  bool sure_only = true;  // whether marks.x is all that is selected
  if (selects && budget) {
    const WarpSteps steps = {part + parts * warp, parts * WARPS, (own - warp + WARPS - 1) / WARPS,
                             scores + warp * STEP, WARPS * STEP};
    int* counted = score_steps<typename Shape::Score, D, 1, HEADS, false>(
        p.score, std::is_same_v<T, BFloat16> ? Dtype::BFLOAT16 : Dtype::FLOAT16, mine, head, steps,
        reinterpret_cast<uint4*>(shared), [&] {
          // What is read and written next has long been out of the caches.
          if (warp > 0) return;
          prefetch(state + lane * 32);
          prefetch(state + (lane + 32) * 32);
          if (lane == 0) prefetch(arrived);
          if (lane == 1) prefetch(global_list);
          if (lane == 2) prefetch(p.attend.partial_lse + pair * heads * p.attend.splits);
          if (lane == 3) prefetch(p.attend.partial_out + pair * heads * p.attend.splits * D);
        });
    copy_wait<0>();
    Bins<THREADS> seen[2] = {};  // what was in a histogram before
    Bin found = {0, budget, 0};
    auto find = [&](const Bins<THREADS>& bins, int shift) {
      found = find_bin(bins, found.rank, warp_sums, found_at);
      threshold |= static_cast<uint64_t>(found.bin) << shift;
    };
    auto digit = [&](uint64_t key, int known, int shift) {
      return static_cast<uint32_t>(key >> shift) & (known == 32 ? DIGIT_MASK >> 1 : DIGIT_MASK);
    };
    auto clear = [&] {
      __syncthreads();
      fill_zeros<KEY_BINS, THREADS>(counted);
      __syncthreads();
    };
    int shift = FIRST_SHIFT;
#pragma unroll 1
    while (true) {
      int* histogram = state + barriers % 2 * KEY_BINS;
      add_histogram<THREADS>(counted, histogram);
      arrive(arrived);
      wait_for_parts(arrived, parts, ++barriers);
      Bins<THREADS> bins = read_bins<THREADS, true>(histogram);
      const Bins<THREADS> now = bins;
      bins.template add<-1>(seen[0]);
      seen[0] = seen[1], seen[1] = now;
      find(bins, shift);
      if (shift == 0 || found.count == found.rank || found.count <= FUSED_LISTED) break;
      // Counts a digit of those keys that have the bits above it in common with the threshold.
      const int known = shift;
      shift = next_shift(shift);
      clear();
#pragma unroll 1
      for (int i = threadIdx.x; i < own * STEP; i += THREADS) {
        const int token = token_of(i / 4) + i % 4;
        if (token >= len) continue;
        const uint64_t key = key_of(scores[i], token);
        if (key >> known == threshold >> known) atomicAdd(counted + digit(key, known, shift), 1);
      }
      __syncthreads();
    }

    // Marks what is selected for sure, in x, and whatever may be the last one, in y.
    const bool settles = shift > 0 && found.count > found.rank;
    sure_only = !settles;
    const uint64_t above = settles ? threshold + (uint64_t{1} << shift) : threshold;
    const float above_score = score_of_key(static_cast<uint32_t>(above >> INDEX_BITS));
    const float least_score = score_of_key(static_cast<uint32_t>(threshold >> INDEX_BITS));
    const bool by_score = (above & ((1u << INDEX_BITS) - 1)) == 0 && shift >= INDEX_BITS;
    int candidates = 0;
    auto mark_tiles = [&](auto compare) {  // which gives bits of a quad
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        uint2 mark = make_uint2(0, 0);
        for_quads(tile, [&](int i, int quad, uint32_t valid) {
          uint32_t sure = 0, maybe = 0;
          compare(quad, sure, maybe);
          mark.x |= (sure & valid) << i * 4;
          mark.y |= (maybe & ~sure & valid) << i * 4;
        });
        marks[tile * THREADS + threadIdx.x] = mark;
        candidates += __popc(mark.y);
      }
    };
    if (by_score) {
      mark_tiles([&](int quad, uint32_t& sure, uint32_t& maybe) {
        const float4 x = reinterpret_cast<const float4*>(scores)[quad];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float score = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
          sure |= score >= above_score ? 1u << j : 0u;
          maybe |= score >= least_score ? 1u << j : 0u;
        }
      });
    } else {
      mark_tiles([&](int quad, uint32_t& sure, uint32_t& maybe) {
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
          const uint64_t key = key_of(score_of(quad, j), token_of(quad) + j);
          sure |= key >= above ? 1u << j : 0u;
          maybe |= key >= threshold ? 1u << j : 0u;
        }
      });
    }
    if (settles) {
      const int up_to = sum_up_to(candidates);
      int to = lane == 31 && up_to ? atomicAdd(global_listed, up_to) : 0;
      to = __shfl_sync(ALL_LANES, to, 31) + up_to - candidates;
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        uint32_t maybe = marks[tile * THREADS + threadIdx.x].y;
#pragma unroll 1
        for (; maybe; maybe &= maybe - 1) {
          const int bit = __ffs(maybe) - 1;
          int quad;
          const int token = quad_and_token(tile, bit, quad);
          if (to < FUSED_LISTED) global_list[to] = key_of(score_of(quad, bit), token);
          ++to;
        }
      }
    }
    if (settles) {
      clear();
      arrive(arrived);
    }
    // Entries come nearer while CTAs wait for one another.
    const bool many = settles && found.count - found.rank > budget;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const uint2 mark = marks[tile * THREADS + threadIdx.x];
#pragma unroll 1
      for (uint32_t left = many ? mark.x : mark.x | mark.y; left; left &= left - 1) {
        int quad;
        const int token = quad_and_token(tile, __ffs(left) - 1, quad);
        const int64_t offset = offset_at(quad, token);
#pragma unroll
        for (int i = 0; i < D * 2; i += 128) {
          prefetch(p.attend.keys + offset + i);
          prefetch(p.attend.values + offset + i);
        }
      }
    }
    if (settles) {
      wait_for_parts(arrived, parts, ++barriers);
      const int listed = min(found.count, FUSED_LISTED);
      int known = shift;
      shift = next_shift(shift);
      constexpr int AT_ONCE = 8;
#pragma unroll 1
      for (int begin = threadIdx.x; begin < listed; begin += AT_ONCE * THREADS) {
        uint64_t keys[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const int at = begin + i * THREADS;
          keys[i] = at < listed ? __ldcg(global_list + at) : 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const int at = begin + i * THREADS;
          if (at < listed) {
            list[at] = keys[i];
            atomicAdd(counted + digit(keys[i], known, shift), 1);
          }
        }
      }
      __syncthreads();
      find(read_bins<THREADS>(counted), shift);
#pragma unroll 1
      while (shift > 0 && found.count > FEW) {
        known = shift;
        shift = next_shift(shift);
        clear();
#pragma unroll 2
        for (int i = threadIdx.x; i < listed; i += THREADS) {
          const uint64_t key = list[i];
          if (key >> known == threshold >> known) atomicAdd(counted + digit(key, known, shift), 1);
        }
        __syncthreads();
        find(read_bins<THREADS>(counted), shift);
      }
      if (shift > 0) {
        threshold = ranked<THREADS>(list, listed, threshold, shift, found, few, few_listed);
      }
    }
  } else {
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      uint2 mark = make_uint2(0, 0);
      for_quads(tile, [&](int i, int, uint32_t valid) { mark.x |= valid << i * 4; });
      if (!budget) mark.x = 0;
      marks[tile * THREADS + threadIdx.x] = mark;
    }
  }

  // Attends to what is selected, by panels.
  int chosen = 0;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    uint2 mark = marks[tile * THREADS + threadIdx.x];
    if (!sure_only) {
#pragma unroll 1
      for (; mark.y; mark.y &= mark.y - 1) {
        const int bit = __ffs(mark.y) - 1;
        int quad;
        const int token = quad_and_token(tile, bit, quad);
        if (key_of(score_of(quad, bit), token) >= threshold) mark.x |= 1u << bit;
      }
    } else {
      mark.x |= mark.y;
    }
    marks[tile * THREADS + threadIdx.x].x = mark.x;
    chosen += __popc(mark.x);
  }
  copy_wait<0>();
  const int up_to = sum_up_to(chosen);
  if (lane == 31) warp_sums[warp] = up_to;
  __syncthreads();
  const int of_warp = lane < WARPS ? warp_sums[lane] : 0;
  const int total = __reduce_add_sync(ALL_LANES, of_warp);
  const int before =
      up_to - chosen + __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0);
  uint4* entries = reinterpret_cast<uint4*>(shared) + warp * p.stages * Attend::STAGE;
  Softmax<T, D, false, false> softmax;
  softmax.reset();
#pragma unroll 1
  for (int panel = 0; panel < total; panel += PANEL) {
    const int count = min(total - panel, PANEL), chunks = (count + CHUNK - 1) / CHUNK;
    int to = before - panel;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      uint32_t left = marks[tile * THREADS + threadIdx.x].x;
#pragma unroll 1
      for (; left; left &= left - 1, ++to) {
        if (to < 0 || to >= PANEL) continue;
        int quad;
        const int token = quad_and_token(tile, __ffs(left) - 1, quad);
        offsets[to] = offset_at(quad, token);
      }
    }
    if (threadIdx.x < chunks * CHUNK - count) offsets[count + threadIdx.x] = -1;
    __syncthreads();
#pragma unroll 1
    for (int first = warp; first < chunks; first += WARPS * p.stages) {
      const int last = min(chunks, first + WARPS * p.stages);
      uint4* to = entries;
#pragma unroll 1
      for (int chunk = first; chunk < last; chunk += WARPS, to += Attend::STAGE) {
        fetch_entries<Attend>(p.attend, offsets + chunk * CHUNK, to);
      }
      copy_commit();
      copy_wait<0>();
      __syncwarp();
      const uint4* keys = entries;
#pragma unroll 1
      for (int chunk = first; chunk < last; chunk += WARPS, keys += Attend::STAGE) {
        softmax.add(queries, keys, keys + CHUNK * Attend::CACHE_CHUNKS, offsets + chunk * CHUNK,
                    p.attend.score_scale, 0.0f);
      }
      __syncwarp();
    }
    __syncthreads();
  }
  softmax.store(reinterpret_cast<float*>(entries), largest + warp * 16, sums + warp * 16);
  __syncthreads();
  write_part<T, D, WARPS>(p.attend, pair, mine.token, head, part, parts,
                          reinterpret_cast<const float*>(shared), p.stages * Attend::STAGE * 4,
                          largest, sums);

  // The CTA that comes last merges all parts, and leaves the state as it was.
  __syncthreads();
  if (threadIdx.x == 0) {
    int ticket;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(ticket) : "l"(arrived) : "memory");
    *last = ticket == parts * (barriers + 1) - 1;
  }
  __syncthreads();
  if (!*last) return;
  if (threadIdx.x == 0) *arrived = *global_listed = 0;
  if (barriers > 0) fill_zeros<2 * KEY_BINS, THREADS>(state);
  if (parts > 1) {
    merge_at_once<T, D, HEADS, THREADS>(p.attend, pair, mine.token, head, parts,
                                        reinterpret_cast<float*>(shared));
  }
#endif
}

}  // namespace kvx
