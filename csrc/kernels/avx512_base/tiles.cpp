// Two instruction sets that differ in their integer products alone: with VNNI (Cascade Lake, Ice Lake) and without
// (Skylake-X). Both give the same bits.
#include "base/cpu.h"
#include "kernels/attention.h"
#include "kernels/avx512_base/kernels.h"
#include "kernels/dense.h"

namespace kt {
namespace {

constexpr uint32_t kBase = kAvx2 | kFma | kF16c | kAvx512f | kAvx512bw | kAvx512vl | kAvx512dq;

constexpr Tiles with_vnni(bool vnni) {
  return {
      .name = vnni ? "avx512_vnni" : "avx512_base",
      .required = vnni ? kBase | kAvx512vnni : kBase,
      .dense = &avx512_base::kDense,
      .attention = &avx512_base::kAttention,
      .multiply = avx512_base::multiply,
      .multiply_bf16 = nullptr,
      .multiply_int8 = vnni ? avx512_base::multiply_int8_vnni : avx512_base::multiply_int8,
      .multiply_transposed = avx512_base::multiply_transposed,
      .multiply_transposed_bf16 = nullptr,
      .unpack = avx512_base::unpack,
      .product = avx512_base::product,
      .row_product = avx512_base::row_product,
      .pair_product = nullptr,
      .quantized_size = vnni ? avx512_base::quantized_size_vnni : avx512_base::quantized_size,
      .quantize = vnni ? avx512_base::quantize_vnni : avx512_base::quantize,
      .transpose_rows = avx512_base::transpose_rows,
      .transpose_rows_bf16 = nullptr,
      .widen = avx512_base::widen,
      .narrow = avx512_base::narrow,
      .activate = avx512_base::activate,
      .activate_backward = avx512_base::activate_backward,
      .add_scaled = avx512_base::add_scaled,
      .sigmoid = avx512_base::sigmoid,
      .exponential = avx512_base::exponential,
  };
}

}  // namespace

extern const Tiles kAvx512BaseTiles;
const Tiles kAvx512BaseTiles = with_vnni(false);
extern const Tiles kAvx512VnniTiles;
const Tiles kAvx512VnniTiles = with_vnni(true);

}  // namespace kt
