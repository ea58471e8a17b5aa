// The loops around the register tiles of integer products, once for all instruction sets. An ISA gives
//
//   struct Isa {
//     static constexpr int kMaxRows, kMaxBlocks;  // of a register tile of many rows; kMaxBlocks 1 or 2
//     static constexpr int kFewRows;              // up to this many rows are few; at most kMaxRows
//     static constexpr int few_blocks(int rows);  // of a register tile of few rows: 1, 2 or 4
//     static constexpr int64_t kChunkBytes;       // of packed lines that stay in the L1 cache
//     using Ahead = ...;                          // prefetching of few rows: IntoL1 or IntoL2
//     template <Encoding, int kRows, int kBlocks, bool kFew> static void tile(const IntegerTile&);
//   };
//
// Few rows: blocks side by side, all groups in one pass. Each block is a forward stream with prefetch, because a single
// stream does not keep enough lines in flight to reach the memory bandwidth. Lines are prefetched into the L2 cache
// where it takes more at a time than the L1 cache (IntoL2; Zen 4: about twice as many), else into the L1 cache. While a
// group's lines are read, lines some way ahead are prefetched, and a part of the scales of the next blocks. Many rows:
// kMaxBlocks blocks, one chunk of groups at a time. All row tiles use a chunk while it lies in the L1 cache, and each
// prefetches its part of the next chunk into the L2 cache; float totals lie in c between chunks. In either case the
// order of additions is the order of groups.
//
// Include only in a kernel's own translation unit, with Isa in an unnamed namespace.
#pragma once

#include <xmmintrin.h>

#include <cstdint>
#include <utility>

#include "kernels/generic/nibbles.h"
#include "kernels/layout.h"
#include "kernels/tiles.h"

namespace kt {
namespace {

// Where few rows prefetch lines to, and how many bytes ahead, over all forward streams: a multiple of memory latency
// times bandwidth.
struct IntoL2 {
  static constexpr auto kHint = _MM_HINT_T1;
  // On Zen 4 lines of bytes are read fastest at a shorter distance, where the processor's own prefetcher fetches ahead
  // of it; a line of nibbles takes longer to compute with.
  static constexpr int64_t bytes(Encoding encoding) { return encoding == Encoding::kInt8 ? 4096 : 16384; }
};
// Intel's processors keep a buffer of the L1 cache for each prefetch, into either cache. Emerald Rapids reads 2 to 4 %
// faster than with IntoL2, at any distance from 4096 to 16384.
struct IntoL1 {
  static constexpr auto kHint = _MM_HINT_T0;
  static constexpr int64_t bytes(Encoding) { return 8192; }
};
constexpr int kMostBlocks = 4;  // of any register tile

// The work of a register tile: groups [first, end) of some rows times one block or more. c holds the totals of the
// groups before `first`.
struct IntegerTile {
  PackedShape shape;
  const uint8_t* a;  // from here down: of the tile's first row
  int64_t lda;
  const float* a_scales;
  const int32_t* a_sums;
  int64_t ld_groups;
  float* c;
  int64_t ldc;
  Block blocks[kMostBlocks];
  int64_t first, end;
  int64_t ahead;                    // how many bytes ahead of a group's own lines to prefetch
  int64_t fetch_first, fetch_step;  // many rows: groups in which to do so
  int64_t block_bytes, block_lines;
  // Few rows: bytes from a block's first line to its end, and from there to the first line of the stream's next block;
  // that block (of the first stream), and how many bytes of its scales each group prefetches.
  int64_t block_end, jump;
  const uint8_t* next;
  int64_t next_step;
};

// The columns of a group, and its lines in a block.
struct GroupSpan {
  int64_t col, cols, line_begin, lines;
};

template <Encoding kEncoding>
inline GroupSpan group_span(const PackedShape& shape, int64_t g) {
  constexpr int64_t kColumns = unit_columns(kEncoding), kLines = unit_lines(kEncoding);
  const int64_t group = shape.activation_group(), col = g * group, left = shape.padded_cols() - col;
  const int64_t cols = group < left ? group : left;
  return {col, cols, col / kColumns * kLines * kLineBytes, cols / kColumns * kLines};
}

// Few rows: how far ahead of its lines a group prefetches. A group prefetches one line for each line that it reads: a
// burst of prefetches would queue, and the group's own loads would wait behind the burst.
inline int64_t stream_ahead(const IntegerTile& t, const GroupSpan& span) {
  return span.line_begin + t.ahead < t.block_end ? t.ahead : t.ahead + t.jump;
}

template <int kBlocks, class Ahead = IntoL2>
inline void prefetch_lines(const uint8_t* const* lines, int64_t offset) {
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) _mm_prefetch(reinterpret_cast<const char*>(lines[b]) + offset, Ahead::kHint);
}

// Few rows: group g's part of the scales of the next blocks.
template <int kBlocks>
inline void prefetch_next(const IntegerTile& t, int64_t g) {
  const auto* from = reinterpret_cast<const char*>(t.next) + g * t.next_step;
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) _mm_prefetch(from + b * t.block_bytes, _MM_HINT_T1);
}

// Few rows, at the beginning of a call: what no earlier group has prefetched.
template <class Ahead>
inline void prefetch_first(const PackedShape& shape, const uint8_t* block, int blocks) {
  const int64_t all = shape.block_bytes(), first = shape.line_offset() + Ahead::bytes(shape.format.encoding) / blocks;
  for (int64_t at = 0; at < first && at < all; at += kLineBytes) {
    for (int b = 0; b < blocks; ++b) _mm_prefetch(reinterpret_cast<const char*>(block) + b * all + at, Ahead::kHint);
  }
}

// Many rows: prefetches the group's part of a later chunk into the L2 cache.
template <int kBlocks>
inline void prefetch_group(const IntegerTile& t, const GroupSpan& span) {
  for (int b = 0; b < kBlocks; ++b) {
    const auto* from = reinterpret_cast<const char*>(t.blocks[b].lines) + span.line_begin + t.ahead;
    for (int64_t i = 0; i < span.lines; ++i) _mm_prefetch(from + i * kLineBytes, _MM_HINT_T1);
  }
}

using TileFunction = void (*)(const IntegerTile&);

// Blocks of a register tile, where there are enough.
template <class Isa, bool kFew>
constexpr int blocks_of_tile(int rows) {
  return kFew ? Isa::few_blocks(rows) : Isa::kMaxBlocks;
}

template <class Isa, Encoding kEncoding, bool kFew, int... kRows>
inline TileFunction tile_function(int64_t rows, bool one_block, std::integer_sequence<int, kRows...>) {
  static constexpr TileFunction kOne[] = {Isa::template tile<kEncoding, kRows + 1, 1, kFew>...};
  static constexpr TileFunction kMost[] = {
      Isa::template tile<kEncoding, kRows + 1, blocks_of_tile<Isa, kFew>(kRows + 1), kFew>...};
  return (one_block ? kOne : kMost)[rows - 1];
}

// Of one block, or of blocks_of_tile(rows).
template <class Isa, Encoding kEncoding, bool kFew>
inline TileFunction tile_function(int64_t rows, int blocks) {
  constexpr int kRows = kFew ? Isa::kFewRows : Isa::kMaxRows;
  return tile_function<Isa, kEncoding, kFew>(rows, blocks == 1, std::make_integer_sequence<int, kRows>{});
}

inline void run_tile(const IntegerProduct& p, int64_t row, int64_t block, TileFunction tile, IntegerTile& t) {
  t.a = p.a.values.row(row);
  t.a_scales = p.a.scales.row(row);
  t.a_sums = p.a.sums.row(row);
  t.c = p.c.row(row) + block * kBlockRows;
  tile(t);
}

template <class Isa, Encoding kEncoding>
inline void multiply_blocks(const IntegerProduct& p, int64_t block, int blocks, int64_t next_blocks, IntegerTile& t) {
  const PackedShape& shape = p.weights.shape;
  const int64_t groups = shape.activation_groups();
  const int64_t tiles = (p.rows + Isa::kMaxRows - 1) / Isa::kMaxRows;
  const int64_t group_bytes = shape.lines(shape.activation_group()) * kLineBytes;
  const int64_t chunk_bytes = Isa::kChunkBytes / blocks;
  const int64_t at_once = chunk_bytes > group_bytes ? chunk_bytes / group_bytes : 1;
  for (t.first = 0; t.first < groups; t.first = t.end) {
    t.end = t.first + at_once < groups ? t.first + at_once : groups;
    const bool last = t.end == groups;
    t.ahead = last ? blocks * shape.block_bytes() - t.first * group_bytes : at_once * group_bytes;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = p.rows * i / tiles, rows = p.rows * (i + 1) / tiles - row;
      t.fetch_first = last && next_blocks < blocks ? groups : t.first + i;
      t.fetch_step = tiles;
      run_tile(p, row, block, tile_function<Isa, kEncoding, false>(rows, blocks), t);
    }
  }
}

template <class Isa, Encoding kEncoding>
inline void multiply_encoded(const IntegerProduct& p) {
  static_assert(Isa::kFewRows <= Isa::kMaxRows && Isa::kMaxBlocks <= 2 && Isa::few_blocks(1) <= kMostBlocks);
  const PackedShape& shape = p.weights.shape;
  IntegerTile t{};
  t.shape = shape;
  t.lda = p.a.values.ld;
  t.ld_groups = p.a.scales.ld;
  t.ldc = p.c.ld;
  t.block_bytes = shape.block_bytes();
  t.block_lines = shape.lines(shape.padded_cols());
  const int64_t line_offset = shape.line_offset(), groups = shape.activation_groups();
  t.block_end = t.block_bytes - line_offset;
  t.next_step = (line_offset + groups - 1) / groups;
  const bool few = p.rows <= Isa::kFewRows;
  const int at_once = few ? Isa::few_blocks(static_cast<int>(p.rows)) : Isa::kMaxBlocks;
  Block first = block_at(shape, p.weights.data, 0);
  for (int64_t block = 0; block < p.weights.blocks;) {
    const int64_t left = p.weights.blocks - block;
    const int blocks = left < at_once ? 1 : at_once;
    for (int b = 0; b < blocks; ++b, first = block_after(first, t.block_bytes)) t.blocks[b] = first;
    if (few) {
      t.first = 0;
      t.end = groups;
      t.ahead = Isa::Ahead::bytes(kEncoding) / blocks;
      if (block == 0) prefetch_first<typename Isa::Ahead>(shape, p.weights.data, blocks);
      const uint8_t* end = p.weights.data + (block + blocks) * t.block_bytes;
      t.next = blocks == left && p.weights.next ? p.weights.next : end;
      t.jump = t.next - (end - (blocks - 1) * t.block_bytes) + line_offset;
      run_tile(p, 0, block, tile_function<Isa, kEncoding, true>(p.rows, blocks), t);
    } else {
      multiply_blocks<Isa, kEncoding>(p, block, blocks, left - blocks, t);
    }
    block += blocks;
  }
}

template <class Isa>
inline void multiply_integer(const IntegerProduct& p) {
  if (p.rows == 0) return;
  switch (p.weights.shape.format.encoding) {
    case Encoding::kInt4:
      return multiply_encoded<Isa, Encoding::kInt4>(p);
    case Encoding::kInt5:
      return multiply_encoded<Isa, Encoding::kInt5>(p);
    case Encoding::kInt6:
      return multiply_encoded<Isa, Encoding::kInt6>(p);
    case Encoding::kFp4:
      return multiply_encoded<Isa, Encoding::kFp4>(p);
    case Encoding::kFp4By16:
      return multiply_encoded<Isa, Encoding::kFp4By16>(p);
    case Encoding::kIq4:
      return multiply_encoded<Isa, Encoding::kIq4>(p);
    default:
      return multiply_encoded<Isa, Encoding::kInt8>(p);
  }
}

}  // namespace
}  // namespace kt
