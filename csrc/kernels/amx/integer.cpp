// int8 activations times integer weights: TDPBSSD, TDPBSUD. int8 weights with one scale a row: planes.cpp.
//
// Step: A = up to 16 rows x 64 columns of activations' codes as they lie (32 or 16 where a group is not a multiple of
// 64), B = 64 columns x 16 rows of weights, C = rows x 16 int32 sums of one group. Blocking 2 x 2 (tile_registers.h).
//
// Up to 1024 columns of a group are unpacked to signed codes minus zero on the stack (2 blocks x 16 KiB), which all
// rows then use. Exception in this file: int8 with stored zero points is multiplied in its packed, unsigned form, and
// the zero is subtracted after the product: sum - zero * (sum of the activations' codes). In both cases the integer sum
// of a group is exact, followed by the arithmetic of the other instruction sets: total = fma(sum, group scale *
// activation scale, total), result = total * row scale.
//
// A group ends with a store of C and 4 vector instructions a row and block, at once for each tile: with groups of 32
// columns a tile takes 105 cycles, of which the product is 16 (measured, docs/measurements.md). Few rows are left to
// AVX-512, which keeps sums in registers.
#include "kernels/amx/tile_registers.h"
#include "kernels/amx/unpacked_lines.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

// Up to these rows AVX-512's kernels are faster, as a group's end costs them less.
constexpr int64_t few_rows(const PackedShape& shape) {
  return !kBaseHasSameBits ? 0 : shape.activation_group() < 64 ? 16 : 6;
}

// A group of columns in two blocks.
struct Span {
  int64_t group, col, cols;
  bool last;
  Floats scale[2], least[2];
  Ints zero[2];
  const float* row_scales[2];
};

// Which lines are prefetched while two blocks' lines of some columns are read.
class PairAhead {
 public:
  PairAhead(const PackedShape& shape, const uint8_t* lines)
      : cursor_(prefetch_ahead(shape, lines, 2, kLinesAhead, shape.line_offset())) {}

  // Those of block b, for `lines` lines from column `col` on.
  const uint8_t* at(int b, int64_t col, int64_t lines) {
    if (col > col_) next_ = cursor_.take(lines);
    col_ = col > col_ ? col : col_;
    return next_ + b * cursor_.stride;
  }

 private:
  PrefetchCursor cursor_;
  const uint8_t* next_ = nullptr;
  int64_t col_ = -1;
};

// The packed lines unchanged, where zero points are stored: a code minus its zero does not fit a signed byte.
class Int8Lines {
 public:
  using Dot = DotS8U8;
  static constexpr int64_t kPerLine = 4, kMaxCols = INT64_MAX;
  static constexpr bool kZeroInSums = true;

  Int8Lines(const PackedShape& shape, const uint8_t* lines) : ahead_(shape, lines) {}

  const uint8_t* at(const Block* blocks, int b, const Span&, int64_t col, int64_t cols) {
    const uint8_t* ahead = ahead_.at(b, col, cols / kPerLine);
    for (int64_t i = 0; fetched_[b] != col && i < cols / kPerLine; ++i) __builtin_prefetch(ahead + i * kLineBytes);
    fetched_[b] = col;
    return blocks[b].lines + col / kPerLine * kLineBytes;
  }

 private:
  PairAhead ahead_;
  int64_t fetched_[2] = {-1, -1};
};

// Lines of signed codes minus zero, unpacked to the stack.
template <class Unpack>
class SignedLines {
 public:
  using Dot = DotS8S8;
  static constexpr int64_t kColumns = Unpack::kColumns, kLines = Unpack::kLines, kMaxCols = 1024;
  static constexpr bool kZeroInSums = false;

  SignedLines(const PackedShape& shape, const uint8_t* lines) : ahead_(shape, lines) {}

  const uint8_t* at(const Block* blocks, int b, const Span& span, int64_t col, int64_t cols) {
    if (held_[b] != col) {
      const int64_t units = cols / kColumns;
      const uint8_t* lines = blocks[b].lines + col / kColumns * kLines * kLineBytes;
      const uint8_t* ahead = ahead_.at(b, col, units * kLines);
      for (int64_t unit = 0; unit < units; ++unit) {
        for (int64_t line = unit * kLines; line < (unit + 1) * kLines; ++line)
          __builtin_prefetch(ahead + line * kLineBytes);
        Unpack::unit(lines + unit * kLines * kLineBytes, span.zero[b], panel_[b] + unit * kColumns / 4 * kLineBytes);
      }
    }
    held_[b] = col;
    return panel_[b];
  }

 private:
  PairAhead ahead_;
  alignas(64) uint8_t panel_[2][kMaxCols / 4 * kLineBytes];
  int64_t held_[2] = {-1, -1};  // the column that a panel begins with
};

template <class Lines>
class IntegerTiles {
 public:
  explicit IntegerTiles(const IntegerProduct& p)
      : p_(p), shape_(p.weights.shape), rows_(p.rows), step_(step_columns(shape_)) {}

  void run() {
    const TileSession session(config_of(rows_, step_));
    for (int64_t block = 0; block < p_.weights.blocks; block += 2) {
      const int64_t left = p_.weights.blocks - block;
      run_blocks(block, left < 2 ? left : 2);
    }
  }

 private:
  static int64_t step_columns(const PackedShape& shape) {
    if (shape.activation_group() % kColumnUnit) return kColumnUnit / 2;
    return shape.activation_group() % 64 == 0 && shape.padded_cols() % 64 == 0 ? 64 : 32;
  }

  void run_blocks(int64_t block, int64_t blocks) {
    Block at[2] = {};
    for (int64_t b = 0; b < blocks; ++b) at[b] = block_at(shape_, p_.weights.data, block + b);
    Lines lines(shape_, at[0].lines);
    for (int64_t g = 0; g < shape_.activation_groups(); ++g) {
      Span span;
      span.group = g;
      span.col = g * shape_.activation_group();
      const int64_t left = shape_.padded_cols() - span.col;
      span.cols = shape_.activation_group() < left ? shape_.activation_group() : left;
      span.last = span.cols == left;
      for (int64_t b = 0; b < blocks; ++b) set_factors(at[b], static_cast<int>(b), span);
      for (int64_t tile = 0; tile < rows_.count; tile += 2) {
        with_blocking(rows_.count - tile, blocks,
                      [&]<int kR, int kB> { run_tile<kR, kB>(tile, block, at, span, lines); });
      }
    }
  }

  void set_factors(const Block& block, int b, Span& span) const {
    // Where weights have one scale a row (int4, or int8 too long for planes), the groups are the activations'.
    span.scale[b] = group_scales(shape_, block, span.group);
    span.least[b] = group_minima(shape_, block, span.group);
    span.zero[b] = block.zeros ? ints_of_bytes(block.zeros + span.group * kBlockRows)
                               : Ints{} + static_cast<int32_t>(shape_.format.default_zero());
    span.row_scales[b] = block.row_scales;
  }

  template <int kR, int kB>
  void run_tile(int64_t tile, int64_t block, const Block* blocks, const Span& span, Lines& lines) {
    zero_sums<kR, kB>();
    const int64_t end = span.col + span.cols;
    for (int64_t col = span.col, cols; col < end; col += cols) {
      cols = end - col < Lines::kMaxCols ? end - col : Lines::kMaxCols;
      TileRun a[kR], w[kB];
      for (int r = 0; r < kR; ++r) a[r] = {p_.a.values.row(rows_.start(tile + r)) + col, p_.a.values.ld, step_};
      for (int b = 0; b < kB; ++b) w[b] = {lines.at(blocks, b, span, col, cols), kLineBytes, step_ / 4 * kLineBytes};
      accumulate<typename Lines::Dot, kR, kB>(a, w, cols / step_);
    }
    for_each_sum<kR, kB>([&]<int kTile>(int r, int b) {
      int32_t* sums = sums_[kTile % 2];
      store_tile<kTile>(sums, kLineBytes);
      finish(tile + r, block + b, span, b, sums);
    });
  }

  // Adds a group's sums of a tile of rows, a block's 16 x 16, to their totals, which lie in the result until the last
  // group.
  void finish(int64_t tile, int64_t block, const Span& span, int b, const int32_t* sums) const {
    if (shape_.format.mins) {
      add_sums<true>(tile, block, span, b, sums, [own = span.scale[b]](const Floats& scale) { return own * scale; });
    } else if (shape_.format.group == 0) {
      add_sums<false>(tile, block, span, b, sums, [](const Floats& scale) { return scale; });
    } else {
      add_sums<false>(tile, block, span, b, sums, [own = span.scale[b]](const Floats& scale) { return own * scale; });
    }
  }

  template <bool kMinima, class Factor>
  void add_sums(int64_t tile, int64_t block, const Span& span, int b, const int32_t* sums, Factor factor) const {
    const int64_t skipped = rows_.repeated(tile), start = rows_.start(tile) + skipped;
    const int64_t ld_groups = p_.a.scales.ld, ldc = p_.c.ld;
    const float* a_scale = p_.a.scales.row(start) + span.group;
    const int32_t* a_sum = p_.a.sums.row(start) + span.group;
    float* total = p_.c.row(start) + block * kBlockRows;
    const Ints zero = span.zero[b];
    const Floats minus_least = -span.least[b];
    sums += skipped * kBlockRows;
    const auto add = [&](auto before, auto finished) {
#pragma GCC unroll 4
      for (int64_t left = rows_.height - skipped; left > 0; --left) {
        auto sum = load<Ints>(sums);
        if constexpr (Lines::kZeroInSums) sum -= zero * *a_sum;
        Floats value = fused(floats_of(sum), factor(broadcast(a_scale)), before());
        if constexpr (kMinima) value = fused(minus_least, Floats{} + *a_scale * static_cast<float>(*a_sum), value);
        store(finished(value), total);
        sums += kBlockRows;
        total += ldc;
        a_scale += ld_groups;
        a_sum += ld_groups;
      }
    };
    const auto none = [] { return Floats{}; };
    const auto there = [&] { return load<Floats>(total); };
    const auto as_is = [](const Floats& value) { return value; };
    const auto scaled = [own = load<Floats>(span.row_scales[b])](const Floats& value) { return value * own; };
    if (span.group == 0) {
      span.last ? add(none, scaled) : add(none, as_is);
    } else {
      span.last ? add(there, scaled) : add(there, as_is);
    }
  }

  const IntegerProduct& p_;
  const PackedShape& shape_;
  const RowTiles rows_;
  const int64_t step_;
  alignas(64) int32_t sums_[2][16 * kBlockRows];  // alternate: a store must not wait for the previous tile's loads
};

}  // namespace

void multiply_int8(const IntegerProduct& p) {
  if (p.rows == 0) return;
  if (has_planes(p.weights.shape)) return multiply_planes(p);
  if (p.rows <= few_rows(p.weights.shape)) return base::multiply_int8(p);
  const Format& format = p.weights.shape.format;
  switch (format.encoding) {
    case Encoding::kInt4:
      return IntegerTiles<SignedLines<UnpackNibbles<Encoding::kInt4>>>(p).run();
    case Encoding::kInt5:
      return IntegerTiles<SignedLines<UnpackNibbles<Encoding::kInt5>>>(p).run();
    case Encoding::kInt6:
      return IntegerTiles<SignedLines<UnpackNibbles<Encoding::kInt6>>>(p).run();
    case Encoding::kFp4:
      return IntegerTiles<SignedLines<UnpackNibbles<Encoding::kFp4>>>(p).run();
    case Encoding::kFp4By16:
      return IntegerTiles<SignedLines<UnpackNibbles<Encoding::kFp4By16>>>(p).run();
    case Encoding::kIq4:
      return IntegerTiles<SignedLines<UnpackNibbles<Encoding::kIq4>>>(p).run();
    default:
      break;
  }
  if (format.zero_points) return IntegerTiles<Int8Lines>(p).run();
  IntegerTiles<SignedLines<UnpackInt8>>(p).run();
}

// The codes of AVX-512 lie in the order of the columns, as A wants them.
QuantizedSize quantized_size(const PackedShape& shape) {
  return has_planes(shape) ? quantized_planes(shape) : base::quantized_size(shape);
}

void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  (has_planes(shape) ? quantize_planes : base::quantize)(shape, row, values, scales, sums);
}

}  // namespace kt::amx::inline KT_AMX_BUILD
