// The kernels of this instruction set, by file. Contracts: kernels/tiles.h. All else is AVX-512's.
//
// The same files compile twice: as `hardware` into the library, and with KT_AMX_MODEL as `model` into the C++ tests,
// where a software model stands for the tile registers, plain loops for AVX-512, and the portable kernels for the rest.
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
int64_t quantized_bytes(const PackedShape& shape);
void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums);

// transposed.cpp
void multiply_transposed_bf16(const TransposedProduct<uint16_t>& p);
void transpose_rows_bf16(const float* in, int64_t ld, int64_t rows, int64_t cols, uint16_t* out, int64_t ld_out);

}  // namespace kt::amx::inline KT_AMX_BUILD
