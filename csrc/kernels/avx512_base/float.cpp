// AVX-512 without a bf16 dot product (Skylake-X, Cascade Lake, Ice Lake): float32 activations (bf16 ones are widened
// before), weights decoded to float32. Register tile 12 x 32. Layout: kernels/layout.h.
#include "kernels/avx2/vector.h"
#include "kernels/avx512/products/float_tile.h"
#include "kernels/avx512_base/kernels.h"

namespace kt {

void avx512_base::multiply(const PackedProduct<float>& p) { multiply_any<FloatTile, Vec8>(p); }

}  // namespace kt
