// AVX2 + FMA, float32 activations (bf16 ones are widened before). Register tile 6 x 16: 12 accumulators, two vectors of
// weights, one activation. Many rows: weights are unpacked once to float32 panels of 16 x 256 (16 KiB, L1
// cache); per column 12 fma, 6 broadcasts, 2 loads: two fma a cycle, 0.85 of that with unpacking and cold weights for
// 40 rows. Few rows: decoded in registers, up to 4 blocks at once; bound by memory up to 4 rows of bf16 and one of fp8
// or int8, above by decoding. Layout: kernels/layout.h.
#include <immintrin.h>

#include "kernels/avx2/kernels.h"
#include "kernels/generic/float_products.h"

namespace kt {
namespace {

struct Vec8 {
  using Element = float;
  using Reg = __m256;
  using Int = int32_t __attribute__((vector_size(32)));
  using Short = int16_t __attribute__((vector_size(32)));
  using Unpacked = FloatLines<Vec8>;
  static constexpr int kDepth = 1, kLanes = 8, kTileRows = 6, kFewRows = 6, kDecodeRows = 4;
  static constexpr int kSums = 12, kDecodeSums = 8;
  static constexpr int64_t kPanelBlocks = 1, kPanelColumns = 256, kAheadBytes = 4096;

  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg set(float value) { return _mm256_set1_ps(value); }
  static Reg load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Reg value) { _mm256_storeu_ps(to, value); }
  static Reg broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  // Left to itself the compiler takes forms of fma that overwrite a or b, and then moves and spills accumulators.
  static Reg dot(Reg a, Reg b, Reg sum) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
  }
  static Reg halves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Reg bytes(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static Int high_bytes(const uint8_t* from, int half) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), none = _mm256_setzero_si256();
    return (Int)(half ? _mm256_unpackhi_epi8(none, codes) : _mm256_unpacklo_epi8(none, codes));
  }
};

}  // namespace

void avx2::multiply(const PackedProduct<float>& p) { multiply_any<Vec8>(p); }

}  // namespace kt
