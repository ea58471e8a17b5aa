// Integer products with AVX-512 VNNI. Register tiles: products/integer_tile.h, integer_few.h.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own header starts undefined vectors with themselves
#endif
#include "kernels/avx512/kernels.h"
#include "kernels/avx512/products/integer_few.h"

namespace kt::avx512 {

QuantizedSize quantized_size(const PackedShape& shape) { return size_in_bytes(shape); }

void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  quantize_to_bytes(shape, row, values, scales, sums);
}

void multiply_int8(const IntegerProduct& p) { multiply_integer<IntegerTiles<DotVnniVbmi>>(p); }

}  // namespace kt::avx512
