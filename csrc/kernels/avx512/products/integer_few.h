// Integer products of few rows with AVX-512, bound by memory: for formats whose group is one unit of lines (32 columns,
// int6 and nvfp4: 16). What a group does is fixed at compile time, since a group has no more than 4 to 8 lines for each
// block.
//
// Register tile: 1 row x 4 blocks, or up to 4 rows x 2. Two chains of sums where registers allow it: a single chain of
// vpdpbusd would take 8 times its latency, and the processor would not reach the next group's lines meanwhile. The
// second chain takes odd lines, or the high nibbles where they lie: 16 times their sum, exact, divided after the last
// line. Streams are at a fixed distance, so that all blocks take two pointers and two multiples of the distance.
//
// Zen 4, mxfp4, 1 x 4: for 16 lines 32 vpermb, 16 shifts, 32 vpdpbusd and 22 others on three of its pipes.
//
// Include only in a kernel's own translation unit.
#pragma once

#include "kernels/avx512/products/integer_tile.h"
#include "kernels/generic/prefetch.h"

namespace kt {
namespace {

// The factors of a group that a format has.
enum class Factors {
  kNone,
  kHalf,      // a float16 scale
  kByte,      // a scale of a byte and a float16
  kByteMins,  // the same, and a minimum
  kExponent,
  kFp8,
};

constexpr bool by_byte(Factors factors) { return factors == Factors::kByte || factors == Factors::kByteMins; }

// The same place in kBlocks blocks.
template <int kBlocks>
struct Streams {
  Streams(const uint8_t* first, int64_t block_bytes) : at(first), stride(block_bytes), three(3 * block_bytes) {}
  const uint8_t* of(int b) const { return b == 3 ? at + three : at + b * stride; }
  void move(int64_t bytes) {
    at += bytes;
    __asm__("" : "+r"(at));  // one pointer, not one for each block
  }

  const uint8_t* at;
  int64_t stride, three;
};

template <int kRows, int kBlocks>
constexpr int kFewChains = kRows * kBlocks <= 4 ? 2 : 1;

template <int kRows, int kBlocks>
struct FewSums {
  static constexpr int kChains = kFewChains<kRows, kBlocks>;
  Lanes at[kRows][kBlocks][kChains];
};

// The scales, and the minima where there are any, of 256 columns.
template <int kBlocks>
struct SuperFactors {
  __m512 scale[kBlocks], least[kBlocks];
};

// The lines of a tile's first block, `ahead` lines before they are read, and on into the stream's next block.
inline PrefetchCursor prefetch_ahead(const IntegerTile& t, int64_t ahead) {
  ahead = ahead < t.block_lines ? ahead : t.block_lines - 1;
  return {.at = t.blocks[0].lines + ahead * kLineBytes,
          .until_jump = t.block_lines - ahead,
          .jump_bytes = t.jump,
          .run = t.block_lines};
}

// A register tile: `run` is all of it.
template <class Dot, Encoding kEncoding, Factors kFactors, int kRows, int kBlocks>
class FewRows {
  static constexpr bool kBytes = kEncoding == Encoding::kInt8;
  using Unit = Nibbles<kBytes ? Encoding::kInt4 : kEncoding>;
  static constexpr int kColumns = kBytes ? kQuantizeUnit : Unit::kColumns;
  static constexpr int kLines = kBytes ? kQuantizeUnit / 4 : Unit::kAllLines;
  static constexpr int kCodeBytes = Dot::template kCodeBytes<kEncoding>;
  static constexpr int kChains = kFewChains<kRows, kBlocks>;
  static constexpr bool kHighInPlace = kEncoding == Encoding::kInt4 && kChains == 2 && Dot::kHighInPlace;
  static constexpr int64_t kScaleBytes = kFactors == Factors::kNone ? 0 : kFactors == Factors::kHalf ? 32 : 16;
  static constexpr int64_t kGroupsOfSuper = kSuperGroup / kColumns;

 public:
  static void run(const IntegerTile& tile) {
    FewRows few(tile);
    for (int64_t g = 0; g < few.t_.end; ++g) few.group(g);
    few.store();
  }

 private:
  explicit FewRows(const IntegerTile& tile)
      : t_(tile),
        a_(t_.a, t_.lda),
        lines_(t_.blocks[0].lines, t_.block_bytes),
        scales_(static_cast<const uint8_t*>(t_.blocks[0].group_scales), t_.block_bytes),
        ahead_(prefetch_ahead(t_, t_.ahead / (kLines * kLineBytes) * kLines)) {
    for (int r = 0; r < kRows; ++r) {
      for (int b = 0; b < kBlocks; ++b) total_.at[r][b] = _mm512_setzero_ps();
    }
  }

  __attribute__((always_inline)) void group(int64_t g) {
    const Streams<kBlocks> ahead(ahead_.take(kLines), t_.block_bytes);
    prefetch_next<kBlocks>(t_, g);
    if constexpr (by_byte(kFactors)) {
      if (g % kGroupsOfSuper == 0) read_supers(g / kGroupsOfSuper);
    }
    FewSums<kRows, kBlocks> sum;
    begin(g, sum);
    if constexpr (kBytes) {
      add_lines_of_bytes(ahead, sum);
    } else {
      add_lines_of_nibbles(ahead, sum);
    }
    finish(g, sum);
    a_.advance(kColumns * kCodeBytes);
    lines_.move(kLines * kLineBytes);
    scales_.move(kScaleBytes);
  }

  static void fetch(const Streams<kBlocks>& ahead, int line) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b)
      _mm_prefetch(reinterpret_cast<const char*>(ahead.of(b)) + line * kLineBytes, Dot::Ahead::kHint);
  }

  void read_supers(int64_t super) {
    const auto* scales = reinterpret_cast<const uint8_t*>(t_.blocks[0].supers + super * kBlockRows);
    const auto* least = reinterpret_cast<const uint8_t*>(t_.blocks[0].min_supers + super * kBlockRows);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      supers_.scale[b] = halves(reinterpret_cast<const uint16_t*>(scales + b * t_.block_bytes));
      if (kFactors == Factors::kByteMins)
        supers_.least[b] = halves(reinterpret_cast<const uint16_t*>(least + b * t_.block_bytes));
    }
  }

  void begin(int64_t g, FewSums<kRows, kBlocks>& sum) const {
    constexpr int32_t kZero = kFactors == Factors::kByteMins ? 0 : zero_of(kEncoding);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Lanes first = kZero ? Lanes(_mm512_set1_epi32(-kZero * t_.a_sums[r * t_.ld_groups + g])) : Lanes{};
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        sum.at[r][b][0] = first;
        if (kChains == 2) sum.at[r][b][1] = Lanes{};
      }
    }
  }

  void add_lines_of_bytes(const Streams<kBlocks>& ahead, FewSums<kRows, kBlocks>& sum) const {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) {
      fetch(ahead, i);
      __m512i w[kBlocks];
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) w[b] = _mm512_load_si512(lines_.of(b) + i * kLineBytes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto x = Dot::template codes<kEncoding>(a_.at(r) + i * 4 * kCodeBytes);
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
          Lanes& to = sum.at[r][b][i % kChains];
          to = Dot::add(to, w[b], x);
        }
      }
    }
  }

  void add_lines_of_nibbles(const Streams<kBlocks>& ahead, FewSums<kRows, kBlocks>& sum) const {
    __m512i high[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b)
      high[b] = Unit::kHighBits ? _mm512_load_si512(lines_.of(b) + Unit::kLines * kLineBytes) : _mm512_setzero_si512();
    if constexpr (Unit::kHighBits > 0) fetch(ahead, Unit::kLines);
    [&]<int... kLine>(std::integer_sequence<int, kLine...>) {
      (add_nibbles<kLine>(ahead, high, sum), ...);
    }(std::make_integer_sequence<int, Unit::kLines>{});
  }

  template <int kLine>
  void add_nibbles(const Streams<kBlocks>& ahead, const __m512i (&high)[kBlocks], FewSums<kRows, kBlocks>& sum) const {
    fetch(ahead, kLine);
    __m512i w[kBlocks][2];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const __m512i nibbles = _mm512_load_si512(lines_.of(b) + kLine * kLineBytes);
      w[b][0] = levels<Dot, kEncoding, 2 * kLine>(nibbles, high[b]);
      if constexpr (kHighInPlace) {
        w[b][1] = _mm512_and_si512(nibbles, _mm512_set1_epi8(static_cast<char>(0xf0)));
      } else {
        w[b][1] = levels<Dot, kEncoding, 2 * kLine + 1>(nibbles, high[b]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const auto* from = a_.at(r) + kLine * 8 * kCodeBytes;
      const typename Dot::template Codes<kEncoding> x[2] = {Dot::template codes<kEncoding>(from),
                                                            Dot::template codes<kEncoding>(from + 4 * kCodeBytes)};
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        auto& to = sum.at[r][b];
        if constexpr (kHighInPlace) {
          to[0] = Dot::add(to[0], w[b][0], x[0]);
          to[1] = Dot::add(to[1], w[b][1], x[1]);
        } else {
          to[kLine % kChains] = add_line_pair<Dot, kEncoding>(to[kLine % kChains], w[b], x);
        }
      }
    }
  }

  static __m512 all_of(const Lanes (&chains)[kChains]) {
    Lanes sum = chains[0];
    if constexpr (kChains == 2) sum += kHighInPlace ? chains[1] >> 4 : chains[1];
    return _mm512_cvtepi32_ps(__m512i(sum));
  }

  __m512 scale_of(int b) const {
    const uint8_t* from = scales_.of(b);
    if constexpr (kFactors == Factors::kHalf) return halves(reinterpret_cast<const uint16_t*>(from));
    if constexpr (kFactors == Factors::kExponent)
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(sixteen(from)), 23));
    if constexpr (kFactors == Factors::kFp8) return fp8_scales(from);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(from))), supers_.scale[b]);
  }

  void finish(int64_t g, const FewSums<kRows, kBlocks>& sum) {
    __m512 scale[kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) scale[b] = kFactors == Factors::kNone ? _mm512_set1_ps(1.0f) : scale_of(b);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512 row = _mm512_set1_ps(t_.a_scales[r * t_.ld_groups + g]);
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const __m512 factor = kFactors == Factors::kNone ? row : _mm512_mul_ps(scale[b], row);
        total_.at[r][b] = _mm512_fmadd_ps(all_of(sum.at[r][b]), factor, total_.at[r][b]);
      }
    }
    if constexpr (kFactors == Factors::kByteMins) subtract_minima(g);
  }

  // The minima are as far from the scales in each block.
  void subtract_minima(int64_t g) {
    const int64_t distance = t_.blocks[0].mins - static_cast<const uint8_t*>(t_.blocks[0].group_scales);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const __m512 bytes = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen(scales_.of(b) + distance)));
      const __m512 least = _mm512_mul_ps(bytes, supers_.least[b]);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const int64_t at = r * t_.ld_groups + g;
        const __m512 row = _mm512_set1_ps(t_.a_scales[at] * static_cast<float>(t_.a_sums[at]));
        total_.at[r][b] = _mm512_fnmadd_ps(least, row, total_.at[r][b]);
      }
    }
  }

  void store() const {
    for (int r = 0; r < kRows; ++r) {
      for (int b = 0; b < kBlocks; ++b)
        _mm512_storeu_ps(t_.c + r * t_.ldc + b * kBlockRows,
                         _mm512_mul_ps(total_.at[r][b], _mm512_loadu_ps(t_.blocks[b].row_scales)));
    }
  }

  const IntegerTile t_;  // a copy: stores of results might alias the caller's
  CodeRows<kRows> a_;
  Streams<kBlocks> lines_, scales_;
  PrefetchCursor ahead_;
  SuperFactors<kBlocks> supers_{};
  Totals<kRows, kBlocks> total_;
};

// A tile of few rows: by what its format has, or as many rows do.
template <class Dot, Encoding kEncoding, int kRows, int kBlocks>
void run_few(const IntegerTile& t) {
  constexpr bool kHalfUnit = kEncoding == Encoding::kInt6 || kEncoding == Encoding::kFp4By16;
  constexpr int64_t kUnit = kHalfUnit ? kQuantizeUnit / 2 : kQuantizeUnit;
  const Format& format = t.shape.format;
  const auto is = [&](Factors factors) {
    if (t.shape.activation_group() != kUnit || format.zero_points) return false;
    switch (factors) {
      case Factors::kNone:
        return format.group == 0;
      case Factors::kHalf:
        return format.group != 0 && format.scales == Scales::kHalf;
      case Factors::kExponent:
        return format.scales == Scales::kExponent;
      case Factors::kFp8:
        return format.scales == Scales::kFp8;
      default:
        return format.scales == Scales::kByte && format.mins == (factors == Factors::kByteMins);
    }
  };
  const auto run_if = [&]<Factors kFactors>() {
    if (!is(kFactors)) return false;
    FewRows<Dot, kEncoding, kFactors, kRows, kBlocks>::run(t);
    return true;
  };
  if constexpr (kEncoding == Encoding::kInt8) {
    if (run_if.template operator()<Factors::kNone>()) return;
  }
  if constexpr (kEncoding == Encoding::kInt8 || kEncoding == Encoding::kInt4 || kEncoding == Encoding::kInt5 ||
                kEncoding == Encoding::kIq4) {
    if (run_if.template operator()<Factors::kHalf>()) return;
  }
  if constexpr (kEncoding == Encoding::kInt4 || kEncoding == Encoding::kInt5) {
    if (run_if.template operator()<Factors::kByteMins>()) return;
  }
  if constexpr (kEncoding == Encoding::kInt6 || kEncoding == Encoding::kIq4) {
    if (run_if.template operator()<Factors::kByte>()) return;
  }
  if constexpr (kEncoding == Encoding::kFp4) {
    if (run_if.template operator()<Factors::kExponent>()) return;
  }
  if constexpr (kEncoding == Encoding::kFp4By16) {
    if (run_if.template operator()<Factors::kFp8>()) return;
  }
  run_groups<Dot, kEncoding, kRows, kBlocks, true>(t);
}

// Integer products (kernels/generic/integer.h) with `Dot`.
template <class Dot>
struct IntegerTiles {
  using Ahead = typename Dot::Ahead;
  static constexpr int kMaxRows = 6, kMaxBlocks = 2, kFewRows = 4;
  static constexpr int64_t kChunkBytes = 32768;
  static constexpr int few_blocks(int rows) { return rows == 1 ? 4 : 2; }

  template <Encoding kEncoding, int kRows, int kBlocks, bool kFew>
  static void tile(const IntegerTile& t) {
    if constexpr (kFew) {
      run_few<Dot, kEncoding, kRows, kBlocks>(t);
    } else {
      run_groups<Dot, kEncoding, kRows, kBlocks, false>(t);
    }
  }
};

}  // namespace
}  // namespace kt
