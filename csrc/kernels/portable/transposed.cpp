// Transposed products in vectors of four floats: tile of 4 tokens x 8 columns. The reference for the others.
#include "kernels/generic/transposed.h"

#include "kernels/generic/unpack.h"
#include "kernels/portable/kernels.h"
#include "kernels/portable/vector.h"

namespace kt::portable {
namespace {

struct FloatOp {
  using In = float;
  using V = Vec4;
  static constexpr int kTileRows = 4;
  static constexpr int64_t kUnits = kBlockRows;
  static void unpack(const Parts& parts, const uint8_t* block, ColumnRange columns, float* panel) {
    unpack_rows<Vec4>(parts, block, columns, {panel, kPanelCols});
  }
};

}  // namespace

void multiply_transposed(const TransposedProduct<float>& p) { TransposedLoop<FloatOp>(p).run(); }

void transpose_rows(Rows<const float> in, int64_t rows, int64_t cols, float* out, int64_t ld) {
  const int64_t padded_rows = round_up(rows, kTokenUnit), padded_cols = round_up(cols, kBlockRows);
  for (int64_t n = 0; n < padded_cols; ++n) {
    for (int64_t m = 0; m < padded_rows; ++m) out[n * ld + m] = n < cols && m < rows ? in.row(m)[n] : 0.0f;
  }
}

}  // namespace kt::portable
