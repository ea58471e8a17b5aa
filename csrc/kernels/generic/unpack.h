// Packed weights to rows of float32: out[r * ld + c] = W(16 * block + r, first_col + c), r < 16, for c < cols, with the
// scales. first_col and cols are multiples of 32. Columns are decoded as in decoders.h, a vector holding some rows of
// a column, and transposed in registers.
//
// V: as in decoders.h, and transpose(block), block[i] lane j <-> block[j] lane i.
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "kernels/generic/decoders.h"

namespace kt {
namespace {

// Columns of one group. kScaled: row scales are there; kGroups: scales of groups too.
template <class V, class Source, bool kScaled, bool kGroups>
inline void unpack_lines(const Parts& parts, const uint8_t* block, int64_t g, int64_t first_col, int64_t cols,
                         float* out, int64_t ld) {
  const uint8_t *lines = block + parts.lines + first_col / Source::kColumns * kLineBytes,
                *scales = block + parts.group_scales;
  for (int v = 0; v < kBlockRows / V::kLanes; ++v, out += V::kLanes * ld) {
    const typename Source::Group group = Source::group(parts, block, g, v);
    typename V::Reg row_scale{}, group_scale{};
    if (kScaled) row_scale = V::load(reinterpret_cast<const float*>(block) + v * V::kLanes);
    if (kGroups) {
      group_scale = parts.encoding == Encoding::kFp8
                        ? V::set(reinterpret_cast<const float*>(scales)[g])
                        : V::halves(reinterpret_cast<const uint16_t*>(scales) + g * kBlockRows + v * V::kLanes);
    }
    for (int64_t c = 0; c < cols; c += 8) {
      const uint8_t* line = lines + c / Source::kColumns * kLineBytes;
#pragma GCC unroll 2
      for (int half = 0; half < 8; half += V::kLanes) {
        typename V::Reg columns[V::kLanes];
#pragma GCC unroll 8
        for (int i = 0; i < V::kLanes; ++i) {
          const int col = half + i;
          columns[i] = Source::weights(line + col / Source::kColumns * kLineBytes, col % Source::kColumns, v, group);
          if (kGroups) columns[i] = columns[i] * group_scale;
          if (kScaled) columns[i] = columns[i] * row_scale;
        }
        V::transpose(columns);
#pragma GCC unroll 8
        for (int i = 0; i < V::kLanes; ++i) V::store(out + i * ld + c + half, columns[i]);
      }
    }
  }
}

template <class V, class Source>
void unpack_groups(const Parts& parts, const uint8_t* block, int64_t first_col, int64_t cols, float* out, int64_t ld) {
  if (parts.group == 0) return unpack_lines<V, Source, true, false>(parts, block, 0, first_col, cols, out, ld);
  for (int64_t c = 0; c < cols;) {
    const int64_t g = (first_col + c) / parts.group, left = (g + 1) * parts.group - first_col - c;
    const int64_t count = left < cols - c ? left : cols - c;
    unpack_lines<V, Source, true, true>(parts, block, g, first_col + c, count, out + c, ld);
    c += count;
  }
}

template <class V>
void unpack_rows(const Parts& parts, const uint8_t* block, int64_t first_col, int64_t cols, float* out, int64_t ld) {
  switch (parts.encoding) {
    case Encoding::kBf16:
      return unpack_lines<V, Bf16Lines<V>, false, false>(parts, block, 0, first_col, cols, out, ld);
    case Encoding::kFp8:
      return unpack_groups<V, Fp8Lines<V>>(parts, block, first_col, cols, out, ld);
    case Encoding::kInt8:
      return unpack_groups<V, Int8Lines<V>>(parts, block, first_col, cols, out, ld);
    case Encoding::kInt4:
      return unpack_groups<V, Int4Lines<V>>(parts, block, first_col, cols, out, ld);
  }
}

}  // namespace
}  // namespace kt
