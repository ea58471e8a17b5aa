#include "kernels/amx/kernels.h"
#include "kernels/attention.h"
#include "kernels/dense.h"

namespace kt::amx::inline KT_AMX_BUILD {

extern const Tiles kTiles;
const Tiles kTiles = {
    .name = kName,
    .required = kRequired,
    .dense = &kDense,
    .attention = &kAttention,
    .multiply = base::multiply,
    .multiply_bf16 = multiply_bf16,
    .multiply_int8 = multiply_int8,
    .multiply_transposed = base::multiply_transposed,
    .multiply_transposed_bf16 = multiply_transposed_bf16,
    .unpack = base::unpack,
    .product = base::product,
    .row_product = base::row_product,
    .pair_product = pair_product,
    .quantized_size = quantized_size,
    .quantize = quantize,
    .transpose_rows = base::transpose_rows,
    .transpose_rows_bf16 = base::transpose_rows_bf16,
    .widen = base::widen,
    .narrow = base::narrow,
    .activate = base::activate,
    .activate_backward = base::activate_backward,
    .add_scaled = base::add_scaled,
    .sigmoid = base::sigmoid,
    .exponential = base::exponential,
};

}  // namespace kt::amx::inline KT_AMX_BUILD
