// int8 weights with one scale a row: activations as two planes of int8, TDPBSUD.
//
// With one scale for a whole row of weights, a row of activations needs no groups of columns either: the code of an
// element is 128 * high + low in -16256..16256, so that rounding adds 2^-15 of the row's largest magnitude. There are
// twice as many products as with one int8 a column, but sums end once a row, not every 32 columns. Tiles take the
// weights in their packed, unsigned form; the zero is subtracted at the end: sum - 128 * (sum of the plane's codes).
//
// A row is stored as its high plane, then its low plane, half a row stride apart: the tiles see two rows.
#include "kernels/amx/dense.h"
#include "kernels/generic/quantize.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

constexpr float kLargestCode = 127 * 128;

struct PlaneRows {
  using Dot = DotS8U8;
  using Sum = int32_t;

  explicit PlaneRows(const IntegerProduct& p)
      : product(p), tiles(p.rows, 2), step_bytes(p.weights.shape.padded_cols() % 64 == 0 ? 64 : 32) {}

  TileRun a(int64_t tile, int64_t byte) const {
    const int64_t ld = product.a.values.ld / 2;
    return {product.a.values.data + tiles.start(tile) * ld + byte, ld, step_bytes};
  }

  template <int kTile>
  void finish(int64_t tile, int64_t block, int32_t* scratch) const {
    store_tile<kTile>(scratch, kLineBytes);
    const auto& [rows, in, weights, c] = product;
    const auto row_scale = load<Floats>(block_at(weights.shape, weights.data, block).row_scales);
    for (int64_t i = tiles.repeated(tile); i < tiles.height; i += 2) {
      const int64_t row = (tiles.start(tile) + i) / 2;
      const float* scale = in.scales.row(row) + 1;
      const int32_t* codes_sum = in.sums.row(row);
      const Floats high = floats_of(load<Ints>(scratch + i * kBlockRows) - 128 * codes_sum[0]);
      const Floats low = floats_of(load<Ints>(scratch + (i + 1) * kBlockRows) - 128 * codes_sum[1]);
      const Floats codes = fused(high, Floats{} + 128.0f, low);
      store(codes * broadcast(scale) * row_scale, c.row(row) + block * kBlockRows);
    }
  }

  const IntegerProduct& product;
  const RowTiles tiles;
  const int64_t step_bytes;
};

// 32 codes to both planes, their sums added to sums.
inline void split_codes(const float* x, float factor, uint8_t* high, uint8_t* low, int32_t* sums) {
  for (int64_t i = 0; i < kQuantizeUnit; ++i) {
    const auto code = static_cast<int16_t>(rounded(x[i] * factor));
    const int32_t digit = ((code + 64) & 127) - 64;
    const auto rest = static_cast<int8_t>((code - digit) >> 7);
    high[i] = static_cast<uint8_t>(rest);
    low[i] = static_cast<uint8_t>(digit);
    sums[0] += rest;
    sums[1] += digit;
  }
}

}  // namespace

void multiply_planes(const IntegerProduct& p) { multiply_dense(PlaneRows(p), p.weights); }

QuantizedSize quantized_planes(const PackedShape& shape) { return {2 * grouped_size(shape, 1).row_bytes, 2}; }

void quantize_planes(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  const float largest = largest_magnitude(row, shape.cols);
  const bool zero = largest < 1e-33f;  // so that the scales are normal numbers
  const float factor = zero ? 0.0f : kLargestCode / largest;
  scales[1] = zero ? 0.0f : largest / kLargestCode;
  scales[0] = 128 * scales[1];
  uint8_t* low = values + grouped_size(shape, 1).row_bytes;
  int32_t total[2] = {};
  for_each_unit(shape, row, 0, shape.padded_cols(),
                [&](int64_t col, const float* from) { split_codes(from, factor, values + col, low + col, total); });
  sums[0] = total[0];
  sums[1] = total[1];
}

}  // namespace kt::amx::inline KT_AMX_BUILD
