#include "weights/checkpoint/gguf_blocks.h"

#include <cstring>

#include "base/fp16.h"

namespace kt {
namespace {

constexpr Format kHalves8{.encoding = Encoding::kInt8, .group = 32};
constexpr Format kHalves4{.encoding = Encoding::kInt4, .group = 32};
constexpr Format kHalves5{.encoding = Encoding::kInt5, .group = 32};
constexpr Format kExponents{.encoding = Encoding::kFp4, .group = 32, .scales = Scales::kExponent};
constexpr Format k4{.encoding = Encoding::kInt4, .group = 32, .scales = Scales::kByte, .mins = true};
constexpr Format k5{.encoding = Encoding::kInt5, .group = 32, .scales = Scales::kByte, .mins = true};
constexpr Format k6{.encoding = Encoding::kInt6, .group = 16, .scales = Scales::kByte};
constexpr Format kNonlinear{.encoding = Encoding::kIq4, .group = 32};
constexpr Format kNonlinearSuper{.encoding = Encoding::kIq4, .group = 32, .scales = Scales::kByte};

constexpr GgufType kTypes[] = {
    {"BF16", {.encoding = Encoding::kBf16}, 1, 2},
    {"Q8_0", kHalves8, 32, 34},
    {"Q4_0", kHalves4, 32, 18},
    {"Q5_0", kHalves5, 32, 22},
    {"MXFP4", kExponents, 32, 17},
    {"Q4_K", k4, 256, 144},
    {"Q5_K", k5, 256, 176},
    {"Q6_K", k6, 256, 210},
    {"IQ4_NL", kNonlinear, 32, 18},
    {"IQ4_XS", kNonlinearSuper, 256, 136},
};

uint16_t half_at(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}
bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// Bytes of two nibbles -> the low ones, and `apart` codes further the high ones.
void unpack_nibbles(const uint8_t* from, int64_t count, int64_t apart, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = from[i] & 15;
    codes[i + apart] = from[i] >> 4;
  }
}

bool unpack_q8_0(const uint8_t* block, GgufParts& to) {
  *to.scales++ = fp16_to_float(half_at(block));
  for (int i = 0; i < 32; ++i) to.codes[i] = block[2 + i] ^ 0x80;
  return is_finite(half_at(block));
}

bool unpack_q4_0(const uint8_t* block, GgufParts& to) {
  *to.scales++ = fp16_to_float(half_at(block));
  unpack_nibbles(block + 2, 16, 16, to.codes);
  return is_finite(half_at(block));
}

bool unpack_q5_0(const uint8_t* block, GgufParts& to) {
  *to.scales++ = fp16_to_float(half_at(block));
  unpack_nibbles(block + 6, 16, 16, to.codes);
  for (int i = 0; i < 32; ++i) to.codes[i] = static_cast<uint8_t>(to.codes[i] | (block[2 + i / 8] >> (i % 8) & 1) << 4);
  return is_finite(half_at(block));
}

// Twice a value is a level of ours, so the exponent is one less. A scale of 2^-127 or less becomes 0.
bool unpack_mxfp4(const uint8_t* block, GgufParts& to) {
  *to.scale_bytes++ = block[0] ? static_cast<uint8_t>(block[0] - 1) : 0;
  unpack_nibbles(block + 1, 16, 16, to.codes);
  return block[0] <= kMostExponent;
}

// Eight pairs of 6 bits in 12 bytes: the first four in the low bits of bytes 0..3 (s) and 4..7 (m); of the others four
// bits in bytes 8..11 (s low, m high), two in the high bits of bytes 0..3 and 4..7.
void unpack_scale_pairs(const uint8_t* from, uint8_t* scales, uint8_t* mins) {
  for (int i = 0; i < 4; ++i) {
    scales[i] = from[i] & 63;
    mins[i] = from[4 + i] & 63;
    scales[4 + i] = static_cast<uint8_t>((from[8 + i] & 15) | from[i] >> 6 << 4);
    mins[4 + i] = static_cast<uint8_t>(from[8 + i] >> 4 | from[4 + i] >> 6 << 4);
  }
}

bool begin_pairs(const uint8_t* block, GgufParts& to) {
  *to.supers++ = half_at(block);
  *to.min_supers++ = half_at(block + 2);
  unpack_scale_pairs(block + 4, to.scale_bytes, to.mins);
  to.scale_bytes += 8;
  to.mins += 8;
  return is_finite(half_at(block)) && is_finite(half_at(block + 2));
}

bool unpack_q4_k(const uint8_t* block, GgufParts& to) {
  for (int c = 0; c < 4; ++c) unpack_nibbles(block + 16 + 32 * c, 32, 32, to.codes + 64 * c);
  return begin_pairs(block, to);
}

bool unpack_q5_k(const uint8_t* block, GgufParts& to) {
  const uint8_t* high = block + 16;
  for (int c = 0; c < 4; ++c) {
    uint8_t* codes = to.codes + 64 * c;
    unpack_nibbles(block + 48 + 32 * c, 32, 32, codes);
    for (int i = 0; i < 64; ++i)
      codes[i] = static_cast<uint8_t>(codes[i] | (high[i % 32] >> (2 * c + i / 32) & 1) << 4);
  }
  return begin_pairs(block, to);
}

bool unpack_q6_k(const uint8_t* block, GgufParts& to) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
    uint8_t* codes = to.codes + 128 * half;
    unpack_nibbles(low, 64, 64, codes);
    for (int i = 0; i < 128; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (high[i % 32] >> (2 * (i / 32)) & 3) << 4);
  }
  std::memcpy(to.scale_bytes, block + 192, 16);
  to.scale_bytes += 16;
  *to.supers++ = half_at(block + 208);
  return is_finite(half_at(block + 208));
}

bool unpack_iq4_xs(const uint8_t* block, GgufParts& to) {
  const uint32_t high = half_at(block + 2);
  for (int g = 0; g < 8; ++g) {
    const uint32_t scale = (block[4 + g / 2] >> (4 * (g % 2)) & 15u) | (high >> (2 * g) & 3u) << 4;
    *to.scale_bytes++ = static_cast<uint8_t>(scale - 32);
    unpack_nibbles(block + 8 + 16 * g, 16, 16, to.codes + 32 * g);
  }
  *to.supers++ = half_at(block);
  return is_finite(half_at(block));
}

using Unpack = bool (*)(const uint8_t* block, GgufParts& to);

Unpack unpacker_of(const Format& format) {
  if (format == kHalves8) return unpack_q8_0;
  if (format == kHalves4 || format == kNonlinear) return unpack_q4_0;
  if (format == kNonlinearSuper) return unpack_iq4_xs;
  if (format == kHalves5) return unpack_q5_0;
  if (format == kExponents) return unpack_mxfp4;
  if (format == k4) return unpack_q4_k;
  return format == k5 ? unpack_q5_k : unpack_q6_k;
}

}  // namespace

const GgufType* find_gguf_type(const std::string& name) {
  for (const GgufType& type : kTypes) {
    if (name == type.name) return &type;
  }
  return nullptr;
}

std::string known_gguf_types() {
  std::string text;
  for (const GgufType& type : kTypes) text += (text.empty() ? "" : ", ") + std::string(type.name);
  return text;
}

int64_t unpack_gguf(const GgufType& type, const uint8_t* blocks, int64_t count, GgufParts parts) {
  const Unpack unpack = unpacker_of(type.format);
  for (int64_t i = 0; i < count; ++i, blocks += type.bytes, parts.codes += type.columns) {
    if (!unpack(blocks, parts)) return i;
  }
  return -1;
}

}  // namespace kt
