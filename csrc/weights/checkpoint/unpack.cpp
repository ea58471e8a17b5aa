#include "weights/checkpoint/unpack.h"

#include <algorithm>
#include <cstring>

#include "base/bf16.h"
#include "base/fp16.h"
#include "base/fp8.h"

namespace kt {
namespace {

constexpr int64_t kTileCols = 64;  // a cache line of codes of each row is written at once

// Spreads the nibbles of a word: nibble i, at bit 4 i, becomes byte i.
uint64_t spread_nibbles(uint32_t word) {
  uint64_t x = word;
  x = (x | x << 16) & 0x0000ffff0000ffffu;
  x = (x | x << 8) & 0x00ff00ff00ff00ffu;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
}

}  // namespace

int64_t first_not_finite(const uint16_t* bf16, int64_t count) {
  constexpr int64_t kChunk = 4096;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = std::min(count, begin + kChunk);
    int16_t largest = 0;  // of the magnitudes' bits, which order as the magnitudes do
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, static_cast<int16_t>(bf16[i] & 0x7fff));
    for (int64_t i = begin; largest >= 0x7f80 && i < end; ++i) {
      if (!bf16_is_finite(bf16[i])) return i;
    }
  }
  return -1;
}

int64_t first_fp8_nan(const uint8_t* values, int64_t count) {
  constexpr int64_t kChunk = 4096;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = std::min(count, begin + kChunk);
    uint8_t largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, static_cast<uint8_t>(values[i] & 0x7f));
    for (int64_t i = begin; largest == 0x7f && i < end; ++i) {
      if (fp8_is_nan(values[i])) return i;
    }
  }
  return -1;
}

void narrow_to_bf16(const void* values, int64_t wide, int64_t count, uint16_t* bf16) {
  const auto* halves = static_cast<const uint16_t*>(values);
  const auto* floats = static_cast<const float*>(values);
  for (int64_t i = 0; i < count; ++i) bf16[i] = float_to_bf16(wide == 2 ? fp16_to_float(halves[i]) : floats[i]);
}

void unpack_nibbles(const uint8_t* packed, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count / 2; ++i) {
    codes[2 * i] = packed[i] & 15;
    codes[2 * i + 1] = packed[i] >> 4;
  }
  if (count % 2) codes[count - 1] = packed[count / 2] & 15;
}

void unpack_signed(const uint8_t* values, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = values[i] ^ 0x80;
}

void unpack_gptq(const WordColumns& matrix, int bits, int64_t first, int64_t count, uint8_t* codes) {
  const auto [words, all_rows, cols] = matrix;
  const int64_t per_word = 32 / bits;
  for (int64_t begin = 0; begin < cols; begin += kTileCols) {
    const int64_t end = std::min(cols, begin + kTileCols);
    for (int64_t row = 0; row < count; ++row) {
      const uint32_t* from = words + begin / per_word * all_rows + first + row;
      for (int64_t col = begin; col < end; col += per_word, from += all_rows) {
        if (bits == 4) {
          const uint64_t spread = spread_nibbles(*from);
          std::memcpy(codes + row * cols + col, &spread, 8);
        } else {
          std::memcpy(codes + row * cols + col, from, 4);
        }
      }
    }
  }
}

void unpack_awq(const WordColumns& matrix, int64_t first, int64_t count, uint8_t* codes) {
  const auto [words, all_rows, cols] = matrix;
  static constexpr int kRowOfNibble[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  uint8_t tile[8][kTileCols];
  for (int64_t row = 0; row < count; row += 8) {
    for (int64_t begin = 0; begin < cols; begin += kTileCols) {
      const int64_t width = std::min(kTileCols, cols - begin);
      const uint32_t* from = words + begin * (all_rows / 8) + (first + row) / 8;
      for (int64_t col = 0; col < width; ++col, from += all_rows / 8) {
        for (int i = 0; i < 8; ++i) tile[kRowOfNibble[i]][col] = *from >> (4 * i) & 15;
      }
      for (int i = 0; i < 8; ++i) std::memcpy(codes + (row + i) * cols + begin, tile[i], static_cast<size_t>(width));
    }
  }
}

}  // namespace kt
