// csrc/kernels/amx/hardware/amx_primitives.h for any processor: a software model of the tile registers, plain loops for
// AVX-512, the portable kernels for everything else.
#pragma once

#include "base/bf16.h"
#include "base/fp16.h"
#include "kernels/amx/vectors.h"
#include "kernels/portable/kernels.h"
#include "tile_model.h"

#define KT_AMX_BUILD model

namespace kt::amx::inline model {

namespace base {

using namespace kt::portable;

static inline void transpose_rows_bf16(Rows<const float> in, int64_t rows, int64_t cols, uint16_t* out, int64_t ld) {
  const int64_t padded_rows = round_up(rows, kTokenUnit), padded_cols = round_up(cols, kBlockRows);
  for (int64_t n = 0; n < padded_cols; ++n) {
    for (int64_t m = 0; m < padded_rows; ++m)
      out[(n / 2 * ld + m) * 2 + n % 2] = n < cols && m < rows ? float_to_bf16(in.row(m)[n]) : uint16_t{0};
  }
}

}  // namespace base

namespace {

constexpr const char* kName = "amx-model";
constexpr uint32_t kRequired = 0;
constexpr bool kBaseHasSameBits = false;  // the portable kernels round products

inline void load_config(const void* config) { kt_test::tile_model::load_config(config); }
inline void release_tiles() { kt_test::tile_model::release(); }

template <int kTile>
inline void zero_tile() {
  kt_test::tile_model::zero(kTile);
}
template <int kTile>
inline void load_tile(const uint8_t* base, int64_t stride) {
  kt_test::tile_model::load(kTile, base, stride);
}
template <int kTile>
inline void store_tile(void* base, int64_t stride) {
  kt_test::tile_model::store(kTile, base, stride);
}

struct DotBf16 {
  template <int kC, int kA, int kB>
  static void run() {
    kt_test::tile_model::dot_bf16(kC, kA, kB);
  }
};
struct DotS8U8 {
  template <int kC, int kA, int kB>
  static void run() {
    kt_test::tile_model::dot_s8u8(kC, kA, kB);
  }
};
struct DotS8S8 {
  template <int kC, int kA, int kB>
  static void run() {
    kt_test::tile_model::dot_s8s8(kC, kA, kB);
  }
};

// Interface: kernels/portable/vector.h, as far as attention needs it.
struct PairLanes {
  using Reg = Floats;
  using Int = Ints;
  static constexpr int kLanes = 16;

  static Reg zero() { return Reg{}; }
  static Reg set(float value) { return Reg{} + value; }
  static Reg load(const float* from) { return kt::amx::load<Reg>(from); }
  static void store(float* to, const Reg& value) { kt::amx::store(value, to); }
  static Reg fma(const Reg& a, const Reg& b, const Reg& c) {
    Reg value;
    for (int i = 0; i < kLanes; ++i) value[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return value;
  }
  static Reg widen(const uint16_t* from) {
    Reg value;
    for (int i = 0; i < kLanes; ++i) value[i] = bf16_to_float(from[i]);
    return value;
  }
  static float sum(const Reg& value) {
    float total = 0;
    for (int i = 0; i < kLanes; ++i) total += value[i];
    return total;
  }
  static void transpose(Reg (&block)[kLanes]) {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < i; ++j) {
        const float other = block[i][j];
        block[i][j] = block[j][i];
        block[j][i] = other;
      }
    }
  }
  static Reg load_pairs(const uint16_t* from) { return kt::amx::load<Reg>(from); }
  static Reg load_some_pairs(const uint16_t* from, int64_t count) {
    Reg value{};
    std::memcpy(&value, from, static_cast<size_t>(2 * count));
    return value;
  }
};

inline void split_floats(const float* from, uint16_t* high, uint16_t* middle, uint16_t* low) {
  for (int i = 0; i < 16; ++i) {
    float left = from[i];
    for (uint16_t* to : {high, middle, low}) {
      to[i] = float_to_bf16(left);
      left -= bf16_to_float(to[i]);
    }
  }
}

template <class Each>
inline void interleave(const uint16_t* first, const uint16_t* second, int64_t count, uint8_t* left, uint8_t* right,
                       const Each& each) {
  for (int64_t i = 0; i < 32; ++i) {
    uint16_t pair[2] = {i < count ? first[i] : uint16_t{0}, i < count ? second[i] : uint16_t{0}};
    each(pair[0]);
    each(pair[1]);
    std::memcpy((i < 16 ? left : right) + 4 * (i % 16), pair, sizeof pair);
  }
}

inline void interleave_rows(const uint16_t* first, const uint16_t* second, int64_t count, uint8_t* left,
                            uint8_t* right) {
  interleave(first, second, count, left, right, [](uint16_t) {});
}

inline bool interleave_finite(const uint16_t* first, const uint16_t* second, int64_t count, uint8_t* left,
                              uint8_t* right) {
  bool is_bad = false;
  interleave(first, second, count, left, right, [&](uint16_t& bits) {
    if ((bits & 0x7f80) != 0x7f80) return;
    is_bad = true;
    bits = 0;
  });
  return is_bad;
}

inline Floats broadcast(const float* from) {
  Floats value;
  for (int i = 0; i < 16; ++i) value[i] = *from;
  return value;
}
inline Floats fused(const Floats& a, const Floats& b, const Floats& c) {
  Floats value;
  for (int i = 0; i < 16; ++i) value[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return value;
}
inline Floats floats_of_halves(const uint16_t* from) {
  Floats value;
  for (int i = 0; i < 16; ++i) value[i] = fp16_to_float(from[i]);
  return value;
}
inline void narrow_to_bf16(const Floats& value, uint8_t* to) {
  for (int i = 0; i < 16; ++i) {
    const uint16_t bits = float_to_bf16(value[i]);
    std::memcpy(to + 2 * i, &bits, sizeof bits);
  }
}

inline Bytes look_up_nibbles(const uint8_t* table, const Bytes& index) {
  Bytes found{};
  for (int i = 0; i < 64; ++i) found[i] = table[index[i]];
  return found;
}

inline void look_up_fp8(const uint8_t* line, const uint8_t* low, const uint8_t* high, uint8_t* out) {
  for (int lane = 0; lane < 4; ++lane) {
    for (int i = 0; i < 16; ++i) {
      const uint8_t code = line[16 * lane + i];
      uint8_t* to = out + i / 8 * kLineBytes + 16 * lane + 2 * (i % 8);
      to[0] = low[code & 127];
      to[1] = static_cast<uint8_t>(high[code & 127] | (code & 128));
    }
  }
}

}  // namespace
}  // namespace kt::amx::inline model
