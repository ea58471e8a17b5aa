// Integer products with AVX-512 without VNNI: vpmaddubsw and vpmaddwd, with the same exact sums. Register tiles:
// avx512/products.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own header starts undefined vectors with themselves
#endif
#include "kernels/avx512/products/integer_few.h"
#include "kernels/avx512_base/kernels.h"

namespace kt::avx512_base {
namespace {

constexpr int64_t code_bytes(const PackedShape& shape) { return takes_lines(shape.format.encoding) ? 2 : 1; }

// As 16 bits, of each four columns 0, 2, 1, 3 (DotMadd).
void store_even_odd(const int8_t* codes, uint8_t* to) {
  constexpr int kOrder = _MM_SHUFFLE(3, 1, 2, 0);
  const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  _mm512_storeu_si512(to, _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(words, kOrder), kOrder));
}

}  // namespace

QuantizedSize quantized_size(const PackedShape& shape) { return grouped_size(shape, code_bytes(shape)); }

void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  const int64_t unit_bytes = kQuantizeUnit * code_bytes(shape);
  quantize_row(shape, row, scales, sums, [&](int64_t unit, const int8_t* codes) {
    uint8_t* to = values + unit * unit_bytes;
    if (unit_bytes > kQuantizeUnit) return store_even_odd(codes, to);
    std::memcpy(to, codes, kQuantizeUnit);
  });
}

void multiply_int8(const IntegerProduct& p) { multiply_integer<IntegerTiles<DotMadd>>(p); }

}  // namespace kt::avx512_base
