// The same with VNNI, where a processor has it but no bf16 dot product (Cascade Lake, Ice Lake).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own header starts undefined vectors with themselves
#endif
#include "kernels/avx512/products/integer_few.h"
#include "kernels/avx512_base/kernels.h"

namespace kt::avx512_base {

QuantizedSize quantized_size_vnni(const PackedShape& shape) { return size_in_bytes(shape); }

void quantize_vnni(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  quantize_to_bytes(shape, row, values, scales, sums);
}

void multiply_int8_vnni(const IntegerProduct& p) { multiply_integer<IntegerTiles<DotVnni>>(p); }

}  // namespace kt::avx512_base
