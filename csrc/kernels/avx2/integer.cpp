// Integer products with AVX2, which has no dot product of bytes.
//
// int8: the bytes of a line are split into the even and the odd ones of each dword as 16 bit (`and`, shift), each
// multiplied by vpmaddwd with a pair of activations in 16 bit: 4 columns of a row are (a0, a2), (a1, a3). Register tile
// 4 rows x 16: 8 sums of int32, 2 registers of weights, 1 broadcast pair, the mask, 2 products.
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

template <int kRows>
struct Sums {
  __m256i at[kRows][2];  // rows of weights 0..7 and 8..15
};

inline __m256i codes_sum(const IntegerTile& t, int r, int64_t g) {
  return _mm256_set1_epi32(t.a_sums[r * t.ld_groups + g]);
}

template <int kRows>
inline void start(const IntegerTile& t, int64_t g, int32_t default_zero, Sums<kRows>& sum) {
  const uint8_t* zeros = t.blocks[0].zeros;
#pragma GCC unroll 2
  for (int h = 0; zeros != nullptr && h < 2; ++h) {
    const auto* at = reinterpret_cast<const __m128i*>(zeros + g * kBlockRows + 8 * h);
    const __m256i minus_zero = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_cvtepu8_epi32(_mm_loadl_epi64(at)));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum.at[r][h] = _mm256_mullo_epi32(minus_zero, codes_sum(t, r, g));
  }
  if (zeros != nullptr) return;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    sum.at[r][0] = sum.at[r][1] = _mm256_mullo_epi32(_mm256_set1_epi32(-default_zero), codes_sum(t, r, g));
}

// Sums are written through: GCC would otherwise add products first, of several steps, and run out of registers.
inline void keep(__m256i& sum) { asm("" : "+x"(sum)); }

template <int kRows>
inline void add_words(__m256i w0, __m256i w1, const uint8_t* a, int64_t lda, Sums<kRows>& sum) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const __m256i x = broadcast_dword(a + r * lda);
    sum.at[r][0] = _mm256_add_epi32(sum.at[r][0], _mm256_madd_epi16(w0, x));
    sum.at[r][1] = _mm256_add_epi32(sum.at[r][1], _mm256_madd_epi16(w1, x));
    keep(sum.at[r][0]);
    keep(sum.at[r][1]);
  }
}

template <int kRows>
inline void add_int8(const IntegerTile& t, const GroupSpan& span, Sums<kRows>& sum) {
  const __m256i even = _mm256_set1_epi16(255);
  const uint8_t *line = t.blocks[0].lines + span.line_begin, *a = t.a + 2 * span.col;
  for (int64_t i = 0; i < span.lines; ++i, line += kLineBytes, a += 8) {
    const __m256i w0 = load(line), w1 = load(line + 32);
    add_words<kRows>(_mm256_and_si256(w0, even), _mm256_and_si256(w1, even), a, t.lda, sum);
    add_words<kRows>(_mm256_srli_epi16(w0, 8), _mm256_srli_epi16(w1, 8), a + 4, t.lda, sum);
  }
}

// The same in 16 bits, for nibbles.
template <int kRows>
inline void add_bytes(__m256i w0, __m256i w1, const uint8_t* a, int64_t lda, Sums<kRows>& sum) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const __m256i x = broadcast_dword(a + r * lda);
    sum.at[r][0] = _mm256_add_epi16(sum.at[r][0], _mm256_maddubs_epi16(w0, x));
    sum.at[r][1] = _mm256_add_epi16(sum.at[r][1], _mm256_maddubs_epi16(w1, x));
    keep(sum.at[r][0]);
    keep(sum.at[r][1]);
  }
}

template <int kRows>
inline void add_int4(const IntegerTile& t, const GroupSpan& span, Sums<kRows>& sum) {
  constexpr int64_t kUnitLines = kColumnUnit / 8;
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const uint8_t *line = t.blocks[0].lines + span.line_begin, *a = t.a + span.col;
  for (int64_t i = 0; i < span.lines; i += kUnitLines) {
    Sums<kRows> words;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) words.at[r][0] = words.at[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int64_t j = 0; j < kUnitLines; ++j, line += kLineBytes, a += 8) {
      const __m256i w0 = load(line), w1 = load(line + 32);
      add_bytes<kRows>(_mm256_and_si256(w0, low), _mm256_and_si256(w1, low), a, t.lda, words);
      add_bytes<kRows>(_mm256_and_si256(_mm256_srli_epi16(w0, 4), low), _mm256_and_si256(_mm256_srli_epi16(w1, 4), low),
                       a + 4, t.lda, words);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sum.at[r][0] = _mm256_add_epi32(sum.at[r][0], _mm256_madd_epi16(words.at[r][0], ones));
      sum.at[r][1] = _mm256_add_epi32(sum.at[r][1], _mm256_madd_epi16(words.at[r][1], ones));
    }
  }
}

// c is the memory of the totals: the registers are all in use between groups.
template <int kRows>
inline void finish_group(const IntegerTile& t, int64_t g, const Sums<kRows>& sum) {
  const auto* halves = static_cast<const uint16_t*>(t.blocks[0].group_scales);
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    __m256 scale = _mm256_set1_ps(1.0f);
    if (halves != nullptr) {
      const auto* at = reinterpret_cast<const __m128i*>(halves + g * kBlockRows + 8 * h);
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

  template <Encoding kEncoding, int kRows, int kBlocks>
  static void tile(const IntegerTile& in) {
    const IntegerTile t = in;  // of our own: results are floats in memory that might lie anywhere
    constexpr int32_t kZero = kEncoding == Encoding::kInt4 ? 8 : 128;
    for (int r = 0; t.first == 0 && r < kRows; ++r) std::memset(t.c + r * t.ldc, 0, kBlockRows * sizeof(float));
    int64_t fetch = t.fetch_first;
    for (int64_t g = t.first; g < t.end; ++g) {
      const GroupSpan span = group_span<kEncoding>(t.shape, g);
      if (g == fetch) {
        prefetch_group<1>(t, span);
        fetch += t.fetch_step;
      }
      Sums<kRows> sum;
      start<kRows>(t, g, kZero, sum);
      if constexpr (kEncoding == Encoding::kInt4) {
        add_int4<kRows>(t, span, sum);
      } else {
        add_int8<kRows>(t, span, sum);
      }
      finish_group<kRows>(t, g, sum);
    }
    if (t.end < t.shape.activation_groups()) return;
    for (int h = 0; h < 2; ++h) {
      const __m256 scale = _mm256_loadu_ps(t.blocks[0].row_scales + 8 * h);
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

int64_t quantized_bytes(const PackedShape& shape) {
  return shape.padded_cols() * (shape.format.encoding == Encoding::kInt8 ? 2 : 1);
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
