// Register tiles of integer products with AVX-512, for any `Dot` (integer_dot.h).
//
// Up to 6 rows x 2 blocks of 16 rows of weights: 12 registers of int32 sums of the group and 12 of float32 totals at
// most, 2 of weights (4 for int4), 1 of broadcast activations, 1 mask. Totals in memory would allow a larger tile, but
// each group would wait for the stores of its totals (two cycles each on Zen 4). Few rows: integer_few.h.
// Activations: codes in the order of the columns (but integer_dot.h, DotMadd); 4 columns are one broadcast dword, or
// two. Weights: unsigned codes, a line of
// bytes is an operand as it lies; a line of int4 becomes two by `and` and a shift. The zero point enters as
// the start of a sum: -zero * (sum of the activations' codes). A minimum is taken from the total: minimum * scale of
// the activations * (sum of their codes).
//
// Zen 4, one vpdpbusd a cycle: a line of 2 blocks takes 12 cycles beside 8 loads. A group of 32 columns costs one fma a
// sum on top of 8 vpdpbusd.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <utility>

#include "kernels/avx512/products/integer_dot.h"
#include "kernels/generic/integer.h"
#include "kernels/generic/quantize.h"

namespace kt {
namespace {

template <int kRows, int kBlocks>
struct Sums {
  Lanes at[kRows][kBlocks];
};

template <int kRows, int kBlocks>
struct Totals {
  __m512 at[kRows][kBlocks];
};

// A pointer that moves from row to row. It is hidden from the compiler, which otherwise keeps one address per row, more
// than there are registers.
template <class T>
inline void next_row(T*& at, int64_t ld) {
  at += ld;
  __asm__("" : "+r"(at));
}

// Rows of codes, three to a base register: base, base + ld, base + 2 * ld are forms of one address.
template <int kRows>
struct CodeRows {
  static constexpr int kBases = (kRows + 2) / 3;

  CodeRows(const uint8_t* a, int64_t lda) : ld(lda) {
    for (int i = 0; i < kBases; ++i) {
      base[i] = a + 3 * i * lda;
      __asm__("" : "+r"(base[i]));
    }
  }
  const uint8_t* at(int r) const { return base[r / 3] + r % 3 * ld; }
  void advance(int64_t columns) {
#pragma GCC unroll 16
    for (int i = 0; i < kBases; ++i) base[i] += columns;
  }

  const uint8_t* base[kBases];
  int64_t ld;
};

// -zero * value for the zero that an encoding has without stored ones.
template <Encoding kEncoding>
inline Lanes minus_default_zero(Lanes value) {
  if constexpr (is_fp4(kEncoding)) return -((value << 3) + (value << 2));
  if constexpr (kEncoding == Encoding::kIq4) return value - (value << 7);
  constexpr int kBits = kEncoding == Encoding::kInt4   ? 3
                        : kEncoding == Encoding::kInt5 ? 4
                        : kEncoding == Encoding::kInt6 ? 5
                                                       : 7;
  return -(value << kBits);
}

// -zero * (sum of the activations' codes) for the zero that all weights share, or for those of each block's rows.
template <Encoding kEncoding, int kRows, int kBlocks>
inline void start(const IntegerTile& t, int64_t g, Sums<kRows, kBlocks>& sum) {
  const int32_t* codes_sum = t.a_sums + g;
  if (t.blocks[0].mins != nullptr) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sum.at[r][b] = Lanes{};
    }
    return;
  }
  if (t.blocks[0].zeros == nullptr) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, next_row(codes_sum, t.ld_groups)) {
      const Lanes from = minus_default_zero<kEncoding>(Lanes(_mm512_set1_epi32(*codes_sum)));
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sum.at[r][b] = from;
    }
    return;
  }
  __m512i minus_zero[kBlocks];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    const auto* at = reinterpret_cast<const __m128i*>(t.blocks[b].zeros + g * kBlockRows);
    minus_zero[b] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_cvtepu8_epi32(_mm_loadu_si128(at)));
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, next_row(codes_sum, t.ld_groups)) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b)
      sum.at[r][b] = Lanes(_mm512_mullo_epi32(minus_zero[b], _mm512_set1_epi32(*codes_sum)));
  }
}

// Four columns of levels, from a line of nibbles, and from the unit's line of high bits where there is one.
template <class Dot, Encoding kEncoding, int kStep>
inline __m512i levels(__m512i nibbles, __m512i high) {
  using Unit = Nibbles<kEncoding>;
  if constexpr (kStep % 2 == 1) nibbles = _mm512_srli_epi16(nibbles, 4);
  if constexpr (levels_of_nibbles(kEncoding) != nullptr) return Dot::look_up(levels_of_nibbles(kEncoding), nibbles);
  const __m512i low = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
  if constexpr (Unit::kHighBits > 0) {
    constexpr int kShift = Unit::high_shift(kStep), kAndThenOr = 0xea;  // (a & b) | c
    if constexpr (kShift > 0) high = _mm512_srli_epi16(high, kShift);
    if constexpr (kShift < 0) high = _mm512_slli_epi16(high, -kShift);
    return _mm512_ternarylogic_epi32(high, _mm512_set1_epi8(Unit::kHighMask), low, kAndThenOr);
  }
  return low;
}

// Adds the products of two lines.
template <class Dot, Encoding kEncoding>
inline Lanes add_line_pair(Lanes sum, const __m512i (&w)[2], const typename Dot::template Codes<kEncoding> (&x)[2]) {
  if constexpr (takes_lines(kEncoding)) {
    return Dot::add(Dot::add(sum, w[0], x[0]), w[1], x[1]);
  } else {
    return Dot::add_two(sum, w, x);
  }
}

// Adds the products of a unit of lines of nibbles. Few rows prefetch `ahead`
// bytes further.
template <class Dot, Encoding kEncoding, int kRows, int kBlocks, bool kFew>
inline void add_nibbles(const uint8_t* const* lines, int64_t ahead, const CodeRows<kRows>& a,
                        Sums<kRows, kBlocks>& sum) {
  using Unit = Nibbles<kEncoding>;
  constexpr int kCodeBytes = Dot::template kCodeBytes<kEncoding>;
  __m512i high[kBlocks];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b)
    high[b] = Unit::kHighBits ? _mm512_load_si512(lines[b] + Unit::kLines * kLineBytes) : _mm512_setzero_si512();
  if constexpr (kFew && Unit::kHighBits > 0)
    prefetch_lines<kBlocks, typename Dot::Ahead>(lines, Unit::kLines * kLineBytes + ahead);
  const auto add = [&]<int kLine> {
    if constexpr (kFew) prefetch_lines<kBlocks, typename Dot::Ahead>(lines, kLine * kLineBytes + ahead);
    __m512i w[kBlocks][2];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const __m512i nibbles = _mm512_load_si512(lines[b] + kLine * kLineBytes);
      w[b][0] = levels<Dot, kEncoding, 2 * kLine>(nibbles, high[b]);
      w[b][1] = levels<Dot, kEncoding, 2 * kLine + 1>(nibbles, high[b]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto* from = a.at(r) + kLine * 8 * kCodeBytes;
      const typename Dot::template Codes<kEncoding> x[2] = {Dot::template codes<kEncoding>(from),
                                                            Dot::template codes<kEncoding>(from + 4 * kCodeBytes)};
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sum.at[r][b] = add_line_pair<Dot, kEncoding>(sum.at[r][b], w[b], x);
    }
  };
  [&]<int... kLine>(std::integer_sequence<int, kLine...>) {
    (add.template operator()<kLine>(), ...);
  }(std::make_integer_sequence<int, Unit::kLines>{});
}

// Adds the products of a unit of 32 columns of bytes.
template <class Dot, int kRows, int kBlocks, bool kFew>
inline void add_bytes(const uint8_t* const* lines, int64_t ahead, const CodeRows<kRows>& a, Sums<kRows, kBlocks>& sum) {
  constexpr int kColumns = 4, kLines = kQuantizeUnit / kColumns;
  constexpr int kStep = kColumns * Dot::template kCodeBytes<Encoding::kInt8>;
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
    if constexpr (kFew) prefetch_lines<kBlocks, typename Dot::Ahead>(lines, i * kLineBytes + ahead);
    __m512i w[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) w[b] = _mm512_load_si512(lines[b] + i * kLineBytes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto x = Dot::template codes<Encoding::kInt8>(a.at(r) + i * kStep);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sum.at[r][b] = Dot::add(sum.at[r][b], w[b], x);
    }
  }
}

template <class Dot, Encoding kEncoding, int kRows, int kBlocks, bool kFew>
inline void add_group(const IntegerTile& t, const GroupSpan& span, Sums<kRows, kBlocks>& sum) {
  constexpr bool kBytes = kEncoding == Encoding::kInt8;
  constexpr int64_t kColumns = kBytes ? kQuantizeUnit : Nibbles<kEncoding>::kColumns;
  constexpr int64_t kUnitBytes = kBytes ? kBlockRows * kQuantizeUnit : Nibbles<kEncoding>::kAllLines * kLineBytes;
  constexpr int kCodeBytes = Dot::template kCodeBytes<kEncoding>;
  CodeRows<kRows> a(t.a + span.col * kCodeBytes, t.lda);
  const uint8_t* lines[kBlocks];
  for (int b = 0; b < kBlocks; ++b) lines[b] = t.blocks[b].lines + span.line_begin;
  const int64_t ahead = stream_ahead(t, span);
  int64_t left = span.cols;
  do {
    if constexpr (kBytes) {
      add_bytes<Dot, kRows, kBlocks, kFew>(lines, ahead, a, sum);
    } else {
      add_nibbles<Dot, kEncoding, kRows, kBlocks, kFew>(lines, ahead, a, sum);
    }
    a.advance(kColumns * kCodeBytes);
    for (int b = 0; b < kBlocks; ++b) lines[b] += kUnitBytes;
  } while ((left -= kColumns) > 0);
}

// Sixteen float16, and as many signed bytes or exponents.
inline __m512 halves(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline __m128i sixteen(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

// Of e4m3 without a sign: where a float has the code's bits, they are the value times 2^-120, subnormals too.
inline __m512 fp8_scales(const void* from) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(sixteen(from)), 20);
  return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
}

// The scales of group g of a block, for its rows.
inline __m512 group_scale(const IntegerTile& t, const Block& block, int64_t g) {
  switch (t.shape.format.scales) {
    case Scales::kByte: {
      const auto* bytes = static_cast<const uint8_t*>(block.group_scales) + g * kBlockRows;
      const int64_t super = g * t.shape.format.group / kSuperGroup;
      return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(bytes))),
                           halves(block.supers + super * kBlockRows));
    }
    case Scales::kExponent: {
      const auto* bytes = static_cast<const uint8_t*>(block.group_scales) + g * kBlockRows;
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(sixteen(bytes)), 23));
    }
    case Scales::kFp8:
      return fp8_scales(static_cast<const uint8_t*>(block.group_scales) + g * kBlockRows);
    default:
      return halves(static_cast<const uint16_t*>(block.group_scales) + g * kBlockRows);
  }
}

// Takes the minima of group g from the totals.
template <int kRows, int kBlocks>
inline void subtract_minima(const IntegerTile& t, int64_t g, Totals<kRows, kBlocks>& total) {
  const int64_t super = g * t.shape.format.group / kSuperGroup;
  __m512 least[kBlocks];
#pragma GCC unroll 4
  for (int b = 0; b < kBlocks; ++b) {
    const Block& block = t.blocks[b];
    least[b] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen(block.mins + g * kBlockRows))),
                             halves(block.min_supers + super * kBlockRows));
  }
  const float* a_scale = t.a_scales + g;
  const int32_t* a_sum = t.a_sums + g;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, next_row(a_scale, t.ld_groups), next_row(a_sum, t.ld_groups)) {
    const __m512 row = _mm512_set1_ps(*a_scale * static_cast<float>(*a_sum));
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) total.at[r][b] = _mm512_fnmadd_ps(least[b], row, total.at[r][b]);
  }
}

// Adds the sums of group g, with its scales, to the totals.
template <int kRows, int kBlocks>
inline void finish_group(const IntegerTile& t, int64_t g, const Sums<kRows, kBlocks>& sum,
                         Totals<kRows, kBlocks>& total) {
  const float* a_scale = t.a_scales + g;
  const bool grouped = t.blocks[0].group_scales != nullptr;
  __m512 scale[kBlocks];
  for (int b = 0; grouped && b < kBlocks; ++b) scale[b] = group_scale(t, t.blocks[b], g);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, next_row(a_scale, t.ld_groups)) {
    const __m512 row = _mm512_set1_ps(*a_scale);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const __m512 factor = grouped ? _mm512_mul_ps(scale[b], row) : row;
      total.at[r][b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(__m512i(sum.at[r][b])), factor, total.at[r][b]);
    }
  }
}

// Groups [t.first, t.end) of a tile, for any format.
template <class Dot, Encoding kEncoding, int kRows, int kBlocks, bool kFew>
void run_groups(const IntegerTile& t) {
  Totals<kRows, kBlocks> total;
  float* c = t.c;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, next_row(c, t.ldc)) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b)
      total.at[r][b] = t.first == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(c + b * kBlockRows);
  }
  int64_t fetch = t.fetch_first;
  for (int64_t g = t.first; g < t.end; ++g) {
    const GroupSpan span = group_span<kEncoding>(t.shape, g);
    if (!kFew && g == fetch) {
      prefetch_group<kBlocks>(t, span);
      fetch += t.fetch_step;
    }
    Sums<kRows, kBlocks> sum;
    start<kEncoding, kRows, kBlocks>(t, g, sum);
    add_group<Dot, kEncoding, kRows, kBlocks, kFew>(t, span, sum);
    finish_group<kRows, kBlocks>(t, g, sum, total);
    if constexpr (kEncoding == Encoding::kInt4 || kEncoding == Encoding::kInt5) {
      if (t.blocks[0].mins != nullptr) subtract_minima<kRows, kBlocks>(t, g, total);
    }
  }
  const bool last = t.end == t.shape.activation_groups();
  c = t.c;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, next_row(c, t.ldc)) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const __m512 value = total.at[r][b];
      _mm512_storeu_ps(c + b * kBlockRows,
                       last ? _mm512_mul_ps(value, _mm512_loadu_ps(t.blocks[b].row_scales)) : value);
    }
  }
}

}  // namespace
}  // namespace kt
