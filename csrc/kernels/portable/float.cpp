// Plain C++ for any processor; also the reference that the other kernels are compared with.
// Register tile 2 x 16 in compiler vectors of four floats (SSE2 on x86-64, NEON on Arm): 8 accumulators, 4 vectors of
// weights, 1 activation. Multiply and add round separately. Layout: kernels/layout.h.
#include "kernels/generic/float_products.h"
#include "kernels/portable/kernels.h"
#include "kernels/portable/vector.h"

namespace kt {
namespace {

struct FloatTile : Vec4 {
  using Element = float;
  using Unpacked = FloatLines<FloatTile>;
  static constexpr int kDepth = 1, kTileRows = 2, kFewRows = 2, kDecodeRows = 2, kSums = 8, kDecodeSums = 8;
  static constexpr int64_t kPanelBlocks = 1, kPanelColumns = 256, kAheadBytes = 2048;

  static Reg dot(Reg a, Reg b, Reg sum) { return fma(a, b, sum); }
};

}  // namespace

void portable::multiply(const PackedProduct<float>& p) { multiply_any<FloatTile>(p); }

}  // namespace kt
