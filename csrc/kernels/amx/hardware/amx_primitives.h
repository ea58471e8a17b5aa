// What the AMX kernels need of the processor: the tile instructions, AVX-512 where the compiler's vectors lack an
// operation, and the AVX-512 kernels for everything else.
//
// The kernels include this header by the include path. The C++ tests compile the same kernels with another header of
// this name (tests/unit/csrc/amx_model), which holds a software model for any processor. Each header has a namespace of
// its own, KT_AMX_BUILD, so that one program can hold both builds.
//
// The tile instructions are inline assembler. GCC's intrinsics take literal tile numbers only, and do not declare that
// a tile load reads memory: the compiler could delay plain stores to the source past the load.
#pragma once

#include <immintrin.h>

#include "base/cpu.h"
#include "kernels/amx/vectors.h"
#include "kernels/avx512/kernels.h"
#include "kernels/avx512/transpose.h"
#include "kernels/avx512/vector.h"

#define KT_AMX_BUILD hardware

namespace kt::amx::inline hardware {

namespace base = kt::avx512;

namespace {

constexpr const char* kName = "amx";
constexpr uint32_t kRequired = kAvx2 | kFma | kF16c | kAvx512f | kAvx512bw | kAvx512vl | kAvx512dq | kAvx512bf16 |
                               kAvx512vnni | kAvx512vbmi | kAmxTile | kAmxBf16 | kAmxInt8;
// Integer products of `base` have the same bits.
constexpr bool kBaseHasSameBits = true;

inline void load_config(const void* config) { __asm__ volatile("ldtilecfg (%0)" ::"r"(config) : "memory"); }
inline void release_tiles() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int kTile>
inline void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void load_tile(const uint8_t* base, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(base), "r"(stride) : "memory");
}
template <int kTile>
inline void store_tile(void* base, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(base), "r"(stride) : "memory");
}

struct DotBf16 {  // bf16 pairs, float32 sums
  template <int kC, int kA, int kB>
  static void run() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};
struct DotS8U8 {  // signed times unsigned bytes, int32 sums
  template <int kC, int kA, int kB>
  static void run() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};
struct DotS8S8 {  // signed bytes, int32 sums
  template <int kC, int kA, int kB>
  static void run() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

// For attention: floats, and pairs of bf16 as lanes.
struct PairLanes : Vec16 {
  static void transpose(__m512 (&block)[16]) { transpose_block(block); }
  static __m512 load_pairs(const uint16_t* from) { return _mm512_castsi512_ps(_mm512_loadu_si512(from)); }
  // The first `count` bf16, then zeros.
  static __m512 load_some_pairs(const uint16_t* from, int64_t count) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(first_of(count), from));
  }
  static __mmask32 first_of(int64_t count) { return static_cast<__mmask32>((uint64_t{1} << count) - 1); }
};

inline __m512 widened(__m256i sixteen) {
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, sixteen), 16));
}

// 16 floats as the sum of three bf16 each: the nearest, the nearest to what is left, and so again.
inline void split_floats(const float* from, uint16_t* high, uint16_t* middle, uint16_t* low) {
  __m512 left = _mm512_loadu_ps(from);
  for (uint16_t* to : {high, middle}) {
    const auto nearest = (__m256i)_mm512_cvtneps_pbh(left);
    store(nearest, to);
    left = _mm512_sub_ps(left, widened(nearest));
  }
  store(_mm512_cvtneps_pbh(left), low);
}

inline void interleave(const __m512i& a, const __m512i& b, uint8_t* left, uint8_t* right) {
  // Lane 2 i of an index vector names element i of a half of `a`, lane 2 i + 1 the same element of `b`.
  const __m512i place =
      _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __m512i of_b = _mm512_or_si512(place, _mm512_set1_epi32(32));
  const __m512i low = _mm512_or_si512(place, _mm512_maskz_slli_epi32(0xffff, of_b, 16));
  const __m512i high = _mm512_or_si512(low, _mm512_set1_epi32(0x00100010));
  _mm512_storeu_si512(left, _mm512_permutex2var_epi16(a, low, b));
  _mm512_storeu_si512(right, _mm512_permutex2var_epi16(a, high, b));
}

// The first `count` of 32 adjacent bf16 of two rows, then zeros -> pairs (one of each row) of the columns 0 to 15, and
// of 16 to 31.
inline void interleave_rows(const uint16_t* first, const uint16_t* second, int64_t count, uint8_t* left,
                            uint8_t* right) {
  const __mmask32 mask = PairLanes::first_of(count);
  interleave(_mm512_maskz_loadu_epi16(mask, first), _mm512_maskz_loadu_epi16(mask, second), left, right);
}

// The same, but zeros take the place of NaN and Inf; returns whether there were any.
inline bool interleave_finite(const uint16_t* first, const uint16_t* second, int64_t count, uint8_t* left,
                              uint8_t* right) {
  const __mmask32 mask = PairLanes::first_of(count);
  const __m512i one = _mm512_maskz_loadu_epi16(mask, first), other = _mm512_maskz_loadu_epi16(mask, second);
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  const __mmask32 bad_one = _mm512_cmpeq_epi16_mask(_mm512_and_si512(one, exponent), exponent);
  const __mmask32 bad_other = _mm512_cmpeq_epi16_mask(_mm512_and_si512(other, exponent), exponent);
  interleave(_mm512_maskz_mov_epi16(~bad_one, one), _mm512_maskz_mov_epi16(~bad_other, other), left, right);
  return (bad_one | bad_other) != 0;
}

inline Floats broadcast(const float* from) { return _mm512_set1_ps(*from); }
// a * b + c, rounded once.
inline Floats fused(const Floats& a, const Floats& b, const Floats& c) { return _mm512_fmadd_ps(a, b, c); }
// With a full mask: GCC 12 warns of an uninitialized value in the plain intrinsic.
inline Floats floats_of_halves(const uint16_t* from) { return _mm512_maskz_cvtph_ps(0xffff, load<__m256i>(from)); }
inline void narrow_to_bf16(const Floats& value, uint8_t* to) { store(_mm512_cvtneps_pbh(value), to); }

// table[index], of a table of 16 bytes.
inline Bytes look_up_nibbles(const uint8_t* table, const Bytes& index) {
  const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (Bytes)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xffff, sixteen), (__m512i)index);
}

// A line of fp8 codes to two lines of bf16. `low`, `high`: the bytes of the bf16 that equals a code without its sign.
// Two look-ups in tables of 128 bytes (VPERMI2B, which ignores the index's top bit: the sign), then the interleaving
// for which the layout is designed.
inline void look_up_fp8(const uint8_t* line, const uint8_t* low, const uint8_t* high, uint8_t* out) {
  const __m512i codes = _mm512_loadu_si512(line);
  const __m512i low_bytes = _mm512_permutex2var_epi8(_mm512_load_si512(low), codes, _mm512_load_si512(low + 64));
  const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(high), codes, _mm512_load_si512(high + 64));
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  const __m512i high_bytes =
      _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(static_cast<char>(0x80)), kOrAnd);
  _mm512_store_si512(out, _mm512_unpacklo_epi8(low_bytes, high_bytes));
  _mm512_store_si512(out + kLineBytes, _mm512_unpackhi_epi8(low_bytes, high_bytes));
}

}  // namespace
}  // namespace kt::amx::inline hardware
