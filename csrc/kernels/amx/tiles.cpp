#include "base/cpu.h"
#include "kernels/amx/kernels.h"

namespace kt {

#if defined(KT_AMX_MODEL)
#define KT_AMX_TILES kAmxModelTiles
#define KT_AMX_NAME "amx-model"
#define KT_AMX_REQUIRED 0
#else
#define KT_AMX_TILES kAmxTiles
#define KT_AMX_NAME "amx"
#define KT_AMX_REQUIRED                                                                                            \
  (kAvx2 | kFma | kF16c | kAvx512f | kAvx512bw | kAvx512vl | kAvx512dq | kAvx512bf16 | kAvx512vnni | kAvx512vbmi | \
   kAmxTile | kAmxBf16 | kAmxInt8)
#endif

extern const Tiles KT_AMX_TILES;
const Tiles KT_AMX_TILES = {
    .name = KT_AMX_NAME,
    .required = KT_AMX_REQUIRED,
    .multiply = amx::base::multiply,
    .multiply_bf16 = amx::multiply_bf16,
    .multiply_int8 = amx::multiply_int8,
    .multiply_transposed = amx::base::multiply_transposed,
    .multiply_transposed_bf16 = amx::multiply_transposed_bf16,
    .product = amx::base::product,
    .row_product = amx::base::row_product,
    .quantized_size = amx::quantized_size,
    .quantize = amx::quantize,
    .transpose_rows = amx::base::transpose_rows,
    .transpose_rows_bf16 = amx::transpose_rows_bf16,
    .widen = amx::base::widen,
    .narrow = amx::base::narrow,
    .swiglu = amx::base::swiglu,
    .swiglu_backward = amx::base::swiglu_backward,
    .add_scaled = amx::base::add_scaled,
};

}  // namespace kt
