// Integer products with AVX-512 VNNI.
//
// Register tile: up to 8 rows x 2 blocks of 16 rows of weights, or 1 row x 4 blocks: 16 registers of int32 sums of the
// group at most, 2 of weights (4 for int4), 1 or 2 of broadcast activations, 1 mask. The float32 totals lie in c,
// touched once a group. Activations: codes in the order of the columns; 4 columns are one broadcast dword. Weights:
// unsigned codes, a line is the first operand of vpdpbusd as it lies; a line of int4 becomes two by `and` and a shift.
// The zero point enters as the start of a sum: -zero * (sum of the activations' codes).
//
// Expected on Zen 4 (one vpdpbusd a cycle): a line of 2 blocks takes 16 cycles beside 10 loads. A group costs 2 more
// multiplications a sum, a quarter on top for groups of 32.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own header starts undefined vectors with themselves
#endif
#include "kernels/generic/integer.h"

#include <immintrin.h>

#include <cstring>

#include "kernels/avx512/kernels.h"
#include "kernels/generic/quantize.h"

namespace kt::avx512 {
namespace {

inline int32_t dword(const uint8_t* at) {
  int32_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// int32 lanes by type: GCC copies sums of type __m512i to other registers and back in every step of a loop of vpdpbusd.
using Lanes = int32_t __attribute__((vector_size(64)));

template <int kRows, int kBlocks>
struct Sums {
  Lanes at[kRows][kBlocks];
};

inline __m512i codes_sum(const IntegerTile& t, int r, int64_t g) {
  return _mm512_set1_epi32(t.a_sums[r * t.ld_groups + g]);
}

template <int kRows, int kBlocks>
inline void start(const IntegerTile& t, int64_t g, int32_t default_zero, Sums<kRows, kBlocks>& sum) {
  if (t.blocks[0].zeros == nullptr) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Lanes from = Lanes(_mm512_mullo_epi32(_mm512_set1_epi32(-default_zero), codes_sum(t, r, g)));
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sum.at[r][b] = from;
    }
    return;
  }
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    const auto* at = reinterpret_cast<const __m128i*>(t.blocks[b].zeros + g * kBlockRows);
    const __m512i minus_zero = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_cvtepu8_epi32(_mm_loadu_si128(at)));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum.at[r][b] = Lanes(_mm512_mullo_epi32(minus_zero, codes_sum(t, r, g)));
  }
}

// Adds the products of one line of each block, decoded, with 4 columns of each row.
template <int kRows, int kBlocks>
inline void add_line(const __m512i* w, const uint8_t* a, int64_t lda, Sums<kRows, kBlocks>& sum) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const __m512i x = _mm512_set1_epi32(dword(a + r * lda));
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sum.at[r][b] = Lanes(_mm512_dpbusd_epi32(__m512i(sum.at[r][b]), w[b], x));
  }
}

template <Encoding kEncoding, int kRows, int kBlocks>
inline void add_group(const IntegerTile& t, const GroupSpan& span, Sums<kRows, kBlocks>& sum) {
  const __m512i low = _mm512_set1_epi8(15);
  const uint8_t* a = t.a + span.col;
  const uint8_t* lines[kBlocks];
  for (int b = 0; b < kBlocks; ++b) lines[b] = t.blocks[b].lines + span.line_begin;
  int64_t i = 0;
  do {
    __m512i w[kBlocks], high[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      w[b] = _mm512_load_si512(lines[b] + i * kLineBytes);
      if constexpr (kEncoding == Encoding::kInt4) {
        high[b] = _mm512_and_si512(_mm512_srli_epi16(w[b], 4), low);
        w[b] = _mm512_and_si512(w[b], low);
      }
    }
    add_line<kRows, kBlocks>(w, a, t.lda, sum);
    a += 4;
    if constexpr (kEncoding == Encoding::kInt4) {
      add_line<kRows, kBlocks>(high, a, t.lda, sum);
      a += 4;
    }
  } while (++i < span.lines);
}

// c is the memory of the totals, so that the registers are free for a larger tile of sums.
template <int kRows, int kBlocks>
inline void finish_group(const IntegerTile& t, int64_t g, const Sums<kRows, kBlocks>& sum) {
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    const auto* halves = static_cast<const uint16_t*>(t.blocks[b].group_scales);
    __m512 scale = _mm512_set1_ps(1.0f);
    if (halves != nullptr)
      scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + g * kBlockRows)));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      float* c = t.c + r * t.ldc + b * kBlockRows;
      const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(t.a_scales[r * t.ld_groups + g]));
      _mm512_storeu_ps(c, _mm512_fmadd_ps(_mm512_cvtepi32_ps(__m512i(sum.at[r][b])), factor, _mm512_loadu_ps(c)));
    }
  }
}

struct Avx512 {
  static constexpr int kMaxRows = 8, kMaxBlocks = 2, kFewRows = 4;
  static constexpr int64_t kChunkBytes = 16384;
  static constexpr int few_blocks(int rows) { return rows == 1 ? 4 : 2; }

  template <Encoding kEncoding, int kRows, int kBlocks>
  static void tile(const IntegerTile& in) {
    const IntegerTile t = in;  // of our own: results are floats in memory that might lie anywhere
    constexpr int32_t kZero = kEncoding == Encoding::kInt4 ? 8 : 128;
    constexpr size_t kRowBytes = kBlocks * kBlockRows * sizeof(float);
    for (int r = 0; t.first == 0 && r < kRows; ++r) std::memset(t.c + r * t.ldc, 0, kRowBytes);
    int64_t fetch = t.fetch_first;
    for (int64_t g = t.first; g < t.end; ++g) {
      const GroupSpan span = group_span<kEncoding>(t.shape, g);
      if (g == fetch) {
        prefetch_group<kBlocks>(t, span);
        fetch += t.fetch_step;
      }
      Sums<kRows, kBlocks> sum;
      start<kRows, kBlocks>(t, g, kZero, sum);
      add_group<kEncoding, kRows, kBlocks>(t, span, sum);
      finish_group<kRows, kBlocks>(t, g, sum);
    }
    if (t.end < t.shape.activation_groups()) return;
    for (int b = 0; b < kBlocks; ++b) {
      const __m512 scale = _mm512_loadu_ps(t.blocks[b].row_scales);
      for (int r = 0; r < kRows; ++r) {
        float* c = t.c + r * t.ldc + b * kBlockRows;
        _mm512_storeu_ps(c, _mm512_mul_ps(_mm512_loadu_ps(c), scale));
      }
    }
  }
};

}  // namespace

int64_t quantized_bytes(const PackedShape& shape) { return shape.padded_cols(); }

void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  quantize_row(shape, row, scales, sums, [&](int64_t unit, const int8_t* codes) {
    std::memcpy(values + unit * kQuantizeUnit, codes, kQuantizeUnit);
  });
}

void multiply_int8(const IntegerProduct& p) { multiply_integer<Avx512>(p); }

}  // namespace kt::avx512
