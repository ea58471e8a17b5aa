// Integer products with AVX2, which has no dot product of bytes.
//
// int8: the bytes of a line are split into the even and the odd ones of each dword as 16 bit (`and`, shift), each
// multiplied by vpmaddwd with a pair of activations in 16 bit: 4 columns of a row are (a0, a2), (a1, a3). Register tile
// 4 rows x 16, 2 x 32 or 1 x 64: 8 sums of int32, 2 registers of weights, 1 broadcast pair, the mask, 2 products.
// int4: nibbles are small enough for vpmaddubsw with the activations' bytes: 8 steps of two products, each at most
// 15 * 127, stay within 16 bits; that is 32 columns. Then vpmaddwd with ones adds them to the group's sums of int32.
// int5, fp4 and int6 likewise, but 4 or 2 steps. iq4: levels are bytes, multiplied as those of int8.
// The float32 totals lie in c. The zero point enters as the start of a sum: -zero * (sum of the activations' codes).
//
// Measured on Zen 3: a line of int8 with 4 rows (256 products) takes 13 cycles: 16 vpmaddwd, 16 vpaddd, 4 to split,
// 8 broadcasts at about 3 vector instructions a cycle. A line of int4 with 4 rows (512 products) takes little more,
// half as much again in groups of 32. float32 fma takes 16 and 32 cycles for these.
#include "kernels/generic/integer.h"

#include <immintrin.h>

#include <cstring>
#include <utility>

#include "kernels/avx2/kernels.h"
#include "kernels/generic/quantize.h"

namespace kt::avx2 {
namespace {

inline __m256i broadcast_dword(const uint8_t* at) {
  int32_t value;
  std::memcpy(&value, at, sizeof value);
  return _mm256_set1_epi32(value);
}

inline __m256i load(const uint8_t* at) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(at)); }

template <int kRows, int kBlocks>
struct Sums {
  __m256i at[kRows][2 * kBlocks];  // of each block rows of weights 0..7 and 8..15
};

inline __m256i codes_sum(const IntegerTile& t, int r, int64_t g) {
  return _mm256_set1_epi32(t.a_sums[r * t.ld_groups + g]);
}

template <int kRows, int kBlocks>
inline void start(const IntegerTile& t, int64_t g, int32_t default_zero, Sums<kRows, kBlocks>& sum) {
  if (t.blocks[0].zeros == nullptr) {  // minima leave a zero of 0
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256i from = _mm256_mullo_epi32(_mm256_set1_epi32(-default_zero), codes_sum(t, r, g));
#pragma GCC unroll 8
      for (int h = 0; h < 2 * kBlocks; ++h) sum.at[r][h] = from;
    }
    return;
  }
#pragma GCC unroll 8
  for (int h = 0; h < 2 * kBlocks; ++h) {
    const auto* at = reinterpret_cast<const __m128i*>(t.blocks[h / 2].zeros + g * kBlockRows + 8 * (h % 2));
    const __m256i minus_zero = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_cvtepu8_epi32(_mm_loadl_epi64(at)));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum.at[r][h] = _mm256_mullo_epi32(minus_zero, codes_sum(t, r, g));
  }
}

// Keeps each addition in place: otherwise GCC first adds products of several steps, and runs out of registers.
inline void keep(__m256i& sum) { asm("" : "+x"(sum)); }

// Products of halves [first, first + kHalves) of the blocks' codes, 4 columns in 16 bits, with the rows' activations at
// `a`.
template <int kHalves, int kRows, int kBlocks>
inline void add_words(const __m256i (&w)[kHalves], int first, const uint8_t* a, int64_t lda,
                      Sums<kRows, kBlocks>& sum) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const __m256i x = broadcast_dword(a + r * lda);
#pragma GCC unroll 8
    for (int h = 0; h < kHalves; ++h) {
      __m256i& to = sum.at[r][first + h];
      to = _mm256_add_epi32(to, _mm256_madd_epi16(w[h], x));
      keep(to);
    }
  }
}

// The same in 16 bits, for nibbles.
template <int kHalves, int kRows, int kBlocks>
inline void add_bytes(const __m256i (&w)[kHalves], int first, const uint8_t* a, int64_t lda,
                      Sums<kRows, kBlocks>& sum) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const __m256i x = broadcast_dword(a + r * lda);
#pragma GCC unroll 8
    for (int h = 0; h < kHalves; ++h) {
      __m256i& to = sum.at[r][first + h];
      to = _mm256_add_epi16(to, _mm256_maddubs_epi16(w[h], x));
      keep(to);
    }
  }
}

// Halves decoded at once: a block's two share the rows' activations, which with one row stay in registers anyway.
template <int kRows>
constexpr int kHalvesAtOnce = kRows == 1 ? 1 : 2;

template <int kRows, int kBlocks, bool kFew>
inline void add_int8(const IntegerTile& t, const GroupSpan& span, Sums<kRows, kBlocks>& sum) {
  constexpr int kAtOnce = kHalvesAtOnce<kRows>;
  const __m256i even = _mm256_set1_epi16(255);
  const uint8_t* a = t.a + 2 * span.col;
  const uint8_t* lines[kBlocks];
  for (int b = 0; b < kBlocks; ++b) lines[b] = t.blocks[b].lines + span.line_begin;
  const int64_t ahead = stream_ahead(t, span);
  for (int64_t i = 0; i < span.lines; ++i, a += 8) {
    if constexpr (kFew) prefetch_lines<kBlocks>(lines, i * kLineBytes + ahead);
#pragma GCC unroll 8
    for (int h = 0; h < 2 * kBlocks; h += kAtOnce) {
      const uint8_t* at[kAtOnce];
      __m256i w[kAtOnce];
#pragma GCC unroll 2
      for (int j = 0; j < kAtOnce; ++j) {
        at[j] = lines[(h + j) / 2] + i * kLineBytes + 32 * ((h + j) % 2);
        w[j] = _mm256_and_si256(load(at[j]), even);
      }
      add_words<kAtOnce>(w, h, a, t.lda, sum);
#pragma GCC unroll 2
      for (int j = 0; j < kAtOnce; ++j) w[j] = _mm256_srli_epi16(load(at[j]), 8);  // read again: a register less
      add_words<kAtOnce>(w, h, a + 4, t.lda, sum);
    }
  }
}

// Four columns of levels of half a block, from half a line of nibbles and half a line of high bits.
template <Encoding kEncoding, int kStep>
inline __m256i levels(const uint8_t* nibbles, const uint8_t* high_bits) {
  using Unit = Nibbles<kEncoding>;
  __m256i code = load(nibbles);
  if constexpr (kStep % 2 == 1) code = _mm256_srli_epi16(code, 4);
  code = _mm256_and_si256(code, _mm256_set1_epi8(15));
  if constexpr (levels_of_nibbles(kEncoding) != nullptr) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(levels_of_nibbles(kEncoding)));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), code);
  }
  if constexpr (Unit::kHighBits > 0) {
    constexpr int kShift = Unit::high_shift(kStep);
    __m256i high = load(high_bits);
    if constexpr (kShift > 0) high = _mm256_srli_epi16(high, kShift);
    if constexpr (kShift < 0) high = _mm256_slli_epi16(high, -kShift);
    return _mm256_or_si256(code, _mm256_and_si256(high, _mm256_set1_epi8(Unit::kHighMask)));
  }
  return code;
}

// Steps whose products of two codes fit 16 bits together.
template <Encoding kEncoding>
constexpr int kStepsInWords = kEncoding == Encoding::kInt4   ? 8
                              : kEncoding == Encoding::kInt6 ? 2
                                                             : 4;

template <Encoding kEncoding, int kRows, int kBlocks, bool kFew>
inline void add_nibbles(const IntegerTile& t, const GroupSpan& span, Sums<kRows, kBlocks>& sum) {
  using Unit = Nibbles<kEncoding>;
  constexpr int kAtOnce = kHalvesAtOnce<kRows>, kLinesInWords = kStepsInWords<kEncoding> / 2;
  const __m256i ones = _mm256_set1_epi16(1);
  const uint8_t* a = t.a + span.col;
  const uint8_t* lines[kBlocks];
  for (int b = 0; b < kBlocks; ++b) lines[b] = t.blocks[b].lines + span.line_begin;
  const int64_t ahead = stream_ahead(t, span);
  Sums<kRows, kBlocks> words;
  const auto add_line = [&]<int kLine>() __attribute__((always_inline)) {
    if constexpr (kFew) prefetch_lines<kBlocks>(lines, kLine * kLineBytes + ahead);
    if constexpr (kLine % kLinesInWords == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int h = 0; h < 2 * kBlocks; ++h) words.at[r][h] = _mm256_setzero_si256();
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < 2 * kBlocks; h += kAtOnce) {
      __m256i even[kAtOnce], odd[kAtOnce];
#pragma GCC unroll 2
      for (int k = 0; k < kAtOnce; ++k) {
        const uint8_t* unit = lines[(h + k) / 2] + 32 * ((h + k) % 2);
        even[k] = levels<kEncoding, 2 * kLine>(unit + kLine * kLineBytes, unit + Unit::kLines * kLineBytes);
        odd[k] = levels<kEncoding, 2 * kLine + 1>(unit + kLine * kLineBytes, unit + Unit::kLines * kLineBytes);
      }
      add_bytes<kAtOnce>(even, h, a + kLine * 8, t.lda, words);
      add_bytes<kAtOnce>(odd, h, a + kLine * 8 + 4, t.lda, words);
    }
    if constexpr (kLine % kLinesInWords == kLinesInWords - 1) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int h = 0; h < 2 * kBlocks; ++h)
          sum.at[r][h] = _mm256_add_epi32(sum.at[r][h], _mm256_madd_epi16(words.at[r][h], ones));
      }
    }
  };
  for (int64_t left = span.cols; left > 0; left -= Unit::kColumns, a += Unit::kColumns) {
    if constexpr (kFew && Unit::kHighBits > 0) prefetch_lines<kBlocks>(lines, Unit::kLines * kLineBytes + ahead);
    [&]<int... kLine>(std::integer_sequence<int, kLine...>) __attribute__((always_inline)) {
      (add_line.template operator()<kLine>(), ...);
    }(std::make_integer_sequence<int, Unit::kLines>{});
    for (int b = 0; b < kBlocks; ++b) lines[b] += Unit::kAllLines * kLineBytes;
  }
}

template <int kRows, int kBlocks, bool kFew>
inline void add_iq4(const IntegerTile& t, const GroupSpan& span, Sums<kRows, kBlocks>& sum) {
  constexpr int kAtOnce = kHalvesAtOnce<kRows>;
  const __m256i even = _mm256_set1_epi16(255);
  const uint8_t* a = t.a + 2 * span.col;
  const uint8_t* lines[kBlocks];
  for (int b = 0; b < kBlocks; ++b) lines[b] = t.blocks[b].lines + span.line_begin;
  const int64_t ahead = stream_ahead(t, span);
  const auto add_step = [&]<int kStep>(int64_t line) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int h = 0; h < 2 * kBlocks; h += kAtOnce) {
      __m256i level[kAtOnce], w[kAtOnce];
#pragma GCC unroll 2
      for (int j = 0; j < kAtOnce; ++j) {
        level[j] = levels<Encoding::kIq4, kStep>(lines[(h + j) / 2] + line * kLineBytes + 32 * ((h + j) % 2), nullptr);
        w[j] = _mm256_and_si256(level[j], even);
      }
      add_words<kAtOnce>(w, h, a + 8 * kStep, t.lda, sum);
#pragma GCC unroll 2
      for (int j = 0; j < kAtOnce; ++j) w[j] = _mm256_srli_epi16(level[j], 8);
      add_words<kAtOnce>(w, h, a + 8 * kStep + 4, t.lda, sum);
    }
  };
  for (int64_t i = 0; i < span.lines; ++i, a += 16) {
    if constexpr (kFew) prefetch_lines<kBlocks>(lines, i * kLineBytes + ahead);
    add_step.template operator()<0>(i);
    add_step.template operator()<1>(i);
  }
}

// Whether activations are stored as words.
constexpr bool by_words(Encoding encoding) { return encoding == Encoding::kInt8 || encoding == Encoding::kIq4; }

inline __m128i eight(const void* from) { return _mm_loadl_epi64(static_cast<const __m128i*>(from)); }
inline __m256 halves(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// The scales of group g of a block, for eight rows from `row` on.
inline __m256 group_scale(const IntegerTile& t, const Block& block, int64_t g, int64_t row) {
  if (block.group_scales == nullptr) return _mm256_set1_ps(1.0f);
  const int64_t at = g * kBlockRows + row;
  const auto* bytes = static_cast<const uint8_t*>(block.group_scales) + at;
  switch (t.shape.format.scales) {
    case Scales::kByte:
      return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(bytes))),
                           halves(block.supers + g * t.shape.format.group / kSuperGroup * kBlockRows + row));
    case Scales::kExponent:
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(eight(bytes)), 23));
    case Scales::kFp8: {  // where a float has the code's bits, they are the value times 2^-120, subnormals too
      const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(eight(bytes)), 20);
      return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
    }
    default:
      return halves(static_cast<const uint16_t*>(block.group_scales) + at);
  }
}

// Takes the minima of group g from the totals in c.
template <int kRows, int kBlocks>
inline void subtract_minima(const IntegerTile& t, int64_t g) {
  const int64_t super = g * t.shape.format.group / kSuperGroup * kBlockRows;
#pragma GCC unroll 8
  for (int h = 0; h < 2 * kBlocks; ++h) {
    const Block& block = t.blocks[h / 2];
    const int64_t row = 8 * (h % 2);
    const __m256 least =
        _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(block.mins + g * kBlockRows + row))),
                      halves(block.min_supers + super + row));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = r * t.ld_groups + g;
      const __m256 factor = _mm256_set1_ps(t.a_scales[at] * static_cast<float>(t.a_sums[at]));
      float* c = t.c + r * t.ldc + 8 * h;
      _mm256_storeu_ps(c, _mm256_fnmadd_ps(least, factor, _mm256_loadu_ps(c)));
    }
  }
}

// Totals lie in c, because all registers are in use between groups.
template <int kRows, int kBlocks>
inline void finish_group(const IntegerTile& t, int64_t g, const Sums<kRows, kBlocks>& sum) {
#pragma GCC unroll 8
  for (int h = 0; h < 2 * kBlocks; ++h) {
    const __m256 scale = group_scale(t, t.blocks[h / 2], g, 8 * (h % 2));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      float* c = t.c + r * t.ldc + 8 * h;
      const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(t.a_scales[r * t.ld_groups + g]));
      _mm256_storeu_ps(c, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum.at[r][h]), factor, _mm256_loadu_ps(c)));
    }
  }
}

struct Avx2 {
  using Ahead = IntoL2;
  static constexpr int kMaxRows = 4, kMaxBlocks = 1, kFewRows = 4;
  static constexpr int64_t kChunkBytes = 16384;
  static constexpr int few_blocks(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

  template <Encoding kEncoding, int kRows, int kBlocks, bool kFew>
  static void tile(const IntegerTile& in) {
    const IntegerTile t = in;  // a local copy, because stores of results might alias `in`
    const auto zero = static_cast<int32_t>(t.shape.format.default_zero());
    for (int r = 0; t.first == 0 && r < kRows; ++r)
      std::memset(t.c + r * t.ldc, 0, kBlocks * kBlockRows * sizeof(float));
    int64_t fetch = t.fetch_first;
    for (int64_t g = t.first; g < t.end; ++g) {
      const GroupSpan span = group_span<kEncoding>(t.shape, g);
      if (!kFew && g == fetch) {
        prefetch_group<kBlocks>(t, span);
        fetch += t.fetch_step;
      }
      Sums<kRows, kBlocks> sum;
      start<kRows, kBlocks>(t, g, zero, sum);
      if constexpr (kEncoding == Encoding::kInt8) {
        add_int8<kRows, kBlocks, kFew>(t, span, sum);
      } else if constexpr (kEncoding == Encoding::kIq4) {
        add_iq4<kRows, kBlocks, kFew>(t, span, sum);
      } else {
        add_nibbles<kEncoding, kRows, kBlocks, kFew>(t, span, sum);
      }
      finish_group<kRows, kBlocks>(t, g, sum);
      if (t.blocks[0].mins != nullptr) subtract_minima<kRows, kBlocks>(t, g);
    }
    if (t.end < t.shape.activation_groups()) return;
    for (int h = 0; h < 2 * kBlocks; ++h) {
      const __m256 scale = _mm256_loadu_ps(t.blocks[h / 2].row_scales + 8 * (h % 2));
      for (int r = 0; r < kRows; ++r) {
        float* c = t.c + r * t.ldc + 8 * h;
        _mm256_storeu_ps(c, _mm256_mul_ps(_mm256_loadu_ps(c), scale));
      }
    }
  }
};

// Codes of 4 columns a0..a3 -> (a0, a2), (a1, a3) in 16 bit.
inline void store_words(const int8_t* codes, uint8_t* to) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  for (int i = 0; i < 2; ++i) {
    const __m128i in_order = _mm_load_si128(reinterpret_cast<const __m128i*>(codes) + i);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + i, _mm256_cvtepi8_epi16(_mm_shuffle_epi8(in_order, order)));
  }
}

}  // namespace

QuantizedSize quantized_size(const PackedShape& shape) {
  return grouped_size(shape, by_words(shape.format.encoding) ? 2 : 1);
}

void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  const bool words = by_words(shape.format.encoding);
  quantize_row(shape, row, scales, sums, [&](int64_t unit, const int8_t* codes) {
    if (words) {
      store_words(codes, values + unit * 2 * kQuantizeUnit);
    } else {
      std::memcpy(values + unit * kQuantizeUnit, codes, kQuantizeUnit);
    }
  });
}

void multiply_int8(const IntegerProduct& p) { multiply_integer<Avx2>(p); }

}  // namespace kt::avx2
