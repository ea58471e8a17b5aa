// The scale and the minimum of one group in one row of a block, exact in float32. Not of formats whose blocks share
// scales.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/fp16.h"
#include "base/fp8.h"
#include "kernels/layout.h"

namespace kt {
namespace {

// block.group_scales is there.
inline float group_scale(const Format& format, const Block& block, int64_t g, int64_t r) {
  const int64_t at = g * kBlockRows + r;
  const auto* bytes = static_cast<const uint8_t*>(block.group_scales) + at;
  switch (format.scales) {
    case Scales::kByte:
      return static_cast<float>(static_cast<int8_t>(*bytes)) *
             fp16_to_float(block.supers[g * format.group / kSuperGroup * kBlockRows + r]);
    case Scales::kExponent: {
      const uint32_t bits = static_cast<uint32_t>(*bytes) << 23;
      float scale;
      std::memcpy(&scale, &bits, sizeof scale);
      return scale;
    }
    case Scales::kFp8:
      return fp8_to_float(*bytes);
    default:
      return fp16_to_float(static_cast<const uint16_t*>(block.group_scales)[at]);
  }
}

// block.mins is there.
inline float group_min(const Format& format, const Block& block, int64_t g, int64_t r) {
  return static_cast<float>(block.mins[g * kBlockRows + r]) *
         fp16_to_float(block.min_supers[g * format.group / kSuperGroup * kBlockRows + r]);
}

}  // namespace
}  // namespace kt
