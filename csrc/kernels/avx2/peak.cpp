// bf16: vfmadd231ps, since bf16 weights are widened to float32 here. int8: vpmaddwd and vpaddd, since codes are widened
// to int16. Eight to ten chains of additions hide the latency (4 or 5 cycles, two a cycle); ten leave registers for the
// operands. No memory is touched.
#include <immintrin.h>

#include "kernels/generic/reading.h"
#include "kernels/peaks.h"

namespace kt {
namespace {

constexpr int kChains = 10;

int64_t bf16(int64_t rounds) {
  __m256 sums[kChains] = {}, a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.001f);
  __asm__ volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : "+x"(sums[i]));  // not all the same chain
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sums[i] = _mm256_fmadd_ps(a, b, sums[i]);
  }
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "x"(sums[i]));
  return rounds * kChains * 8 * 2;
}

int64_t int8(int64_t rounds) {
  __m256i sums[kChains] = {}, a = _mm256_set1_epi16(-77), b = _mm256_set1_epi16(13);
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : "+x"(sums[i]));  // not all the same chain
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) {
      __asm__ volatile("" : "+x"(a));  // another product for every chain, as far as the compiler knows
      sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(a, b));
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "x"(sums[i]));
  return rounds * kChains * 16 * 2;
}

struct Load32 {
  using Vector = __m256i;
  static constexpr int64_t kBytes = 32;
  static Vector load(const uint8_t* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); }
  static Vector mix(Vector a, Vector b) { return _mm256_xor_si256(a, b); }
};

void read(const uint8_t* data, int64_t bytes, int streams) {
  __asm__ volatile("" : : "x"(read_memory<Load32>(data, bytes, streams)));
}

}  // namespace

extern const Peaks kAvx2Peaks;
const Peaks kAvx2Peaks = {"avx2", bf16, int8, read};

}  // namespace kt
