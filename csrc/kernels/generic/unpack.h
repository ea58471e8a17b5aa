// Packed weights to rows of float32: out[r, c] = W(16 * block + r, columns.first + c), r < 16, for c < columns.count,
// with the scales. Columns are given in multiples of 32. Columns are decoded as in decoders.h, a vector holding some
// rows of a column, and transposed in registers.
//
// V: as in decoders.h, and transpose(block), block[i] lane j <-> block[j] lane i.
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "base/rows.h"
#include "kernels/generic/decoders.h"

namespace kt {
namespace {

// All columns in one group. kScaled: row scales are there; kGroups: scales of groups too.
template <class V, class Source, bool kScaled, bool kGroups>
inline void unpack_lines(const Parts& parts, const uint8_t* block, int64_t g, ColumnRange columns, Rows<float> out) {
  const uint8_t *lines = block + parts.lines + columns.first / Source::kColumns * kLineBytes,
                *scales = block + parts.group_scales;
  for (int v = 0; v < kBlockRows / V::kLanes; ++v, out = out.from(V::kLanes)) {
    const typename Source::Group group = Source::group(parts, block, g, v);
    typename V::Reg row_scale{}, group_scale{};
    if (kScaled) row_scale = V::load(reinterpret_cast<const float*>(block) + v * V::kLanes);
    if (kGroups) {
      group_scale = parts.encoding == Encoding::kFp8
                        ? V::set(reinterpret_cast<const float*>(scales)[g])
                        : V::halves(reinterpret_cast<const uint16_t*>(scales) + g * kBlockRows + v * V::kLanes);
    }
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
      return unpack_groups<V, Int4Lines<V>>(parts, block, columns, out);
  }
}

}  // namespace
}  // namespace kt
