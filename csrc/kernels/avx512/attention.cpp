// Attention with AVX-512. Scores of bf16 queries and keys: vdpbf16ps, a unit is two adjacent columns.
//
// Register tile 8 rows x 2 vectors: 16 sums, two operands, one broadcast. Per unit 16 vdpbf16ps (or fma) and 10 loads.
#include "kernels/attention.h"

#include "kernels/avx512/vector.h"
#include "kernels/generic/attention_blocks.h"

namespace kt {
namespace {

// block[i] lane j <-> block[j] lane i. With a full mask: GCC 12 warns of an uninitialized value in the plain
// intrinsics.
template <int kOrder>
inline __m512 blocks_of(__m512 x, __m512 y) {
  return _mm512_maskz_shuffle_f32x4(0xffff, x, y, kOrder);
}

struct Turned16 : Vec16 {
  static void transpose(__m512 (&block)[16]) {
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
};

struct PairScores : WideScores<Turned16, uint16_t> {
  static constexpr int kUnitCols = 2;

  static __m512 load(const uint16_t* from) { return _mm512_castsi512_ps(_mm512_loadu_si512(from)); }
  static __m512 load_partial(const uint16_t* from, int64_t cols) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << cols) - 1);
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, from));
  }
  static __m512 dot(__m512 q, __m512 keys, __m512 sum) { return _mm512_dpbf16_ps(sum, (__m512bh)q, (__m512bh)keys); }
};

}  // namespace

const Attention avx512::kAttention = AttentionKernels<Turned16, PairScores, 8>::named("avx512");

}  // namespace kt
