// How AVX-512 multiplies unsigned codes of weights by signed codes of activations, in four columns of 16 rows: one
// struct for each set of instructions. The integer sums are exact, so all give the same. A struct has
//
//   kCodeBytes<encoding>  of a code of activations, where weights of this encoding are multiplied
//   Codes<encoding>       of four columns of a row of activations, ready to be multiplied
//   codes<encoding>(from) loads them
//   add(sum, w, x)        w: bytes 0..255, of encodings whose lines are multiplied one by one (takes_lines)
//   add_two(sum, w, x)    two lines of the others: codes up to 63
//   kHighInPlace          whether `add` of the high nibbles where they lie, 16 times their value, is as cheap
//   Ahead                 how few rows prefetch (kernels/generic/integer.h): processors without a bf16 dot product are
//   Intel's look_up(levels, nibbles)  by the low nibbles; the high ones may be anything
//
// Include only in a kernel's own translation unit.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Encodings with codes above 63.
constexpr bool takes_lines(Encoding encoding) { return encoding == Encoding::kInt8 || encoding == Encoding::kIq4; }

// From a table of 16 bytes.
inline __m512i look_up_by_shuffle(const uint8_t* levels, __m512i nibbles) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(levels));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), _mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
}

// Without VNNI. A line whose codes are multiplied as bytes is multiplied as 16 bits: the even ones, then the odd ones.
// Activations lie in this order, so that a dword is an operand: of four columns the codes 0, 2, 1, 3. Codes up to 63:
// the four products of two lines in a pair of columns are at most 4 * 63 * 127, which 16 bits hold.
struct DotMadd {
  struct Bytes {
    __m512i all;
  };
  struct EvenOdd {
    __m512i even, odd;
  };
  template <Encoding kEncoding>
  static constexpr int kCodeBytes = takes_lines(kEncoding) ? 2 : 1;
  template <Encoding kEncoding>
  using Codes = std::conditional_t<takes_lines(kEncoding), EvenOdd, Bytes>;
  using Ahead = IntoL1;
  static constexpr bool kHighInPlace = false;

  template <Encoding kEncoding>
  static Codes<kEncoding> codes(const uint8_t* from) {
    if constexpr (takes_lines(kEncoding)) {
      return {broadcast_dword(from), broadcast_dword(from + 4)};
    } else {
      return {broadcast_dword(from)};
    }
  }
  static Lanes add(Lanes sum, __m512i w, const EvenOdd& x) {
    const __m512i even = _mm512_and_si512(w, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(w, 8);
    return plus(plus(sum, _mm512_madd_epi16(even, x.even)), _mm512_madd_epi16(odd, x.odd));
  }
  static Lanes add_two(Lanes sum, const __m512i (&w)[2], const Bytes (&x)[2]) {
    const __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16(w[0], x[0].all), _mm512_maddubs_epi16(w[1], x[1].all));
    return plus(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  static __m512i look_up(const uint8_t* levels, __m512i nibbles) { return look_up_by_shuffle(levels, nibbles); }

 private:
  // Hidden from the compiler, which otherwise adds up the products of several lines before it adds them to the sum, and
  // has no registers for them.
  static Lanes plus(Lanes sum, __m512i products) {
    sum += Lanes(products);
    __asm__("" : "+v"(sum));
    return sum;
  }
};

#if defined(__AVX512VNNI__)
// vpdpbusd: one instruction a line.
struct DotVnni {
  template <Encoding>
  static constexpr int kCodeBytes = 1;
  template <Encoding>
  using Codes = __m512i;
  using Ahead = IntoL1;
  static constexpr bool kHighInPlace = true;

  template <Encoding>
  static __m512i codes(const uint8_t* from) {
    return broadcast_dword(from);
  }
  static Lanes add(Lanes sum, __m512i w, __m512i x) { return Lanes(_mm512_dpbusd_epi32(__m512i(sum), w, x)); }
  static Lanes add_two(Lanes sum, const __m512i (&w)[2], const __m512i (&x)[2]) {
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
