// Transposed products with AVX-512: tile of 12 tokens x 32 columns (24 accumulators, 2 vectors of weights, 1
// broadcast), 6 x 64 for few tokens.
//
// float32: 24 fma from 14 loads; unpacked as with AVX2. bf16: a panel's unit is a pair of weights of consecutive n, the
// broadcast the pair of `in`: 24 vdpbf16ps from 14 loads, one a cycle where the processor has one. bf16 weights reach
// the panel with four shuffles a line; other encodings are scaled in float32 and rounded to bf16.
#include "kernels/generic/transposed.h"

#include "kernels/avx2/transpose.h"
#include "kernels/avx512/kernels.h"
#include "kernels/avx512/vector.h"
#include "kernels/generic/unpack.h"

namespace kt::avx512 {
namespace {

struct FloatOp {
  using In = float;
  using V = Vec16;
  static constexpr int kTileRows = 12;
  static constexpr int64_t kUnits = kBlockRows;
  static void unpack(const Parts& parts, const uint8_t* block, ColumnRange columns, float* panel) {
    unpack_rows<Vec8>(parts, block, columns, {panel, kPanelCols});
  }
};

// Lanes are pairs of bf16, sums are floats.
struct PairVec16 : Vec16 {
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
};

struct Bf16Op {
  using In = uint16_t;
  using V = PairVec16;
  static constexpr int kTileRows = 12;
  static constexpr int64_t kUnits = kBlockRows / 2;

  static void unpack(const Parts& parts, const uint8_t* block, ColumnRange columns, float* panel) {
    if (parts.encoding == Encoding::kBf16) {
      const uint8_t* lines = block + parts.lines + columns.first / 2 * kLineBytes;
      for (int64_t c = 0; c < columns.count; c += 16) unpack_lines(lines + c / 2 * kLineBytes, panel + c);
    } else {
      unpack_scaled(parts, block, columns, panel);
    }
  }

 private:
  // Lanes of two vectors whose 128-bit parts belong, by twos, to the even and the odd columns.
  struct Order {
    alignas(64) int32_t lanes[16];
    constexpr explicit Order(int part) : lanes() {
      for (int k = 0; k < 16; ++k) lanes[k] = (k < 8 ? 0 : 16) + 4 * (2 * (k % 2) + part) + k / 2 % 4;
    }
  };

  // Eight lines: 16 columns. A line holds 16 rows x 2 columns; first each column's 8 pairs of rows come together, then
  // 8 x 8 of these pairs are transposed, in the halves for even and odd columns at once.
  static void unpack_lines(const uint8_t* lines, float* panel) {
    alignas(64) static constexpr uint16_t kColumns[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                          1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    static constexpr Order kLow(0), kHigh(1);
    const __m512i columns = _mm512_load_si512(kColumns);
    const __m512i low = _mm512_load_si512(kLow.lanes), high = _mm512_load_si512(kHigh.lanes);
    __m512 line[8], half[8], quad[8];
    for (int i = 0; i < 8; ++i)
      line[i] = _mm512_castsi512_ps(_mm512_permutexvar_epi16(columns, _mm512_loadu_si512(lines + i * kLineBytes)));
    for (int i = 0; i < 8; i += 2) {
      half[i] = _mm512_maskz_unpacklo_ps(0xffff, line[i], line[i + 1]);
      half[i + 1] = _mm512_maskz_unpackhi_ps(0xffff, line[i], line[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      quad[i] = _mm512_shuffle_ps(half[i], half[i + 2], 0x44);
      quad[i + 1] = _mm512_shuffle_ps(half[i], half[i + 2], 0xee);
      quad[i + 2] = _mm512_shuffle_ps(half[i + 1], half[i + 3], 0x44);
      quad[i + 3] = _mm512_shuffle_ps(half[i + 1], half[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      Vec16::store(panel + i * kPanelCols, _mm512_permutex2var_ps(quad[i], low, quad[i + 4]));
      Vec16::store(panel + (i + 4) * kPanelCols, _mm512_permutex2var_ps(quad[i], high, quad[i + 4]));
    }
  }

  static void unpack_scaled(const Parts& parts, const uint8_t* block, ColumnRange columns, float* panel) {
    alignas(64) float rows[kBlockRows * kPanelCols];
    unpack_rows<Vec8>(parts, block, columns, {rows, kPanelCols});
    for (int64_t n = 0; n < kBlockRows; n += 2) {
      for (int64_t c = 0; c < columns.count; c += 16) {
        const float* from = rows + n * kPanelCols + c;
        const __m512i even = widened(Vec16::load(from)), odd = widened(Vec16::load(from + kPanelCols));
        Vec16::store(panel + n / 2 * kPanelCols + c,
                     _mm512_castsi512_ps(_mm512_or_si512(even, _mm512_maskz_slli_epi32(0xffff, odd, 16))));
      }
    }
  }

  // Rounded to bf16, the bits in the lower half of each lane.
  static __m512i widened(__m512 value) {
    return _mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)_mm512_cvtneps_pbh(value));
  }
};

// Eight pairs of row `from`, of which `valid` numbers exist.
__m256 load_pairs(const float* from, int64_t valid) {
  const int count = valid >= 16 ? 16 : valid > 0 ? static_cast<int>(valid) : 0;
  return (__m256)_mm512_cvtneps_pbh(Vec16::load_partial(from, count));
}

}  // namespace

void multiply_transposed(const TransposedProduct<float>& p) { TransposedLoop<FloatOp>(p).run(); }
void multiply_transposed_bf16(const TransposedProduct<uint16_t>& p) { TransposedLoop<Bf16Op>(p).run(); }

void transpose_rows(Rows<const float> in, int64_t rows, int64_t cols, float* out, int64_t ld) {
  transpose_floats(in, rows, cols, out, ld);
}

void transpose_rows_bf16(Rows<const float> in, int64_t rows, int64_t cols, uint16_t* out, int64_t ld) {
  auto* pairs = reinterpret_cast<float*>(out);
  for (int64_t m = 0; m < rows; m += 8) {
    for (int64_t n = 0; n < cols; n += 16) {
      __m256 block[8];
      for (int64_t i = 0; i < 8; ++i) block[i] = m + i < rows ? load_pairs(in.row(m + i) + n, cols - n) : Vec8::zero();
      Vec8::transpose(block);
      for (int64_t i = 0; i < 8; ++i) Vec8::store(pairs + (n / 2 + i) * ld + m, block[i]);
    }
  }
}

}  // namespace kt::avx512
