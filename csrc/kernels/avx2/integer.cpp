// Integer products with AVX2, which has no dot product of bytes.
//
// int8: the bytes of a line are split into the even and the odd ones of each dword as 16 bit (`and`, shift), each
// multiplied by vpmaddwd with a pair of activations in 16 bit: 4 columns of a row are (a0, a2), (a1, a3). Register tile
// 4 rows x 16, 2 x 32 or 1 x 64: 8 sums of int32, 2 registers of weights, 1 broadcast pair, the mask, 2 products.
// int4: nibbles are small enough for vpmaddubsw with the activations' bytes: 8 steps of two products, each at most
// 15 * 127, stay within 16 bits; that is 32 columns. Then vpmaddwd with ones adds them to the group's sums of int32.
// The float32 totals lie in c. The zero point enters as the start of a sum: -zero * (sum of the activations' codes).
//
// Measured on Zen 3: a line of int8 with 4 rows (256 products) takes 13 cycles: 16 vpmaddwd, 16 vpaddd, 4 to split,
// 8 broadcasts at about 3 vector instructions a cycle. A line of int4 with 4 rows (512 products) takes little more,
// half as much again in groups of 32. float32 fma takes 16 and 32 cycles for these.
#include "kernels/generic/integer.h"

#include <immintrin.h>

#include <cstring>

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
  if (t.blocks[0].zeros == nullptr) {
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

template <int kRows, int kBlocks, bool kFew>
inline void add_int4(const IntegerTile& t, const GroupSpan& span, Sums<kRows, kBlocks>& sum) {
  constexpr int kAtOnce = kHalvesAtOnce<kRows>;
  constexpr int64_t kUnitLines = kColumnUnit / 8;
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const uint8_t* a = t.a + span.col;
  const uint8_t* lines[kBlocks];
  for (int b = 0; b < kBlocks; ++b) lines[b] = t.blocks[b].lines + span.line_begin;
  const int64_t ahead = stream_ahead(t, span);
  for (int64_t i = 0; i < span.lines; i += kUnitLines) {
    Sums<kRows, kBlocks> words;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int h = 0; h < 2 * kBlocks; ++h) words.at[r][h] = _mm256_setzero_si256();
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < kUnitLines; ++j, a += 8) {
      if constexpr (kFew) prefetch_lines<kBlocks>(lines, (i + j) * kLineBytes + ahead);
#pragma GCC unroll 8
      for (int h = 0; h < 2 * kBlocks; h += kAtOnce) {
        __m256i low[kAtOnce], high[kAtOnce];
#pragma GCC unroll 2
        for (int k = 0; k < kAtOnce; ++k) {
          const __m256i w = load(lines[(h + k) / 2] + (i + j) * kLineBytes + 32 * ((h + k) % 2));
          low[k] = _mm256_and_si256(w, nibble);
          high[k] = _mm256_and_si256(_mm256_srli_epi16(w, 4), nibble);
        }
        add_bytes<kAtOnce>(low, h, a, t.lda, words);
        add_bytes<kAtOnce>(high, h, a + 4, t.lda, words);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int h = 0; h < 2 * kBlocks; ++h)
        sum.at[r][h] = _mm256_add_epi32(sum.at[r][h], _mm256_madd_epi16(words.at[r][h], ones));
    }
  }
}

// Totals lie in c, because all registers are in use between groups.
template <int kRows, int kBlocks>
inline void finish_group(const IntegerTile& t, int64_t g, const Sums<kRows, kBlocks>& sum) {
#pragma GCC unroll 8
  for (int h = 0; h < 2 * kBlocks; ++h) {
    const auto* halves = static_cast<const uint16_t*>(t.blocks[h / 2].group_scales);
    __m256 scale = _mm256_set1_ps(1.0f);
    if (halves != nullptr) {
      const auto* at = reinterpret_cast<const __m128i*>(halves + g * kBlockRows + 8 * (h % 2));
      scale = _mm256_cvtph_ps(_mm_loadu_si128(at));
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      float* c = t.c + r * t.ldc + 8 * h;
      const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(t.a_scales[r * t.ld_groups + g]));
      _mm256_storeu_ps(c, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum.at[r][h]), factor, _mm256_loadu_ps(c)));
    }
  }
}

struct Avx2 {
  static constexpr int kMaxRows = 4, kMaxBlocks = 1, kFewRows = 4;
  static constexpr int64_t kChunkBytes = 16384;
  static constexpr int few_blocks(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

  template <Encoding kEncoding, int kRows, int kBlocks, bool kFew>
  static void tile(const IntegerTile& in) {
    const IntegerTile t = in;  // a local copy, because stores of results might alias `in`
    constexpr int32_t kZero = kEncoding == Encoding::kInt4 ? 8 : 128;
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
      start<kRows, kBlocks>(t, g, kZero, sum);
      if constexpr (kEncoding == Encoding::kInt4) {
        add_int4<kRows, kBlocks, kFew>(t, span, sum);
      } else {
        add_int8<kRows, kBlocks, kFew>(t, span, sum);
      }
      finish_group<kRows, kBlocks>(t, g, sum);
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
  return grouped_size(shape, shape.format.encoding == Encoding::kInt8 ? 2 : 1);
}

void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  const bool words = shape.format.encoding == Encoding::kInt8;
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
