// The packed layout of a weight matrix W [rows, cols], shared by every instruction set.
//
// Rows in blocks of 16. A block is one run of bytes that starts on a cache line; each part is padded to whole lines:
//
//   row scales    16 float32                                 all formats but bf16
//   group scales  fp8: groups float32; others: groups x 16 float16, or bytes (Scales)   only where the format has a
//   group zeros         groups x 16 uint8                          only where zero points or minima are stored supers
//   columns / 256 x 16 float16: factors of scales as bytes; then those of the minima, where there are any lines 64
//   bytes each, in the order of the columns
//
// Where W[row, col] lies in the lines of its block, with r = row % 16 (the unit is an element of the encoding):
//
//   bf16  line col / 2: element 2 * r + col % 2
//         the second operand of vdpbf16ps; 16 lines are an AMX tile
//
//   int8  line col / 4: byte 4 * r + col % 4
//         the second operand of vpdpbusd; 16 lines are an AMX tile
//
//   int4  line col / 8: byte 4 * r + col % 4, low nibble if col % 8 < 4, else the high one
//         two int8 lines in one
//
//   mxfp4, nvfp4, iq4 as int4
//
//   int5  units of 32 columns: four lines of int4 with the codes' low nibbles, then a line with the high bits: byte
//         4 * r + col % 4, bit col / 4 % 8
//
//   int6  units of 16 columns: two lines of int4, then a line with the two high bits of each code: byte 4 * r + col %
//         4, bits 2 * (col / 4 % 4) and the next
//
//   fp8   line col / 4: byte 16 * (r / 4) + 8 * (col % 4 / 2) + 2 * (r % 4) + col % 2
//         so that interleaving the bytes of each 128-bit lane with others gives two bf16 lines in order
//
// Columns are padded to a multiple of 32, rows to 16. Padding decodes to zero: in added rows the row scale
// is 0, in added columns the code is the zero (iq4 has none: its matrices are whole groups of columns).
// Reading a block's lines in order is one forward stream.
#pragma once

#include <cstdint>

#include "kernels/format.h"

namespace kt {

constexpr int64_t kBlockRows = 16;
constexpr int64_t kColumnUnit = 32;
constexpr int64_t kLineBytes = 64;

static constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// The fewest columns that are whole lines, and these lines.
constexpr int64_t unit_columns(Encoding encoding) {
  constexpr int64_t kColumns[] = {2, 4, 4, 8, 32, 16, 8, 8, 8};
  return kColumns[static_cast<int>(encoding)];
}
constexpr int64_t unit_lines(Encoding encoding) {
  return encoding == Encoding::kInt5 ? 5 : encoding == Encoding::kInt6 ? 3 : 1;
}

struct PackedShape {
  int64_t rows = 0, cols = 0;
  Format format{};

  constexpr int64_t blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
  constexpr int64_t padded_rows() const { return blocks() * kBlockRows; }
  constexpr int64_t padded_cols() const { return round_up(cols, kColumnUnit); }
  constexpr int64_t pairs() const { return padded_cols() / 2; }

  // Columns that share a scale, and how many such groups a row has (the last may be shorter): the whole row where the
  // format has no group.
  constexpr int64_t group() const { return format.group ? format.group : padded_cols(); }
  constexpr int64_t groups() const { return (padded_cols() + group() - 1) / group(); }
  // The same for activations in int8.
  constexpr int64_t activation_group() const { return format.group ? format.group : kActivationGroup; }
  constexpr int64_t activation_groups() const { return (padded_cols() + activation_group() - 1) / activation_group(); }

  // Lines of `cols` columns, whole units.
  constexpr int64_t lines(int64_t columns) const {
    return columns / unit_columns(format.encoding) * unit_lines(format.encoding);
  }
  constexpr int64_t row_scale_bytes() const {
    return format.encoding == Encoding::kBf16 ? 0 : kBlockRows * static_cast<int64_t>(sizeof(float));
  }
  constexpr int64_t group_scale_bytes() const {
    if (format.group == 0) return 0;
    const int64_t each = format.scales == Scales::kHalf ? 2 * kBlockRows : kBlockRows;
    return round_up(groups() * (format.block_scales() ? 4 : each), kLineBytes);
  }
  constexpr int64_t zero_bytes() const {
    return format.zero_points || format.mins ? round_up(groups() * kBlockRows, kLineBytes) : 0;
  }
  constexpr int64_t supers() const { return (padded_cols() + kSuperGroup - 1) / kSuperGroup; }
  // Of the supers of scales, and as many of minima.
  constexpr int64_t super_bytes() const {
    return format.scales == Scales::kByte ? round_up(supers() * kBlockRows * 2, kLineBytes) : 0;
  }
  constexpr int64_t line_offset() const {
    return row_scale_bytes() + group_scale_bytes() + zero_bytes() + super_bytes() * (format.mins ? 2 : 1);
  }
  constexpr int64_t block_bytes() const { return line_offset() + lines(padded_cols()) * kLineBytes; }
  constexpr int64_t bytes() const { return blocks() * block_bytes(); }
};

// One packed block: where its parts are.
struct Block {
  const float* row_scales;  // 16; null for bf16
  const void*
      group_scales;  // float[groups] for fp8 but mxfp8, else float16 bits or bytes [groups][16]; null without a group
  const uint8_t* zeros;  // [groups][16]; null where they are not stored
  const uint8_t* lines;
  const uint8_t* mins;         // [groups][16]; null where they are not stored
  const uint16_t* supers;      // float16 bits [supers][16] of the scales; null where these are no bytes
  const uint16_t* min_supers;  // of the minima
};

static inline Block block_at(const PackedShape& shape, const uint8_t* packed, int64_t block) {
  const uint8_t* base = packed + block * shape.block_bytes();
  const uint8_t *groups = base + shape.row_scale_bytes(), *zeros = groups + shape.group_scale_bytes();
  const uint8_t* supers = zeros + shape.zero_bytes();
  const bool by_byte = shape.format.scales == Scales::kByte, mins = shape.format.mins;
  return {.row_scales = shape.row_scale_bytes() ? reinterpret_cast<const float*>(base) : nullptr,
          .group_scales = shape.group_scale_bytes() ? groups : nullptr,
          .zeros = shape.format.zero_points ? zeros : nullptr,
          .lines = base + shape.line_offset(),
          .mins = mins ? zeros : nullptr,
          .supers = by_byte ? reinterpret_cast<const uint16_t*>(supers) : nullptr,
          .min_supers = mins ? reinterpret_cast<const uint16_t*>(supers + shape.super_bytes()) : nullptr};
}

// The block that follows in memory, `block_bytes` (PackedShape) further: without the divisions of block_at.
static inline Block block_after(const Block& block, int64_t block_bytes) {
  const auto after = [&](const auto* part) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(part);
    return part ? reinterpret_cast<decltype(part)>(bytes + block_bytes) : nullptr;
  };
  return {.row_scales = after(block.row_scales),
          .group_scales = block.group_scales ? static_cast<const uint8_t*>(block.group_scales) + block_bytes : nullptr,
          .zeros = after(block.zeros),
          .lines = after(block.lines),
          .mins = after(block.mins),
          .supers = after(block.supers),
          .min_supers = after(block.min_supers)};
}

}  // namespace kt
