// Eight floats of AVX2 + FMA. Interface: portable/vector.h. Used by the AVX-512 kernels too, where sixteen are too
// many.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kt {
namespace {

struct Vec8 {
  using Reg = __m256;
  using Int = int32_t __attribute__((vector_size(32)));
  using Short = int16_t __attribute__((vector_size(32)));
  static constexpr int kLanes = 8;

  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg set(float value) { return _mm256_set1_ps(value); }
  static Reg load(const float* from) { return _mm256_loadu_ps(from); }
  static Reg load_partial(const float* from, int count) { return _mm256_maskload_ps(from, mask(count)); }
  static void store(float* to, Reg value) { _mm256_storeu_ps(to, value); }
  static void store_partial(float* to, Reg value, int count) { _mm256_maskstore_ps(to, mask(count), value); }
  static Reg broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static Reg widen(const uint16_t* from) { return widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
  static Reg widen_partial(const uint16_t* from, int count) {
    uint16_t some[kLanes] = {};
    for (int i = 0; i < count; ++i) some[i] = from[i];
    return widen(some);
  }
  static Reg halves(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Reg bytes(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static Reg signed_bytes(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static Int high_bytes(const uint8_t* from, int half) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), none = _mm256_setzero_si256();
    return (Int)(half ? _mm256_unpackhi_epi8(none, codes) : _mm256_unpacklo_epi8(none, codes));
  }
  // The low three bits choose from both halves of the table, the fourth one between these.
  static Reg look_up(const float* table, Int index) {
    const Reg first = _mm256_permutevar8x32_ps(load(table), (__m256i)index);
    const Reg second = _mm256_permutevar8x32_ps(load(table + 8), (__m256i)index);
    return _mm256_blendv_ps(first, second, (Reg)(index << 28));
  }
  static float sum(Reg value) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  // block[i] lane j <-> block[j] lane i.
  static void transpose(Reg block[kLanes]) {
    Reg half[8], quad[8];
    for (int i = 0; i < 8; i += 2) {
      half[i] = _mm256_unpacklo_ps(block[i], block[i + 1]);
      half[i + 1] = _mm256_unpackhi_ps(block[i], block[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      quad[i] = _mm256_shuffle_ps(half[i], half[i + 2], 0x44);
      quad[i + 1] = _mm256_shuffle_ps(half[i], half[i + 2], 0xee);
      quad[i + 2] = _mm256_shuffle_ps(half[i + 1], half[i + 3], 0x44);
      quad[i + 3] = _mm256_shuffle_ps(half[i + 1], half[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      block[i] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20);
      block[i + 4] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31);
    }
  }

 private:
  static __m256i mask(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Reg widened(__m128i eight) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16)); }
};

}  // namespace
}  // namespace kt
