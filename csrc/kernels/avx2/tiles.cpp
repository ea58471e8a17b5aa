#include "base/cpu.h"
#include "kernels/attention.h"
#include "kernels/avx2/kernels.h"
#include "kernels/dense.h"

namespace kt {

extern const Tiles kAvx2Tiles;
const Tiles kAvx2Tiles = {
    .name = "avx2",
    .required = kAvx2 | kFma | kF16c,
    .dense = &avx2::kDense,
    .attention = &avx2::kAttention,
    .multiply = avx2::multiply,
    .multiply_bf16 = nullptr,
    .multiply_int8 = avx2::multiply_int8,
    .multiply_transposed = avx2::multiply_transposed,
    .multiply_transposed_bf16 = nullptr,
    .unpack = avx2::unpack,
    .product = avx2::product,
    .row_product = avx2::row_product,
    .pair_product = nullptr,
    .quantized_size = avx2::quantized_size,
    .quantize = avx2::quantize,
    .transpose_rows = avx2::transpose_rows,
    .transpose_rows_bf16 = nullptr,
    .widen = avx2::widen,
    .narrow = avx2::narrow,
    .activate = avx2::activate,
    .activate_backward = avx2::activate_backward,
    .add_scaled = avx2::add_scaled,
    .sigmoid = avx2::sigmoid,
    .exponential = avx2::exponential,
};

}  // namespace kt
