// int8 activations times int8 and int4 weights: TDPBSUD, TDPBSSD.
//
// Step: A = up to 16 rows x 64 columns of activations' codes as they lie (32 where a group is not a multiple of 64), B
// = 16 packed lines (64 columns x 16 rows of weights; 8 lines), C = rows x 16 int32 sums of one group. Blocking as in
// float.cpp.
//
// int8: B is loaded from the packed lines, unsigned, and the zero point leaves the sum after the product:
// sum - zero * (sum of the activations' codes). int4: up to 1024 columns of a group are unpacked to signed codes minus
// zero on the stack (2 blocks x 16 KiB), which all rows then use. Either way the integer of a group is exact, and then,
// as in the other instruction sets: total = fma(sum, group scale * activation scale, total), result = total * row
// scale.
//
// A group ends with a store of C and about 6 vector instructions a row and block: with groups of 32 these take longer
// than the products (48 cycles for 16).
#include "kernels/amx/tile_registers.h"
#include "kernels/amx/vectors.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

// Up to these rows AVX-512's kernels are faster, as a group's end costs them less, and give the same bits. The model
// stands beside the portable ones, which round products.
#if defined(KT_AMX_MODEL)
constexpr int64_t few_rows(const PackedShape&) { return 0; }
#else
constexpr int64_t few_rows(const PackedShape& shape) { return shape.activation_group() < 64 ? 16 : 6; }
#endif

// A group of columns in two blocks.
struct Span {
  int64_t group, col, cols;
  bool last;
  Floats scale[2];
  Ints zero[2];
  const float* row_scales[2];
};

// The packed lines as they are.
class Int8Lines {
 public:
  using Dot = DotS8U8;
  static constexpr int64_t kPerLine = 4, kMaxCols = INT64_MAX;
  static constexpr bool kZeroInSums = true, kInPlace = true;

  const uint8_t* at(const Block* blocks, int b, const Span&, int64_t col, int64_t) {
    return blocks[b].lines + col / kPerLine * kLineBytes;
  }
};

// Two int8 lines for each packed one, the zero subtracted: -15..15.
class Int4Lines {
 public:
  using Dot = DotS8S8;
  static constexpr int64_t kPerLine = 8, kMaxCols = 1024;
  static constexpr bool kZeroInSums = false, kInPlace = false;

  const uint8_t* at(const Block* blocks, int b, const Span& span, int64_t col, int64_t cols) {
    if (held_[b] != col) unpack(blocks[b].lines + col / kPerLine * kLineBytes, span.zero[b], cols, panel_[b]);
    held_[b] = col;
    return panel_[b];
  }

 private:
  static void unpack(const uint8_t* lines, const Ints& zeros, int64_t cols, uint8_t* out) {
    const auto zero = (Bytes)(zeros * 0x01010101);  // four times each
    for (int64_t line = 0; line < cols / kPerLine; ++line) {
      const auto codes = load<Bytes>(lines + line * kLineBytes);
      __builtin_prefetch(lines + line * kLineBytes + kStreamAhead);
      store((codes & 15) - zero, out + 2 * line * kLineBytes);
      store((codes >> 4) - zero, out + (2 * line + 1) * kLineBytes);
    }
  }

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
    return shape.activation_group() % 64 == 0 && shape.padded_cols() % 64 == 0 ? 64 : 32;
  }

  void run_blocks(int64_t block, int64_t blocks) {
    Lines lines;
    Block at[2] = {};
    for (int64_t b = 0; b < blocks; ++b) at[b] = block_at(shape_, p_.weights.data, block + b);
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
    // Where weights have one scale a row, the groups are the activations'.
    const auto* halves = static_cast<const uint16_t*>(block.group_scales);
    span.scale[b] = halves ? floats_of_halves(halves + span.group * kBlockRows) : Floats{} + 1.0f;
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
      for (int r = 0; r < kR; ++r) a[r] = {p_.a.values + rows_.start(tile + r) * p_.a.ld + col, p_.a.ld, step_};
      for (int b = 0; b < kB; ++b) w[b] = {lines.at(blocks, b, span, col, cols), kLineBytes, step_ / 4 * kLineBytes};
      accumulate<typename Lines::Dot, kR, kB>(a, w, cols / step_);
    }
    alignas(64) int32_t sums[4][16 * kBlockRows];
    for_each_sum<kR, kB>([&]<int kTile>(int, int) { store_tile<kTile>(sums[kTile], kLineBytes); });
    for (int r = 0; r < kR; ++r) finish<kB>(tile + r, block, span, sums[2 * r]);
  }

  // Adds a group's sums of a tile of rows, kB blocks of 16 x 16, to their totals, which lie in the result until the
  // last group.
  template <int kB>
  void finish(int64_t tile, int64_t block, const Span& span, const int32_t* sums) const {
    const int64_t start = rows_.start(tile), end = rows_.height, ld_groups = p_.a.ld_groups, ldc = p_.ldc;
    const float* a_scales = p_.a.scales + start * ld_groups + span.group;
    const int32_t* a_sums = p_.a.sums + start * ld_groups + span.group;
    float* c = p_.c + start * ldc + block * kBlockRows;
    Floats scale[kB], row_scale[kB];
    Ints zero[kB];
    for (int b = 0; b < kB; ++b) {
      scale[b] = span.scale[b];
      zero[b] = span.zero[b];
      row_scale[b] = span.last ? load<Floats>(span.row_scales[b]) : Floats{} + 1.0f;
    }
    const bool first = span.group == 0;
    for (int64_t i = rows_.repeated(tile); i < end; ++i) {
      for (int b = 0; b < kB; ++b) {
        auto sum = load<Ints>(sums + (b * 16 + i) * kBlockRows);
        if (Lines::kZeroInSums) sum -= zero[b] * a_sums[i * ld_groups];
        float* total = c + i * ldc + b * kBlockRows;
        const Floats before = first ? Floats{} : load<Floats>(total);
        store(fused(floats_of(sum), scale[b] * a_scales[i * ld_groups], before) * row_scale[b], total);
      }
    }
  }

  const IntegerProduct& p_;
  const PackedShape& shape_;
  const RowTiles rows_;
  const int64_t step_;
};

}  // namespace

void multiply_int8(const IntegerProduct& p) {
  if (p.rows == 0) return;
  if (p.rows <= few_rows(p.weights.shape)) return base::multiply_int8(p);
  if (p.weights.shape.format.encoding == Encoding::kInt4) {
    IntegerTiles<Int4Lines>(p).run();
  } else {
    IntegerTiles<Int8Lines>(p).run();
  }
}

// The codes of AVX-512 lie in the order of the columns, as A wants them.
int64_t quantized_bytes(const PackedShape& shape) { return base::quantized_bytes(shape); }
void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  base::quantize(shape, row, values, scales, sums);
}

}  // namespace kt::amx::inline KT_AMX_BUILD
