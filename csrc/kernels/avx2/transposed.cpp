// Transposed products with AVX2: tile of 6 tokens x 16 columns (12 accumulators, 2 vectors of weights, 1 broadcast),
// 3 x 32 for few tokens. 12 fma from 8 loads: two fma a cycle. Unpacking takes 24 shuffles for 64 weights.
#include "kernels/generic/transposed.h"

#include "kernels/avx2/kernels.h"
#include "kernels/avx2/transpose.h"
#include "kernels/avx2/vector.h"
#include "kernels/generic/unpack.h"

namespace kt::avx2 {
namespace {

struct FloatOp {
  using In = float;
  using V = Vec8;
  static constexpr int kTileRows = 6;
  static constexpr int64_t kUnits = kBlockRows;
  static void unpack(const Parts& parts, const uint8_t* block, ColumnRange columns, float* panel) {
    unpack_rows<Vec8>(parts, block, columns, {panel, kPanelCols});
  }
};

}  // namespace

void multiply_transposed(const TransposedProduct<float>& p) { TransposedLoop<FloatOp>(p).run(); }

void transpose_rows(Rows<const float> in, int64_t rows, int64_t cols, float* out, int64_t ld) {
  transpose_floats(in, rows, cols, out, ld);
}

}  // namespace kt::avx2
