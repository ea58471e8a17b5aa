// bf16: TDPBF16PS, int8: TDPBSUD, on four sums (tiles 0 to 3) of two by two operands (4 and 5 against 6 and 7): four
// products of 16 x 16 x 64 bytes a round; the other three products (16 cycles each) hide a sum's latency (52 cycles).
// base/cpu.h requests the permission for tiles when it reads the processor's features.
#include <immintrin.h>

#include <cstring>

#include "kernels/generic/peak512.h"
#include "kernels/peaks.h"

namespace kt {
namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

// Palette 1: Intel SDM volume 1, chapter 18.3.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig() {
    for (int tile = 0; tile < kTiles; ++tile) {
      row_bytes[tile] = kRowBytes;
      rows[tile] = kRows;
    }
  }
};
static_assert(sizeof(TileConfig) == 64);

// Operands of zeros: their values change no rate.
void set_up() {
  const TileConfig config;
  alignas(64) static const uint8_t kZeros[kRows * kRowBytes] = {};
  __asm__ volatile("" : : "r"(&config) : "memory");  // GCC's intrinsic reads only the first bytes, as far as it knows
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, kZeros, kRowBytes);
  _tile_loadd(5, kZeros, kRowBytes);
  _tile_loadd(6, kZeros, kRowBytes);
  _tile_loadd(7, kZeros, kRowBytes);
}

int64_t bf16(int64_t rounds) {
  set_up();
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return rounds * 4 * (16 * 16 * 32) * 2;
}

int64_t int8(int64_t rounds) {
  set_up();
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  _tile_release();
  return rounds * 4 * (16 * 16 * 64) * 2;
}

}  // namespace

extern const Peaks kAmxPeaks;
const Peaks kAmxPeaks = {"amx", bf16, int8, read_avx512};

}  // namespace kt
