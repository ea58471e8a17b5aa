// How AVX-512 multiplies unsigned codes of weights by signed codes of activations, in four columns of 16 rows: one
// struct for each set of instructions. The integer sums are exact, so all give the same. A struct has
//
//   Codes                 of four columns of a row of activations, ready to be multiplied
//   codes(from)           loads them
//   add(sum, w, x)        w: bytes 0..255
//   add_two(sum, w, x)    two lines; codes up to 63
//   kHighInPlace          whether `add` of the high nibbles where they lie, 16 times their value, is as cheap
//   Ahead                 how few rows prefetch (kernels/generic/integer.h): processors without a bf16 dot product are
//   Intel's look_up(levels, nibbles)  by the low nibbles; the high ones may be anything
//
// Include only in a kernel's own translation unit.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/format.h"
#include "kernels/generic/integer.h"

namespace kt {
namespace {

// int32 lanes by type: GCC copies sums of type __m512i to other registers and back in every step of a loop of vpdpbusd.
using Lanes = int32_t __attribute__((vector_size(64)));

inline __m512i broadcast_dword(const uint8_t* from) {
  int32_t value;
  std::memcpy(&value, from, sizeof value);
  return _mm512_set1_epi32(value);
}

// From a table of 16 bytes.
inline __m512i look_up_by_shuffle(const uint8_t* levels, __m512i nibbles) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(levels));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), _mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
}

// Without VNNI. Bytes: the even and the odd ones as 16 bits each. Codes up to 63: the four products of two lines in a
// pair of columns are at most 4 * 63 * 127, which 16 bits hold.
struct DotMadd {
  struct Codes {
    __m512i bytes, even, odd;
  };
  using Ahead = IntoL1;
  static constexpr bool kHighInPlace = false;

  static Codes codes(const uint8_t* from) {
    const __m512i bytes = broadcast_dword(from);
    return {bytes, _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), _mm512_srai_epi16(bytes, 8)};
  }
  static Lanes add(Lanes sum, __m512i w, const Codes& x) {
    const __m512i even = _mm512_and_si512(w, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(w, 8);
    return sum + Lanes(_mm512_madd_epi16(even, x.even)) + Lanes(_mm512_madd_epi16(odd, x.odd));
  }
  static Lanes add_two(Lanes sum, const __m512i (&w)[2], const Codes (&x)[2]) {
    const __m512i pairs =
        _mm512_add_epi16(_mm512_maddubs_epi16(w[0], x[0].bytes), _mm512_maddubs_epi16(w[1], x[1].bytes));
    return sum + Lanes(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  static __m512i look_up(const uint8_t* levels, __m512i nibbles) { return look_up_by_shuffle(levels, nibbles); }
};

#if defined(__AVX512VNNI__)
// vpdpbusd: one instruction a line.
struct DotVnni {
  using Codes = __m512i;
  using Ahead = IntoL1;
  static constexpr bool kHighInPlace = true;

  static Codes codes(const uint8_t* from) { return broadcast_dword(from); }
  static Lanes add(Lanes sum, __m512i w, Codes x) { return Lanes(_mm512_dpbusd_epi32(__m512i(sum), w, x)); }
  static Lanes add_two(Lanes sum, const __m512i (&w)[2], const Codes (&x)[2]) {
    return add(add(sum, w[0], x[0]), w[1], x[1]);
  }
  static __m512i look_up(const uint8_t* levels, __m512i nibbles) { return look_up_by_shuffle(levels, nibbles); }
};
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
// vpermb takes six bits of an index; the table is there four times.
struct DotVnniVbmi : DotVnni {
  using Ahead = IntoL2;
  static __m512i look_up(const uint8_t* levels, __m512i nibbles) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(levels));
    return _mm512_permutexvar_epi8(nibbles, _mm512_broadcast_i32x4(table));
  }
};
#endif

}  // namespace
}  // namespace kt
