// Plain C++ for any processor; also the reference that the other kernels are compared with.
// Register tile 2 x 16 in vectors of four floats (SSE2 on x86-64, NEON on Arm). Multiply and add round separately.
#include "base/bf16.h"
#include "kernels/generic/products.h"

namespace kt {
namespace {

struct Vec4 {
  using Reg = float __attribute__((vector_size(16), aligned(4), may_alias));
  static constexpr int kLanes = 4, kMaxRows = 2, kMaxSums = 8, kPlainVectors = 2, kBlocksAtOnce = 1;

  static Reg zero() { return Reg{}; }
  static Reg load(const float* from) { return *reinterpret_cast<const Reg*>(from); }
  static Reg load_partial(const float* from, int count) {
    Reg value{};
    for (int i = 0; i < count; ++i) value[i] = from[i];
    return value;
  }
  static void store(float* to, Reg value) { *reinterpret_cast<Reg*>(to) = value; }
  static void store_partial(float* to, Reg value, int count) {
    for (int i = 0; i < count; ++i) to[i] = value[i];
  }
  static Reg broadcast(float value) { return Reg{value, value, value, value}; }
  static Reg fma(Reg a, Reg b, Reg c) { return a * b + c; }
  static Reg even(const uint16_t* line) { return widen(line, 0); }
  static Reg odd(const uint16_t* line) { return widen(line, 1); }

 private:
  static Reg widen(const uint16_t* line, int parity) {
    return Reg{bf16_to_float(line[parity]), bf16_to_float(line[2 + parity]), bf16_to_float(line[4 + parity]),
               bf16_to_float(line[6 + parity])};
  }
};

void unpack_rows(const uint16_t* block, int64_t first_pair, int64_t num_pairs, float* out, int64_t ld) {
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const uint16_t* line = block + (first_pair + pair) * kLine;
    for (int64_t i = 0; i < kBlockRows; ++i) {
      out[i * ld + 2 * pair] = bf16_to_float(line[2 * i]);
      out[i * ld + 2 * pair + 1] = bf16_to_float(line[2 * i + 1]);
    }
  }
}

}  // namespace

extern const Tiles kPortableTiles;
const Tiles kPortableTiles = {"portable", 0, multiply_packed<Vec4>, nullptr, unpack_rows, multiply_plain<Vec4>};

}  // namespace kt
