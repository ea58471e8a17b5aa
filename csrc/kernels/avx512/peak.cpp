// bf16: vdpbf16ps, two multiply-adds for each of 16 float32 sums. int8: vpdpbusd, four for each of 16 int32 sums. 24
// chains of additions hide the latency (up to 6 cycles at two a cycle, and some slack); no memory is touched.
#include <immintrin.h>

#include "kernels/generic/peak512.h"
#include "kernels/peaks.h"

namespace kt {
namespace {

constexpr int kChains = 24;

int64_t bf16(int64_t rounds) {
  __m512 sums[kChains] = {};
  const __m512 ones = _mm512_set1_ps(0.5f);
  __m512bh a = _mm512_cvtne2ps_pbh(ones, ones), b = a;
  __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : "+v"(sums[i]));  // not all the same chain
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, b);
  }
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "v"(sums[i]));
  return rounds * kChains * 32 * 2;
}

int64_t int8(int64_t rounds) {
  __m512i sums[kChains] = {}, a = _mm512_set1_epi8(77), b = _mm512_set1_epi8(-13);
  __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : "+v"(sums[i]));  // not all the same chain
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
  }
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "v"(sums[i]));
  return rounds * kChains * 64 * 2;
}

}  // namespace

extern const Peaks kAvx512Peaks;
const Peaks kAvx512Peaks = {"avx512", bf16, int8, read_avx512};

}  // namespace kt
