// The kernels of this instruction set, by file. Contracts: kernels/tiles.h.
#pragma once

#include "kernels/tiles.h"

namespace kt::avx512_base {

// float.cpp
void multiply(const PackedProduct<float>& p);

// integer.cpp, integer_vnni.cpp
void multiply_int8(const IntegerProduct& p);
QuantizedSize quantized_size(const PackedShape& shape);
void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums);
void multiply_int8_vnni(const IntegerProduct& p);
QuantizedSize quantized_size_vnni(const PackedShape& shape);
void quantize_vnni(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums);

// transposed.cpp
void multiply_transposed(const TransposedProduct<float>& p);
void transpose_rows(Rows<const float> in, int64_t rows, int64_t cols, float* out, int64_t ld);

// unpack.cpp
void unpack(const UnpackedRows& u);

// rows.cpp
void product(const PlainProduct& p);
void row_product(const RowProduct& p);
void widen(const uint16_t* from, int64_t count, float* to);
void narrow(const float* from, int64_t count, uint16_t* to);
void activate(const Activation& activation, const float* gate, const float* up, int64_t count, float* h);
double activate_backward(const Activation& activation, float* gate, float* up, const float* dh, float weight,
                         int64_t count);
void add_scaled(const float* from, float factor, int64_t count, float* to);
void sigmoid(const float* from, int64_t count, float* to);
void exponential(const float* from, float largest, int64_t count, float* to);

}  // namespace kt::avx512_base
