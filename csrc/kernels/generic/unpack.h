// Packed weights to rows of float32: out[r, c] = W(16 * block + r, columns.first + c), r < 16, for c < columns.count,
// with the scales. Columns are given in multiples of 32. Columns are decoded as in decoders.h, a vector holding some
// rows of a column, and transposed in registers. Units of nibbles (nibbles.h) are decoded with scale and minimum of
// their group: (level - zero) * scale - minimum, each step in float32.
//
// V: as in decoders.h, and transpose(block), block[i] lane j <-> block[j] lane i; look_up(table, index).
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>
#include <utility>

#include "base/rows.h"
#include "kernels/generic/decoders.h"
#include "kernels/generic/nibbles.h"

namespace kt {
namespace {

// All columns in one group. kScaled: row scales are there; kGroups: scales of groups too.
template <class V, class Source, bool kScaled, bool kGroups>
inline void unpack_lines(const Parts& parts, const uint8_t* block, int64_t g, ColumnRange columns, Rows<float> out) {
  const uint8_t* lines = block + parts.lines + columns.first / Source::kColumns * kLineBytes;
  for (int v = 0; v < kBlockRows / V::kLanes; ++v, out = out.from(V::kLanes)) {
    const typename Source::Group group = Source::group(parts, block, g, v);
    typename V::Reg row_scale{}, group_scale{};
    if (kScaled) row_scale = V::load(reinterpret_cast<const float*>(block) + v * V::kLanes);
    if (kGroups) group_scale = group_scales<V>(parts, block, g, v);
    for (int64_t c = 0; c < columns.count; c += 8) {
      const uint8_t* line = lines + c / Source::kColumns * kLineBytes;
#pragma GCC unroll 2
      for (int half = 0; half < 8; half += V::kLanes) {
        typename V::Reg values[V::kLanes];
#pragma GCC unroll 8
        for (int i = 0; i < V::kLanes; ++i) {
          const int col = half + i;
          values[i] = Source::weights(line + col / Source::kColumns * kLineBytes, col % Source::kColumns, v, group);
          if (kGroups) values[i] = values[i] * group_scale;
          if (kScaled) values[i] = values[i] * row_scale;
        }
        V::transpose(values);
#pragma GCC unroll 8
        for (int i = 0; i < V::kLanes; ++i) V::store(out.row(i) + c + half, values[i]);
      }
    }
  }
}

template <class V, class Source>
void unpack_groups(const Parts& parts, const uint8_t* block, ColumnRange columns, Rows<float> out) {
  if (parts.group == 0) return unpack_lines<V, Source, true, false>(parts, block, 0, columns, out);
  const int64_t end = columns.first + columns.count;
  for (int64_t col = columns.first; col < end;) {
    const int64_t g = col / parts.group, next = (g + 1) * parts.group < end ? (g + 1) * parts.group : end;
    unpack_lines<V, Source, true, true>(parts, block, g, {col, next - col}, out.from(0, col - columns.first));
    col = next;
  }
}

// What eight columns of a unit share for one vector of a block's rows.
template <class V>
struct GroupFactors {
  typename V::Reg scale, least, row_scale;

  GroupFactors(const Parts& parts, const uint8_t* block, int64_t g, int v) {
    const int64_t at = g * kBlockRows + v * V::kLanes;
    const int64_t super = (g * parts.group / kSuperGroup * kBlockRows + v * V::kLanes) * 2;
    row_scale = V::load(reinterpret_cast<const float*>(block) + v * V::kLanes);
    scale = V::set(1.0f);
    least = V::zero();
    const uint8_t* scales = block + parts.group_scales;
    const auto halves = [&](int64_t offset) { return V::halves(reinterpret_cast<const uint16_t*>(block + offset)); };
    if (parts.format.scales == Scales::kByte) {
      scale = V::signed_bytes(scales + at) * halves(parts.supers + super);
    } else if (parts.format.scales == Scales::kExponent) {
      scale = exponents<V>(scales + at);
    } else if (parts.format.scales == Scales::kFp8) {
      // Where a float has the code's bits, they are the value times 2^-120, subnormals too.
      scale = (typename V::Reg)(__builtin_convertvector(V::bytes(scales + at), typename V::Int) << 20) * 0x1p120f;
    } else if (parts.group) {
      scale = halves(parts.group_scales + 2 * at);
    }
    if (parts.format.mins) least = V::bytes(block + parts.zeros + at) * halves(parts.min_supers + super);
  }
};

struct Iq4Values {
  alignas(64) float of[16] = {};
  constexpr Iq4Values() {
    for (int i = 0; i < 16; ++i) of[i] = static_cast<float>(kIq4Levels[i] - zero_of(Encoding::kIq4));
  }
};
constexpr Iq4Values kIq4Values;

// Level minus zero of column 8 * kPart + col of a unit, for vector v.
template <class V, Encoding kEncoding, int kPart>
inline typename V::Reg level(const uint8_t* unit, int col, int v, float zero) {
  using Unit = Nibbles<kEncoding>;
  const int bit = col % 4 * 8, step = 2 * kPart + col / 4;
  const int64_t offset = v * 4 * V::kLanes;
  const typename V::Int nibble = load_ints<V>(unit + kPart * kLineBytes + offset) >> (bit + col / 4 * 4) & 15;
  if constexpr (kEncoding == Encoding::kIq4) return V::look_up(kIq4Values.of, nibble);
  if constexpr (is_fp4(kEncoding)) {
    // Twice the value: its bits where a float has them, as fp8's in decoders.h. The sum makes the zero of code 8 a +0.
    return (typename V::Reg)((nibble & 7) << 22 | (nibble & 8) << 28) * 0x1p127f + V::zero();
  }
  typename V::Int code = nibble;
  if constexpr (Unit::kHighBits > 0) {
    const typename V::Int high = load_ints<V>(unit + Unit::kLines * kLineBytes + offset);
    code |= (high >> (bit + Unit::kHighBits * step) & ((1 << Unit::kHighBits) - 1)) << 4;
  }
  return code_on_power<V>(code, 63, 0) - (0x1p23f + zero);
}

// Eight columns of a unit, all rows.
template <class V, Encoding kEncoding, int kPart>
inline void unpack_part(const Parts& parts, const uint8_t* unit, const GroupFactors<V>& group, int v, Rows<float> out) {
#pragma GCC unroll 2
  for (int half = 0; half < 8; half += V::kLanes) {
    typename V::Reg values[V::kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < V::kLanes; ++i) {
      values[i] = level<V, kEncoding, kPart>(unit, half + i, v, parts.zero) * group.scale - group.least;
      values[i] = values[i] * group.row_scale;
    }
    V::transpose(values);
#pragma GCC unroll 8
    for (int i = 0; i < V::kLanes; ++i) V::store(out.row(i) + 8 * kPart + half, values[i]);
  }
}

template <class V, Encoding kEncoding>
void unpack_nibbles(const Parts& parts, const uint8_t* block, ColumnRange columns, Rows<float> out) {
  using Unit = Nibbles<kEncoding>;
  for (int64_t c = 0; c < columns.count; c += Unit::kColumns) {
    const int64_t col = columns.first + c;
    const uint8_t* unit = block + parts.lines + col / Unit::kColumns * Unit::kAllLines * kLineBytes;
    for (int v = 0; v < kBlockRows / V::kLanes; ++v) {
      const GroupFactors<V> group(parts, block, parts.group ? col / parts.group : 0, v);
      [&]<int... kPart>(std::integer_sequence<int, kPart...>) {
        (unpack_part<V, kEncoding, kPart>(parts, unit, group, v, out.from(v * V::kLanes, c)), ...);
      }(std::make_integer_sequence<int, Unit::kLines>{});
    }
  }
}

template <class V>
void unpack_rows(const Parts& parts, const uint8_t* block, ColumnRange columns, Rows<float> out) {
  switch (parts.encoding) {
    case Encoding::kBf16:
      return unpack_lines<V, Bf16Lines<V>, false, false>(parts, block, 0, columns, out);
    case Encoding::kFp8:
      return unpack_groups<V, Fp8Lines<V>>(parts, block, columns, out);
    case Encoding::kInt8:
      return unpack_groups<V, Int8Lines<V>>(parts, block, columns, out);
    case Encoding::kInt4:
      if (decoded_by_unit(parts.format)) return unpack_nibbles<V, Encoding::kInt4>(parts, block, columns, out);
      return unpack_groups<V, Int4Lines<V>>(parts, block, columns, out);
    case Encoding::kInt5:
      return unpack_nibbles<V, Encoding::kInt5>(parts, block, columns, out);
    case Encoding::kInt6:
      return unpack_nibbles<V, Encoding::kInt6>(parts, block, columns, out);
    case Encoding::kFp4:
      return unpack_nibbles<V, Encoding::kFp4>(parts, block, columns, out);
    case Encoding::kFp4By16:
      return unpack_nibbles<V, Encoding::kFp4By16>(parts, block, columns, out);
    case Encoding::kIq4:
      return unpack_nibbles<V, Encoding::kIq4>(parts, block, columns, out);
  }
}

}  // namespace
}  // namespace kt
