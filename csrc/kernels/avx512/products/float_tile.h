// The register tile of float32 products with AVX-512: 12 x 32, 24 accumulators, two vectors of weights, one activation.
#pragma once

#include "kernels/avx512/vector.h"
#include "kernels/generic/float_products.h"

namespace kt {
namespace {

struct FloatTile : Vec16 {
  using Element = float;
  using Unpacked = FloatLines<FloatTile>;
  static constexpr int kDepth = 1, kTileRows = 12, kFewRows = 6, kDecodeRows = 6, kSums = 24, kDecodeSums = 12;
  static constexpr int64_t kPanelBlocks = 2, kPanelColumns = 128, kAheadBytes = 4096;

  static Reg dot(Reg a, Reg b, Reg sum) { return fma(a, b, sum); }
};

}  // namespace
}  // namespace kt
