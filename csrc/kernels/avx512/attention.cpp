// Attention with AVX-512. Scores of bf16 queries and keys: vdpbf16ps, a unit is two adjacent columns.
//
// Register tile 8 rows x 2 vectors: 16 sums, two operands, one broadcast. Per unit 16 vdpbf16ps (or fma) and 10 loads.
#include "kernels/attention.h"

#include "kernels/avx512/transpose.h"
#include "kernels/avx512/vector.h"
#include "kernels/generic/rows/attention_blocks.h"

namespace kt {
namespace {

struct PairScores : WideScores<TransposingVec16, uint16_t> {
  static constexpr int kUnitCols = 2;

  static __m512 load(const uint16_t* from) { return _mm512_castsi512_ps(_mm512_loadu_si512(from)); }
  static __m512 load_partial(const uint16_t* from, int64_t cols) {
    const auto mask = static_cast<__mmask32>((uint64_t{1} << cols) - 1);
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, from));
  }
  static __m512 dot(__m512 q, __m512 keys, __m512 sum) { return _mm512_dpbf16_ps(sum, (__m512bh)q, (__m512bh)keys); }
};

}  // namespace

const Attention avx512::kAttention = AttentionKernels<TransposingVec16, PairScores, 8>::table();

}  // namespace kt
