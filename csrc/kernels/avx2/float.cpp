// AVX2 + FMA, float32 activations (bf16 ones are widened before). Register tile 6 x 16: 12 accumulators, two vectors of
// weights, one activation. Many rows: weights are unpacked once to float32 panels of 16 x 256 (16 KiB, L1
// cache); per column 12 fma, 6 broadcasts, 2 loads: two fma a cycle, 0.85 of that with unpacking and cold weights for
// 40 rows. Few rows: decoded in registers, up to 4 blocks at once; bound by memory up to 4 rows of bf16 and one of fp8
// or int8, above by decoding. Layout: kernels/layout.h.
#include "kernels/avx2/kernels.h"
#include "kernels/avx2/vector.h"
#include "kernels/generic/float_products.h"

namespace kt {
namespace {

struct FloatTile : Vec8 {
  using Element = float;
  using Unpacked = FloatLines<FloatTile>;
  static constexpr int kDepth = 1, kTileRows = 6, kFewRows = 6, kDecodeRows = 4, kSums = 12, kDecodeSums = 8;
  static constexpr int64_t kPanelBlocks = 1, kPanelColumns = 256, kAheadBytes = 4096;

  // Left to itself the compiler takes forms of fma that overwrite a or b, and then moves and spills accumulators.
  static Reg dot(Reg a, Reg b, Reg sum) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
  }
};

}  // namespace

void avx2::multiply(const PackedProduct<float>& p) { multiply_any<FloatTile>(p); }

}  // namespace kt
