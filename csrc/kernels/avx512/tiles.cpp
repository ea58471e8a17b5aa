// AVX-512 with bf16 dot products. Register tile 12 x 32 (24 accumulators, two vectors of weights, one activation), or
// 6 x 64 and flatter when there are few rows. bf16 activations: one vdpbf16ps takes a pair of columns for 16 rows of
// weights, straight from a packed line. float32 activations: fma on widened weights, exact products.
#include <immintrin.h>

#include "base/cpu.h"
#include "kernels/avx2/transpose.h"
#include "kernels/generic/products.h"

namespace kt {
namespace {

struct Vec16 {
  using Reg = __m512;
  static constexpr int kLanes = 16, kMaxRows = 12, kMaxSums = 24, kPlainVectors = 2, kBlocksAtOnce = 2;

  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg load(const float* from) { return _mm512_loadu_ps(from); }
  static Reg load_partial(const float* from, int count) { return _mm512_maskz_loadu_ps(mask(count), from); }
  static void store(float* to, Reg value) { _mm512_storeu_ps(to, value); }
  static void store_partial(float* to, Reg value, int count) { _mm512_mask_storeu_ps(to, mask(count), value); }
  static Reg broadcast(float value) { return _mm512_set1_ps(value); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static Reg even(const uint16_t* line) { return _mm512_castsi512_ps(_mm512_slli_epi32(raw(line), 16)); }
  static Reg odd(const uint16_t* line) {
    return _mm512_castsi512_ps(_mm512_and_si512(raw(line), _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static __m512i raw(const uint16_t* line) { return _mm512_loadu_si512(line); }

 private:
  static __mmask16 mask(int count) { return static_cast<__mmask16>((1u << count) - 1u); }
};

template <int kRows, int kBlocks>
inline void dot_tile(const PackedProduct<uint16_t>& p, int64_t row, int64_t block) {
  __m512 sum[kRows][kBlocks];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int b = 0; b < kBlocks; ++b) sum[m][b] = _mm512_setzero_ps();
  }
  const uint16_t* a = p.a + row * p.lda;
  const uint16_t* weights = p.weights + block * p.pairs * kLine;
  for (int64_t pair = 0; pair < p.pairs; ++pair) {
    __m512bh w[kBlocks];
#pragma GCC unroll 16
    for (int b = 0; b < kBlocks; ++b) w[b] = (__m512bh)Vec16::raw(weights + (b * p.pairs + pair) * kLine);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      int two;
      __builtin_memcpy(&two, a + m * p.lda + 2 * pair, sizeof two);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 16
      for (int b = 0; b < kBlocks; ++b) sum[m][b] = _mm512_dpbf16_ps(sum[m][b], x, w[b]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int b = 0; b < kBlocks; ++b) _mm512_storeu_ps(p.c + (row + m) * p.ldc + (block + b) * kBlockRows, sum[m][b]);
  }
}

template <int kRows>
void dot_rows(const PackedProduct<uint16_t>& p, int64_t row, int64_t block, int64_t end_block) {
  constexpr int kBlocks = kRows <= 6 ? 4 : 2;
  for (; block + kBlocks <= end_block; block += kBlocks) dot_tile<kRows, kBlocks>(p, row, block);
  for (; block < end_block; ++block) dot_tile<kRows, 1>(p, row, block);
}

template <int kRows>
void dot_remainder(const PackedProduct<uint16_t>& p, int64_t row, int64_t block, int64_t end_block) {
  if constexpr (kRows > 0) {
    if (p.rows - row == kRows) return dot_rows<kRows>(p, row, block, end_block);
    dot_remainder<kRows - 1>(p, row, block, end_block);
  }
}

void multiply_bf16(const PackedProduct<uint16_t>& p) {
  constexpr int kMaxRows = Vec16::kMaxRows;
  const int64_t step = p.rows <= kMaxRows ? p.blocks : 2;
  for (int64_t block = 0; block < p.blocks; block += step) {
    const int64_t end_block = block + step < p.blocks ? block + step : p.blocks;
    int64_t row = 0;
    for (; row + kMaxRows <= p.rows; row += kMaxRows) dot_rows<kMaxRows>(p, row, block, end_block);
    dot_remainder<kMaxRows - 1>(p, row, block, end_block);
  }
}

}  // namespace

extern const Tiles kAvx512Tiles;
const Tiles kAvx512Tiles = {
    "avx512",
    kAvx2 | kFma | kF16c | kAvx512f | kAvx512bw | kAvx512vl | kAvx512dq | kAvx512bf16,
    multiply_packed<Vec16>,
    multiply_bf16,
    unpack_rows_avx2,
    multiply_plain<Vec16>,
};

}  // namespace kt
