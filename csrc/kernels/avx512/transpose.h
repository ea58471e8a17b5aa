// 16 x 16 numbers of 32 bits, transposed in registers. With a full mask: GCC 12 warns of an uninitialized value in the
// plain intrinsics.
#pragma once

#include "kernels/avx512/vector.h"

namespace kt {
namespace {

// Blocks of four lanes of x and y.
template <int kOrder>
inline __m512 blocks_of(__m512 x, __m512 y) {
  return _mm512_maskz_shuffle_f32x4(0xffff, x, y, kOrder);
}

// block[i] lane j <-> block[j] lane i.
inline void transpose_block(__m512 (&block)[16]) {
  __m512 pair[16], quad[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pair[i] = _mm512_maskz_unpacklo_ps(0xffff, block[i], block[i + 1]);
    pair[i + 1] = _mm512_maskz_unpackhi_ps(0xffff, block[i], block[i + 1]);
  }
  // quad[4 g + j]: in each block of four lanes, column 4 * (the block's place) + j of the rows 4 g to 4 g + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    quad[i] = _mm512_maskz_shuffle_ps(0xffff, pair[i], pair[i + 2], 0x44);
    quad[i + 1] = _mm512_maskz_shuffle_ps(0xffff, pair[i], pair[i + 2], 0xee);
    quad[i + 2] = _mm512_maskz_shuffle_ps(0xffff, pair[i + 1], pair[i + 3], 0x44);
    quad[i + 3] = _mm512_maskz_shuffle_ps(0xffff, pair[i + 1], pair[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 low_even = blocks_of<0x88>(quad[j], quad[4 + j]), low_odd = blocks_of<0xdd>(quad[j], quad[4 + j]);
    const __m512 high_even = blocks_of<0x88>(quad[8 + j], quad[12 + j]);
    const __m512 high_odd = blocks_of<0xdd>(quad[8 + j], quad[12 + j]);
    block[j] = blocks_of<0x88>(low_even, high_even);
    block[4 + j] = blocks_of<0x88>(low_odd, high_odd);
    block[8 + j] = blocks_of<0xdd>(low_even, high_even);
    block[12 + j] = blocks_of<0xdd>(low_odd, high_odd);
  }
}

struct TransposingVec16 : Vec16 {
  static void transpose(__m512 (&block)[16]) { transpose_block(block); }
};

}  // namespace
}  // namespace kt
