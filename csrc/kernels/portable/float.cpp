// Plain C++ for any processor; also the reference that the other kernels are compared with.
// Register tile 2 x 16 in compiler vectors of four floats (SSE2 on x86-64, NEON on Arm): 8 accumulators, 4 vectors of
// weights, 1 activation. Multiply and add round separately. Layout: kernels/layout.h.
#include "base/fp16.h"
#include "kernels/generic/float_products.h"
#include "kernels/portable/kernels.h"

namespace kt {
namespace {

struct Vec4 {
  using Element = float;
  using Reg = float __attribute__((vector_size(16)));
  using Int = int32_t __attribute__((vector_size(16)));
  using Short = int16_t __attribute__((vector_size(16)));
  using Unpacked = FloatLines<Vec4>;
  static constexpr int kDepth = 1, kLanes = 4, kTileRows = 2, kFewRows = 2, kDecodeRows = 2, kSums = 8, kDecodeSums = 8;
  static constexpr int64_t kPanelBlocks = 1, kPanelColumns = 256, kAheadBytes = 2048;

  static Reg zero() { return Reg{}; }
  static Reg set(float value) { return Reg{value, value, value, value}; }
  static Reg load(const float* from) {
    Reg value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
  }
  static void store(float* to, Reg value) { __builtin_memcpy(to, &value, sizeof value); }
  static Reg broadcast(const float* from) { return set(*from); }
  static Reg fma(Reg a, Reg b, Reg c) { return a * b + c; }
  static Reg dot(Reg a, Reg b, Reg sum) { return fma(a, b, sum); }
  static Reg halves(const uint16_t* from) {
    return Reg{fp16_to_float(from[0]), fp16_to_float(from[1]), fp16_to_float(from[2]), fp16_to_float(from[3])};
  }
  static Reg bytes(const uint8_t* from) {
    return Reg{static_cast<float>(from[0]), static_cast<float>(from[1]), static_cast<float>(from[2]),
               static_cast<float>(from[3])};
  }
  static Int high_bytes(const uint8_t* from, int half) {
    Short value;
    for (int i = 0; i < 8; ++i) value[i] = static_cast<int16_t>(from[8 * half + i] << 8);
    return (Int)value;
  }
};

}  // namespace

void portable::multiply(const PackedProduct<float>& p) { multiply_any<Vec4>(p); }

}  // namespace kt
