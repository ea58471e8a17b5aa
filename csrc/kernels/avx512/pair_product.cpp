// Products of bf16 matrices as they lie, summed over the rows of the second one, with vdpbf16ps on pairs of its rows.
//
// Register tile 8 x 3: 24 sums, three operands of b, one broadcast pair of a. Per pair 24 vdpbf16ps and 11 loads. A
// panel holds 48 columns of b with the rows of a pair interleaved, in the L1 cache; all rows of a read it:
//
//   line p, v, i: b[2 p, 16 v + i], b[2 p + 1, 16 v + i], zeros beyond the last row and column
#include <immintrin.h>

#include <cstring>

#include "kernels/avx512/kernels.h"

namespace kt {
namespace {

constexpr int kRows = 8, kLanes = 16;
constexpr int64_t kVectors = kPairCols / kLanes, kPairs = kPairInner / 2;

struct Panel {
  alignas(64) uint32_t line[kPairs][kVectors][kLanes];
};

__m512i wide(__m256i sixteen) { return _mm512_maskz_cvtepu16_epi32(0xffff, sixteen); }

void pack(const PairProduct& p, Panel& panel) {
  for (int64_t n = 0; n < p.inner; n += 2) {
    for (int64_t col = 0; col < p.cols; col += kLanes) {
      const int64_t rest = p.cols - col;
      const auto mask = static_cast<__mmask16>(rest < kLanes ? (1u << rest) - 1u : 0xffffu);
      const __m512i low = wide(_mm256_maskz_loadu_epi16(mask, p.b.row(n) + col));
      const __m512i high =
          n + 1 < p.inner ? wide(_mm256_maskz_loadu_epi16(mask, p.b.row(n + 1) + col)) : _mm512_setzero_si512();
      _mm512_store_si512(panel.line[n / 2][col / kLanes],
                         _mm512_or_si512(low, _mm512_maskz_slli_epi32(0xffff, high, 16)));
    }
  }
}

// Elements `2 pair` and `2 pair + 1` of a row of a, in every lane.
__m512bh pair_of(const uint16_t* row, int64_t pair) {
  int both;
  std::memcpy(&both, row + 2 * pair, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

template <int kTileRows, int kTileVectors>
void tile(const PairProduct& p, const Panel& panel, int64_t row) {
  const uint16_t* a[kTileRows];
  __m512 sum[kTileRows][kTileVectors];
  const int64_t rest = p.cols - (kTileVectors - 1) * kLanes;
  const auto mask = static_cast<__mmask16>(rest < kLanes ? (1u << rest) - 1u : 0xffffu);
  const auto mask_of = [mask](int v) { return v + 1 < kTileVectors ? static_cast<__mmask16>(0xffff) : mask; };
#pragma GCC unroll 8
  for (int m = 0; m < kTileRows; ++m) {
    a[m] = p.a.row(row + m);
#pragma GCC unroll 3
    for (int v = 0; v < kTileVectors; ++v)
      sum[m][v] = p.accumulate ? _mm512_maskz_loadu_ps(mask_of(v), p.c.row(row + m) + v * kLanes) : _mm512_setzero_ps();
  }
  const auto add = [&](const uint32_t (*line)[kLanes], const auto& left) __attribute__((always_inline)) {
    __m512bh b[kTileVectors];
#pragma GCC unroll 3
    for (int v = 0; v < kTileVectors; ++v) b[v] = (__m512bh)_mm512_load_si512(line[v]);
#pragma GCC unroll 8
    for (int m = 0; m < kTileRows; ++m) {
      const __m512bh x = left(m);
#pragma GCC unroll 3
      for (int v = 0; v < kTileVectors; ++v) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], x, b[v]);
    }
  };
  const int64_t whole = p.inner / 2;
  for (int64_t pair = 0; pair < whole; ++pair) add(panel.line[pair], [&](int m) { return pair_of(a[m], pair); });
  if (p.inner % 2) {
    add(panel.line[whole], [&](int m) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(a[m][p.inner - 1])); });
  }
#pragma GCC unroll 8
  for (int m = 0; m < kTileRows; ++m) {
#pragma GCC unroll 3
    for (int v = 0; v < kTileVectors; ++v) _mm512_mask_storeu_ps(p.c.row(row + m) + v * kLanes, mask_of(v), sum[m][v]);
  }
}

template <int kTileRows>
void tile_of_rows(const PairProduct& p, const Panel& panel, int64_t row) {
  if (p.cols > 2 * kLanes) return tile<kTileRows, 3>(p, panel, row);
  if (p.cols > kLanes) return tile<kTileRows, 2>(p, panel, row);
  tile<kTileRows, 1>(p, panel, row);
}

template <int kTileRows>
void last_tile(const PairProduct& p, const Panel& panel, int64_t row) {
  if constexpr (kTileRows > 0) {
    if (p.rows - row == kTileRows) return tile_of_rows<kTileRows>(p, panel, row);
    last_tile<kTileRows - 1>(p, panel, row);
  }
}

}  // namespace

void avx512::pair_product(const PairProduct& p) {
  Panel panel;
  pack(p, panel);
  int64_t row = 0;
  for (; row + kRows <= p.rows; row += kRows) tile_of_rows<kRows>(p, panel, row);
  last_tile<kRows - 1>(p, panel, row);
}

}  // namespace kt
