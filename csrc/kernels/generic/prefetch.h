// How kernels prefetch packed lines: a cursor over lines that will be read later, in one block or in
// several side by side. It moves line by line to the end of the blocks, and jumps there to the blocks that are read
// next.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "kernels/layout.h"

namespace kt {
namespace {

constexpr int64_t kNoJump = INT64_MAX;

struct PrefetchCursor {
  const uint8_t* at = nullptr;   // the next line, in the first block
  int64_t stride = 0;            // bytes to the same line of the next block
  int64_t left = 0;              // lines that `fetch` still prefetches in each block
  int64_t until_jump = kNoJump;  // lines before the next jump
  int64_t jump_bytes = 0;        // from the last line's end to the line after the jump
  int64_t run = kNoJump;         // lines between two jumps

  // The next `lines` lines of the first block, for a loop that prefetches them itself. A jump comes after them.
  const uint8_t* take(int64_t lines) {
    const uint8_t* taken = at;
    at += lines * kLineBytes;
    until_jump -= lines;
    if (until_jump <= 0) {
      at += jump_bytes;
      until_jump = run;
    }
    return taken;
  }

  // Prefetches up to `lines` lines of each block into the L2 cache, as far as lines are left.
  template <int kBlocks>
  void fetch(int64_t lines = 1) {
    for (; lines > 0 && left > 0; --lines, --left) {
      const uint8_t* line = take(1);
#pragma GCC unroll 16
      for (int b = 0; b < kBlocks; ++b) __builtin_prefetch(line + b * stride, 0, 2);
    }
  }
};

// Lines of some blocks read side by side, `ahead` lines before they are read. After the blocks' end the cursor jumps to
// the blocks that follow in memory; `skipped` bytes of these are not prefetched (PackedShape::line_offset, or none).
// `lines`: the first line of the first block.
inline PrefetchCursor prefetch_ahead(const PackedShape& shape, const uint8_t* lines, int64_t blocks, int64_t ahead,
                                     int64_t skipped) {
  const int64_t run = shape.lines(shape.padded_cols());
  ahead = ahead < run ? ahead : run - 1;
  return {.at = lines + ahead * kLineBytes,
          .stride = shape.block_bytes(),
          .left = run,
          .until_jump = run - ahead,
          .jump_bytes = (blocks - 1) * shape.block_bytes() + skipped,
          .run = run};
}

// Lines of columns [first_col, first_col + cols) of `blocks` blocks, block after block; `packed`: the first of them.
inline PrefetchCursor prefetch_columns(const PackedShape& shape, const uint8_t* packed, int64_t blocks,
                                       int64_t first_col, int64_t cols) {
  const int64_t run = shape.lines(cols);
  return {.at = packed + shape.line_offset() + shape.lines(first_col) * kLineBytes,
          .left = blocks * run,
          .until_jump = run,
          .jump_bytes = shape.block_bytes() - run * kLineBytes,
          .run = run};
}

}  // namespace
}  // namespace kt
