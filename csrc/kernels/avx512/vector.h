// Sixteen floats of AVX-512. Interface: portable/vector.h, without `transpose`.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kt {
namespace {

// With a full mask where the plain intrinsic makes GCC 12 warn of an uninitialized value in its own header.

// Half 0 or 1 of a vector.
template <int kHalf>
inline __m256 half_of(__m512 value) {
  return _mm512_maskz_extractf32x8_ps(0xff, value, kHalf);
}

struct Vec16 {
  using Reg = __m512;
  using Int = int32_t __attribute__((vector_size(64)));
  using Short = int16_t __attribute__((vector_size(64)));
  static constexpr int kLanes = 16;

  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg set(float value) { return _mm512_set1_ps(value); }
  static Reg load(const float* from) { return _mm512_loadu_ps(from); }
  static Reg load_partial(const float* from, int count) { return _mm512_maskz_loadu_ps(mask(count), from); }
  static void store(float* to, Reg value) { _mm512_storeu_ps(to, value); }
  static void store_partial(float* to, Reg value, int count) { _mm512_mask_storeu_ps(to, mask(count), value); }
  // Also broadcasts a pair of bf16, which need not be aligned as a float.
  static Reg broadcast(const float* from) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return _mm512_set1_ps(value);
  }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static Reg widen(const uint16_t* from) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
  static Reg widen_partial(const uint16_t* from, int count) {
    return widened(_mm256_maskz_loadu_epi16(mask(count), from));
  }
  static Reg halves(const uint16_t* from) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Reg bytes(const uint8_t* from) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepu8_epi32(0xffff, codes));
  }
  static Int high_bytes(const uint8_t* from, int half) {
    const __m512i codes = _mm512_loadu_si512(from), none = _mm512_setzero_si512();
    return (Int)(half ? _mm512_unpackhi_epi8(none, codes) : _mm512_unpacklo_epi8(none, codes));
  }
  static float sum(Reg value) {
    const __m256 eight = _mm256_add_ps(half_of<0>(value), half_of<1>(value));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

 private:
  static __mmask16 mask(int count) { return static_cast<__mmask16>((1u << count) - 1u); }
  static Reg widened(__m256i sixteen) {
    return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, sixteen), 16));
  }
};

}  // namespace
}  // namespace kt
