// Encodings whose codes lie in lines of nibbles, perhaps followed by a line of their high bits (kernels/layout.h).
#pragma once

#include "kernels/layout.h"

namespace kt {
namespace {

// A unit of these lines: 32 columns, or 16.
template <Encoding kEncoding>
struct Nibbles {
  static constexpr int kLines = kEncoding == Encoding::kInt6 || kEncoding == Encoding::kFp4By16 ? 2 : 4;
  static constexpr int kHighBits = kEncoding == Encoding::kInt5 ? 1 : kEncoding == Encoding::kInt6 ? 2 : 0;
  static constexpr int kHighMask = kHighBits == 1 ? 0x10 : 0x30;
  static constexpr int kAllLines = kLines + (kHighBits ? 1 : 0), kColumns = 8 * kLines;
  // Where the high bits of step `step` (four columns) lie above bit 4 of their byte.
  static constexpr int high_shift(int step) { return kHighBits * step - 4; }
};

// Whether a weight is decoded from such a unit, with its group's scale and minimum: all of these encodings, but int4
// whose scales are float16 (decoders.h).
constexpr bool decoded_by_unit(const Format& format) {
  return format.encoding == Encoding::kInt5 || format.encoding == Encoding::kInt6 ||
         levels_of_nibbles(format.encoding) != nullptr ||
         (format.encoding != Encoding::kFp8 && format.scales != Scales::kHalf);
}

}  // namespace
}  // namespace kt
