// bf16: vfmadd231ps, since bf16 weights are widened to float32 here. int8: vpmaddwd and vpaddd on 16-bit codes, or
// vpdpbusd. Twelve chains and more of additions hide the latency; no memory is touched.
#include <immintrin.h>

#include "kernels/generic/peak512.h"
#include "kernels/peaks.h"

namespace kt {
namespace {

constexpr int kChains = 24;

// Runs add(sum) on every chain, `rounds` times.
template <class Vector, class Add>
inline void run_chains(int64_t rounds, Add add) {
  Vector sums[kChains] = {};
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : "+v"(sums[i]));  // not all the same chain
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sums[i] = add(sums[i]);
  }
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "v"(sums[i]));
}

int64_t bf16(int64_t rounds) {
  __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.001f);
  __asm__ volatile("" : "+v"(a), "+v"(b));
  run_chains<__m512>(rounds, [&](__m512 sum) { return _mm512_fmadd_ps(a, b, sum); });
  return rounds * kChains * 16 * 2;
}

int64_t int8(int64_t rounds) {
  __m512i a = _mm512_set1_epi16(-77), b = _mm512_set1_epi16(13);
  run_chains<__m512i>(rounds, [&](__m512i sum) {
    __asm__ volatile("" : "+v"(a));  // another product for every chain, as far as the compiler knows
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
  });
  return rounds * kChains * 32 * 2;
}

__attribute__((target("avx512vnni"))) int64_t int8_vnni(int64_t rounds) {
  __m512i sums[kChains] = {}, a = _mm512_set1_epi8(77), b = _mm512_set1_epi8(-13);
  __asm__ volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : "+v"(sums[i]));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
  }
#pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) __asm__ volatile("" : : "v"(sums[i]));
  return rounds * kChains * 64 * 2;
}

}  // namespace

extern const Peaks kAvx512BasePeaks, kAvx512VnniPeaks;
const Peaks kAvx512BasePeaks = {"avx512_base", bf16, int8, read_avx512};
const Peaks kAvx512VnniPeaks = {"avx512_vnni", bf16, int8_vnni, read_avx512};

}  // namespace kt
