// How the score kernel cuts up its work, and how its stages lie in shared memory.
#pragma once

#include "device.cuh"

namespace kvx {

// Tokens that a warp takes at a time.
constexpr int STEP = 64;

// TILES: columns / 8. SUBS: groups in a step, 2 of 32 tokens or (part of) one. WARPS_: of a CTA.
template <int D, int TILES, int SUBS, int WARPS_>
struct ScoreShape {
  static constexpr int WARPS = WARPS_;
  static constexpr int STAGES = WARPS > 8 ? 3 : 4;  // steps of a warp in shared memory
  static constexpr int THREADS = WARPS * 32;
  static constexpr int SUB = STEP / SUBS;
  static constexpr int PASSES = D == 256 ? 2 : 1;  // 32-bit words of a token that a lane holds
  static constexpr int PAIRS = D == 64 ? 8 : 16;   // pairs of channels in a pass
  // Of 16 bytes, in shared memory: codes, then scales, then zeros.
  static constexpr int CODE_CHUNKS = SUB * D / 128;
  static constexpr int SCALE_CHUNKS = D / 4;
  // What is left free keeps reads of both groups' zeros at once off each other's banks.
  static constexpr int SUB_CHUNKS = CODE_CHUNKS + SCALE_CHUNKS + SCALE_CHUNKS / 8 + D / 64;
  static constexpr int STAGE_CHUNKS = SUBS * SUB_CHUNKS;
  static constexpr int QUERY_CHUNKS = TILES * (D / 32) * 32;
  static constexpr int SHARED_BYTES =
      (WARPS * STAGES * STAGE_CHUNKS + QUERY_CHUNKS) * 16 + KEY_BINS * 4 + 32 * 4;
};

// Lanes of a quad read scales a quarter of the channels apart: this spreads them over the banks.
__device__ __forceinline__ int spread(int chunk) { return chunk + chunk / 8; }

__device__ __forceinline__ void words_of(const uint4& chunk, uint32_t (&words)[4]) {
  words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
}

// Eight channels of a group's scales or zeros: the chunk-th ones of this lane's quarter.
template <typename Shape, int D>
__device__ __forceinline__ uint4 scale_chunk(const uint4* stage, int sub, bool zeros, int chunk) {
  const int row = Shape::CODE_CHUNKS + (zeros ? spread(D / 8) : 0);
  const int quarter = threadIdx.x % 4;
  return stage[sub * Shape::SUB_CHUNKS + row + spread(quarter * (D / 32)) + chunk];
}

}  // namespace kvx
