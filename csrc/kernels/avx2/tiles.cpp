// AVX2 + FMA, float32 activations (bf16 ones are widened before). Register tile 6 x 16: 12 accumulators, two vectors
// of weights, one activation, one mask. Per pair of columns: 24 fma, 12 broadcasts, 4 loads, 4 shifts or masks;
// expected rate 80 % of the fma peak while operands are in cache.
#include <immintrin.h>

#include "base/cpu.h"
#include "kernels/avx2/transpose.h"
#include "kernels/generic/products.h"

namespace kt {
namespace {

struct Vec8 {
  using Reg = __m256;
  static constexpr int kLanes = 8, kMaxRows = 6, kMaxSums = 12, kPlainVectors = 2, kBlocksAtOnce = 4;

  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg load(const float* from) { return _mm256_loadu_ps(from); }
  static Reg load_partial(const float* from, int count) { return _mm256_maskload_ps(from, mask(count)); }
  static void store(float* to, Reg value) { _mm256_storeu_ps(to, value); }
  static void store_partial(float* to, Reg value, int count) { _mm256_maskstore_ps(to, mask(count), value); }
  static Reg broadcast(float value) { return _mm256_set1_ps(value); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static Reg even(const uint16_t* line) { return _mm256_castsi256_ps(_mm256_slli_epi32(raw(line), 16)); }
  static Reg odd(const uint16_t* line) {
    return _mm256_castsi256_ps(_mm256_and_si256(raw(line), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }

 private:
  static __m256i raw(const uint16_t* line) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line)); }
  static __m256i mask(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};

}  // namespace

extern const Tiles kAvx2Tiles;
const Tiles kAvx2Tiles = {
    "avx2", kAvx2 | kFma | kF16c, multiply_packed<Vec8>, nullptr, unpack_rows_avx2, multiply_plain<Vec8>,
};

}  // namespace kt
