// The kernels of this instruction set, by file. Contracts: kernels/tiles.h. All other kernels are AVX-512's.
//
// The same files compile twice: as `hardware` into the library, and with KT_AMX_MODEL as `model` into the C++ tests,
// where a software model replaces the tile registers, plain loops replace AVX-512, and the portable kernels replace the
// rest.
#pragma once

#include "kernels/tiles.h"
#if defined(KT_AMX_MODEL)
#include "kernels/portable/kernels.h"
#define KT_AMX_BUILD model
#else
#include "kernels/avx512/kernels.h"
#define KT_AMX_BUILD hardware
#endif

namespace kt::amx::inline KT_AMX_BUILD {

#if defined(KT_AMX_MODEL)
namespace base = kt::portable;
#else
namespace base = kt::avx512;
#endif

// float.cpp
void multiply_bf16(const PackedProduct<uint16_t>& p);

// integer.cpp: codes of activations row by row, one signed byte each
void multiply_int8(const IntegerProduct& p);
QuantizedSize quantized_size(const PackedShape& shape);
void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums);

// planes.cpp: the same three functions for int8 weights with one scale a row. Longer rows could overflow a sum of
// products of a signed and an unsigned byte.
constexpr bool has_planes(const PackedShape& shape) {
  return shape.format.encoding == Encoding::kInt8 && shape.format.group == 0 && shape.padded_cols() <= 65536;
}
void multiply_planes(const IntegerProduct& p);
QuantizedSize quantized_planes(const PackedShape& shape);
void quantize_planes(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums);

// transposed.cpp
void multiply_transposed_bf16(const TransposedProduct<uint16_t>& p);
void transpose_rows_bf16(Rows<const float> in, int64_t rows, int64_t cols, uint16_t* out, int64_t ld);

}  // namespace kt::amx::inline KT_AMX_BUILD
