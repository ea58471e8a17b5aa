#include "base/cpu.h"
#include "kernels/attention.h"
#include "kernels/dense.h"
#include "kernels/portable/kernels.h"

namespace kt {

extern const Tiles kPortableTiles;
const Tiles kPortableTiles = {
    .name = "portable",
    .required = 0,
    .dense = &portable::kDense,
    .attention = &portable::kAttention,
    .multiply = portable::multiply,
    .multiply_bf16 = nullptr,
    .multiply_int8 = portable::multiply_int8,
    .multiply_transposed = portable::multiply_transposed,
    .multiply_transposed_bf16 = nullptr,
    .unpack = portable::unpack,
    .product = portable::product,
    .row_product = portable::row_product,
    .pair_product = nullptr,
    .quantized_size = portable::quantized_size,
    .quantize = portable::quantize,
    .transpose_rows = portable::transpose_rows,
    .transpose_rows_bf16 = nullptr,
    .widen = portable::widen,
    .narrow = portable::narrow,
    .activate = portable::activate,
    .activate_backward = portable::activate_backward,
    .add_scaled = portable::add_scaled,
    .sigmoid = portable::sigmoid,
    .exponential = portable::exponential,
};

}  // namespace kt
