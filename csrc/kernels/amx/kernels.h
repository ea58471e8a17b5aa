// The kernels of this instruction set, by file. Contracts: kernels/tiles.h. All other kernels are AVX-512's.
//
// The same files compile twice: with hardware/amx_primitives.h into the library, and with a model of the tile registers
// into the C++ tests.
#pragma once

#include "amx_primitives.h"
#include "kernels/attention.h"
#include "kernels/tiles.h"

namespace kt::amx::inline KT_AMX_BUILD {

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

// rows/attention.cpp
extern const Attention kAttention;

// rows/row_major.cpp
extern const Dense kDense;
void pair_product(const PairProduct& p);

// transposed.cpp
void multiply_transposed_bf16(const TransposedProduct<uint16_t>& p);

}  // namespace kt::amx::inline KT_AMX_BUILD
