// The eight tile registers, and the inner loop of all AMX kernels except those for few rows (few_rows.h).
//
//   tiles 0..3   C[r][b] = tile 2 * r + b     float32 or int32 sums
//   tiles 4, 5   A[r]                         rows x (pairs of bf16 or quads of int8) along the inner index
//   tiles 6, 7   B[b]                         pairs or quads along the inner index x 16 columns
//
// Rate of the full 2 x 2: 4 products of 16 cycles for 4 tile loads of about 8 cycles, so the products are the limit
// where the operands lie in the L1 cache. Each of the four chains waits 52 cycles for its last product, less than the
// 64 cycles of a step. (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter 20.) From the L2 cache
// the loads of a step take 85 to 120 cycles (measured, docs/measurements.md).
#pragma once

#include <cstdint>

#include "kernels/amx/kernels.h"
#include "kernels/generic/prefetch.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

// Rows and bytes a row of each register: the operand of LDTILECFG (palette 1).
class TileConfig {
 public:
  TileConfig() { bytes_[0] = 1; }
  void set(int tile, int64_t rows, int64_t row_bytes) {
    bytes_[16 + 2 * tile] = static_cast<uint8_t>(row_bytes);
    bytes_[48 + tile] = static_cast<uint8_t>(rows);
  }
  const void* bytes() const { return bytes_; }

 private:
  alignas(64) uint8_t bytes_[64] = {};
};

// The registers of this thread, from here to the end of the scope. Released after each call: tile data in use would
// make every task switch save 8 KiB.
class TileSession {
 public:
  explicit TileSession(const TileConfig& config) { load_config(config.bytes()); }
  ~TileSession() { release_tiles(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

// Rows of a call in tiles of equal height, so that one configuration serves all: tile t holds rows [start, start +
// height). The last tile may overlap the previous one; the results of repeated rows need not be written again. A row of
// the call has `unit` rows of A, all in one tile.
struct RowTiles {
  explicit RowTiles(int64_t num_rows, int64_t unit = 1)
      : rows(num_rows * unit), count((rows + 15) / 16), height((num_rows + count - 1) / count * unit) {}
  int64_t start(int64_t tile) const { return tile * height < rows - height ? tile * height : rows - height; }
  int64_t repeated(int64_t tile) const { return tile * height - start(tile); }  // rows that an earlier tile holds too

  const int64_t rows, count, height;
};

// For activations in A, `step_bytes` of a row at a time, and packed lines of weights in B.
inline TileConfig config_of(const RowTiles& rows, int64_t step_bytes) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, rows.height, kLineBytes);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, rows.height, step_bytes);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, step_bytes / 4, kLineBytes);
  return config;
}

// Tiles along the inner index: rows of one are `stride` bytes apart, tiles `step` bytes.
struct TileRun {
  const uint8_t* at;
  int64_t stride, step;
};

// How many lines before they are read packed lines are prefetched.
constexpr int64_t kLinesAhead = 32;

// For `accumulate`: no prefetch, or `lines` lines of kBlocks blocks into the L2 cache with every step.
struct NoFetch {
  void step() {}
};
template <int kBlocks>
struct FetchEachStep {
  PrefetchCursor cursor;
  int64_t lines = 0;

  void step() { cursor.fetch<kBlocks>(lines); }
};

// C[r][b] += A[r] * B[b] over `steps` tiles of the inner index; fetch.step() with every step.
template <class Dot, int kR, int kB, class Fetch = NoFetch>
inline void accumulate(const TileRun* a, const TileRun* b, int64_t steps, Fetch&& fetch = {}) {
  const uint8_t *a0 = a[0].at, *a1 = a[kR - 1].at, *b0 = b[0].at, *b1 = b[kB - 1].at;
  for (int64_t step = 0; step < steps; ++step) {
    fetch.step();
    load_tile<6>(b0, b[0].stride);
    load_tile<4>(a0, a[0].stride);
    Dot::template run<0, 4, 6>();
    if constexpr (kB == 2) {
      load_tile<7>(b1, b[1].stride);
      Dot::template run<1, 4, 7>();
      b1 += b[1].step;
    }
    if constexpr (kR == 2) {
      load_tile<5>(a1, a[1].stride);
      Dot::template run<2, 5, 6>();
      if constexpr (kB == 2) Dot::template run<3, 5, 7>();
      a1 += a[1].step;
    }
    a0 += a[0].step;
    b0 += b[0].step;
  }
}

// each.template operator()<tile>(r, b) for the C[r][b] in use.
template <int kR, int kB, class Each>
inline void for_each_sum(Each each) {
  each.template operator()<0>(0, 0);
  if constexpr (kB == 2) each.template operator()<1>(0, 1);
  if constexpr (kR == 2) each.template operator()<2>(1, 0);
  if constexpr (kR == 2 && kB == 2) each.template operator()<3>(1, 1);
}

template <int kR, int kB>
inline void zero_sums() {
  for_each_sum<kR, kB>([]<int kTile>(int, int) { zero_tile<kTile>(); });
}

// work.template operator()<R, B>() for the tiles and blocks that are left.
template <class Work>
inline void with_blocking(int64_t row_tiles, int64_t blocks, Work work) {
  if (row_tiles > 1 && blocks > 1)
    work.template operator()<2, 2>();
  else if (row_tiles > 1)
    work.template operator()<2, 1>();
  else if (blocks > 1)
    work.template operator()<1, 2>();
  else
    work.template operator()<1, 1>();
}

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
