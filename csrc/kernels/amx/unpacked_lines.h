// Packed lines to lines that tiles read. fp8 (4 columns): two lines of bf16 (2 columns each); exact, as every fp8
// number is a bf16. Integers: lines of 4 columns of signed bytes, the level minus the zero.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/amx/kernels.h"
#include "kernels/generic/fp8_bytes.h"
#include "kernels/generic/nibbles.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

inline void unpack_fp8_line(const uint8_t* line, uint8_t* out) {
  look_up_fp8(line, kFp8Bytes.low, kFp8Bytes.high, out);
}

// `cols` columns, a multiple of 4, from the line that `lines` points to; lines `ahead` bytes away are prefetched.
inline void unpack_fp8(const uint8_t* lines, int64_t cols, uint8_t* out, int64_t ahead) {
  for (int64_t line = 0; line < cols / 4; ++line) {
    __builtin_prefetch(lines + line * kLineBytes + ahead);
    unpack_fp8_line(lines + line * kLineBytes, out + 2 * line * kLineBytes);
  }
}

// Zero 128: the top bit.
struct UnpackInt8 {
  static constexpr int64_t kColumns = 4, kLines = 1;
  static void unit(const uint8_t* from, const Ints&, uint8_t* to) { store(load<Bytes>(from) ^ 128, to); }
};

struct Iq4Values {
  alignas(16) uint8_t of[16] = {};
  constexpr Iq4Values() {
    for (int i = 0; i < 16; ++i) of[i] = static_cast<uint8_t>(kIq4Levels[i] - zero_of(Encoding::kIq4));
  }
};
constexpr Iq4Values kIq4Values;

// e2m1 without its sign, doubled: 0, 1, 2, 3, 4, 6, 8, 12.
inline Bytes fp4_magnitudes(const Bytes& code) {
  const Bytes above = (Bytes)(code > 4) & (code - 4);
  return code + above + ((Bytes)(code == 7) & 2);
}

template <Encoding kEncoding>
struct UnpackNibbles {
  using Unit = Nibbles<kEncoding>;
  static constexpr int64_t kColumns = Unit::kColumns, kLines = Unit::kAllLines;

  static void unit(const uint8_t* from, const Ints& zeros, uint8_t* to) {
    const auto zero = (Bytes)(zeros * 0x01010101);  // four times each
    Bytes high{};
    if constexpr (Unit::kHighBits > 0) high = load<Bytes>(from + Unit::kLines * kLineBytes);
    [&]<int... kLine>(std::integer_sequence<int, kLine...>) {
      (line<kLine>(load<Bytes>(from + kLine * kLineBytes), high, zero, to + 2 * kLine * kLineBytes), ...);
    }(std::make_integer_sequence<int, Unit::kLines>{});
  }

 private:
  template <int kLine>
  static void line(const Bytes& nibbles, const Bytes& high, const Bytes& zero, uint8_t* to) {
    store(signed_level<2 * kLine>(nibbles & 15, high, zero), to);
    store(signed_level<2 * kLine + 1>(nibbles >> 4, high, zero), to + kLineBytes);
  }

  template <int kStep>
  static Bytes signed_level(Bytes code, const Bytes& high, const Bytes& zero) {
    if constexpr (kEncoding == Encoding::kIq4) return look_up_nibbles(kIq4Values.of, code);
    if constexpr (is_fp4(kEncoding)) {
      const Bytes minus = -(code >> 3);
      return (fp4_magnitudes(code & 7) ^ minus) - minus;
    }
    if constexpr (Unit::kHighBits > 0) {
      constexpr int kShift = Unit::high_shift(kStep);
      if constexpr (kShift > 0) code |= high >> kShift & Unit::kHighMask;
      if constexpr (kShift <= 0) code |= high << -kShift & Unit::kHighMask;
    }
    return code - zero;
  }
};

// The scales of group g in the rows of a block.
inline Floats group_scales(const PackedShape& shape, const Block& block, int64_t g) {
  if (block.group_scales == nullptr) return Floats{} + 1.0f;
  if (shape.format.block_scales()) return Floats{} + static_cast<const float*>(block.group_scales)[g];
  const auto* bytes = static_cast<const uint8_t*>(block.group_scales) + g * kBlockRows;
  switch (shape.format.scales) {
    case Scales::kByte: {
      const Ints scales = ((ints_of_bytes(bytes) ^ 128) - 128);
      return floats_of(scales) * floats_of_halves(block.supers + g * shape.group() / kSuperGroup * kBlockRows);
    }
    case Scales::kExponent:
      return (Floats)(ints_of_bytes(bytes) << 23);
    case Scales::kFp8:  // where a float has the code's bits, they are the value times 2^-120, subnormals too
      return (Floats)(ints_of_bytes(bytes) << 20) * 0x1p120f;
    default:
      return floats_of_halves(static_cast<const uint16_t*>(block.group_scales) + g * kBlockRows);
  }
}

// The minima; zeros where a format has none.
inline Floats group_minima(const PackedShape& shape, const Block& block, int64_t g) {
  if (block.mins == nullptr) return Floats{};
  return floats_of(ints_of_bytes(block.mins + g * kBlockRows)) *
         floats_of_halves(block.min_supers + g * shape.group() / kSuperGroup * kBlockRows);
}

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
