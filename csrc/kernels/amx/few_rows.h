// A second blocking of the tile registers, beside tile_registers.h: one tile of rows times up to four blocks side by
// side. It serves products that are bound by memory, because one stream of weights does not saturate the memory.
//
//   tiles 0..3   C[b]    sums
//   tile 4       A
//   tiles 5..7   B[b], alternating
#pragma once

#include "kernels/amx/tile_registers.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

inline TileConfig config_of_few(int64_t rows, int64_t step_bytes) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, rows, kLineBytes);
  config.set(4, rows, step_bytes);
  for (int tile = 5; tile < 8; ++tile) config.set(tile, step_bytes / 4, kLineBytes);
  return config;
}

// work.template operator()<kB>(first) for all blocks, four at a time while at least four are left.
template <class Work>
inline void by_four_blocks(int64_t blocks, Work work) {
  int64_t block = 0;
  for (; blocks - block >= 4; block += 4) work.template operator()<4>(block);
  const int64_t left = blocks - block;
  if (left == 3) work.template operator()<3>(block);
  if (left == 2) work.template operator()<2>(block);
  if (left == 1) work.template operator()<1>(block);
}

// The lines of kB blocks. At the last blocks of a call the next read is unknown: the cursor then jumps back to lines
// that have been read already.
template <int kB>
inline PrefetchCursor prefetch_few(const PackedBlocks& weights, int64_t block) {
  const PackedShape& shape = weights.shape;
  const uint8_t* lines = block_at(shape, weights.data, block).lines;
  PrefetchCursor cursor = prefetch_ahead(shape, lines, kB, kLinesAhead, shape.line_offset());
  if (block + kB == weights.blocks) cursor.jump_bytes = (cursor.until_jump - cursor.run) * kLineBytes;
  return cursor;
}

// each.template operator()<tile>() for the C[b] in use.
template <int kB, class Each>
inline void for_each_few(Each each) {
  each.template operator()<0>();
  if constexpr (kB > 1) each.template operator()<1>();
  if constexpr (kB > 2) each.template operator()<2>();
  if constexpr (kB > 3) each.template operator()<3>();
}

template <int kB>
inline void zero_few() {
  for_each_few<kB>([]<int kTile>() { zero_tile<kTile>(); });
}

// C[b] += A * B[b], one step.
template <class Dot, int kB>
inline void multiply_few(const TileRun& a, const uint8_t* const* w) {
  load_tile<4>(a.at, a.stride);
  load_tile<5>(w[0], kLineBytes);
  Dot::template run<0, 4, 5>();
  if constexpr (kB > 1) {
    load_tile<6>(w[1], kLineBytes);
    Dot::template run<1, 4, 6>();
  }
  if constexpr (kB > 2) {
    load_tile<7>(w[2], kLineBytes);
    Dot::template run<2, 4, 7>();
  }
  if constexpr (kB > 3) {
    load_tile<5>(w[3], kLineBytes);
    Dot::template run<3, 4, 5>();
  }
}

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
