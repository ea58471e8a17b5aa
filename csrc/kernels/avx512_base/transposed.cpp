// Transposed products with AVX-512 in float32: tile of 12 tokens x 32 columns (24 accumulators, 2 vectors of weights, 1
// broadcast), 6 x 64 for few tokens. 24 fma from 14 loads. Unpacked as with AVX2.
#include "kernels/generic/transposed.h"

#include "kernels/avx2/transpose.h"
#include "kernels/avx512/vector.h"
#include "kernels/avx512_base/kernels.h"
#include "kernels/generic/unpack.h"

namespace kt::avx512_base {
namespace {

struct FloatOp {
  using In = float;
  using V = Vec16;
  static constexpr int kTileRows = 12;
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

}  // namespace kt::avx512_base
