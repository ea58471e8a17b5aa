// Rows to columns by 8 x 8 blocks of 32-bit units: half of the work is loads and stores. For AVX2 and AVX-512.
#pragma once

#include <immintrin.h>

#include "kernels/avx2/vector.h"
#include "kernels/tiles.h"

namespace kt {
namespace {

// tiles.h, transpose_rows.
inline void transpose_floats(Rows<const float> in, int64_t rows, int64_t cols, float* out, int64_t ld) {
  for (int64_t m = 0; m < rows; m += 8) {
    const int64_t real = rows - m < 8 ? rows - m : 8;
    for (int64_t n = 0; n < round_up(cols, kBlockRows); n += 8) {
      const int valid = cols - n >= 8 ? 8 : cols > n ? static_cast<int>(cols - n) : 0;
      __m256 block[8];
      for (int64_t i = 0; i < 8; ++i) {
        block[i] = i >= real || valid == 0 ? Vec8::zero()
                   : valid == 8            ? Vec8::load(in.row(m + i) + n)
                                           : Vec8::load_partial(in.row(m + i) + n, valid);
      }
      Vec8::transpose(block);
      for (int64_t i = 0; i < 8; ++i) Vec8::store(out + (n + i) * ld + m, block[i]);
    }
  }
}

}  // namespace
}  // namespace kt
