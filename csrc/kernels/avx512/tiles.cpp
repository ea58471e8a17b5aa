#include "base/cpu.h"
#include "kernels/attention.h"
#include "kernels/avx512/kernels.h"
#include "kernels/dense.h"

namespace kt {

extern const Tiles kAvx512Tiles;
const Tiles kAvx512Tiles = {
    .name = "avx512",
    .required =
        kAvx2 | kFma | kF16c | kAvx512f | kAvx512bw | kAvx512vl | kAvx512dq | kAvx512bf16 | kAvx512vnni | kAvx512vbmi,
    .dense = &avx512::kDense,
    .attention = &avx512::kAttention,
    .multiply = avx512::multiply,
    .multiply_bf16 = avx512::multiply_bf16,
    .multiply_int8 = avx512::multiply_int8,
    .multiply_transposed = avx512::multiply_transposed,
    .multiply_transposed_bf16 = avx512::multiply_transposed_bf16,
    .unpack = avx512::unpack,
    .product = avx512::product,
    .row_product = avx512::row_product,
    .pair_product = avx512::pair_product,
    .quantized_size = avx512::quantized_size,
    .quantize = avx512::quantize,
    .transpose_rows = avx512::transpose_rows,
    .transpose_rows_bf16 = avx512::transpose_rows_bf16,
    .widen = avx512::widen,
    .narrow = avx512::narrow,
    .activate = avx512::activate,
    .activate_backward = avx512::activate_backward,
    .add_scaled = avx512::add_scaled,
    .sigmoid = avx512::sigmoid,
    .exponential = avx512::exponential,
};

}  // namespace kt
