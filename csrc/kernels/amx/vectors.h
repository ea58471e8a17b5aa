// Sixteen numbers at a time beside the tiles: GCC's and Clang's vector extension, with AVX-512 where it lacks an
// operation and plain code for it in the model.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/amx/kernels.h"
#if defined(KT_AMX_MODEL)
#include "base/bf16.h"
#include "base/fp16.h"
#else
#include <immintrin.h>
#endif

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Bytes = uint8_t __attribute__((vector_size(64)));

template <class Vector>
inline Vector load(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class Vector>
inline void store(const Vector& value, void* to) {
  std::memcpy(to, &value, sizeof value);
}

inline Floats floats_of(const Ints& value) { return __builtin_convertvector(value, Floats); }
inline Ints ints_of_bytes(const uint8_t* from) {
  using Sixteen = uint8_t __attribute__((vector_size(16)));
  return __builtin_convertvector(load<Sixteen>(from), Ints);
}

#if defined(KT_AMX_MODEL)

inline Floats broadcast(const float* from) {
  Floats value;
  for (int i = 0; i < 16; ++i) value[i] = *from;
  return value;
}
inline Floats fused(const Floats& a, const Floats& b, const Floats& c) {
  Floats value;
  for (int i = 0; i < 16; ++i) value[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return value;
}
inline Floats floats_of_halves(const uint16_t* from) {
  Floats value;
  for (int i = 0; i < 16; ++i) value[i] = fp16_to_float(from[i]);
  return value;
}
inline void narrow_to_bf16(const Floats& value, uint8_t* to) {
  for (int i = 0; i < 16; ++i) {
    const uint16_t bits = float_to_bf16(value[i]);
    std::memcpy(to + 2 * i, &bits, sizeof bits);
  }
}

#else

inline Floats broadcast(const float* from) { return _mm512_set1_ps(*from); }
inline Floats fused(const Floats& a, const Floats& b, const Floats& c) { return _mm512_fmadd_ps(a, b, c); }
// With a full mask: GCC 12 warns of an uninitialized value in the plain intrinsic.
inline Floats floats_of_halves(const uint16_t* from) { return _mm512_maskz_cvtph_ps(0xffff, load<__m256i>(from)); }
inline void narrow_to_bf16(const Floats& value, uint8_t* to) { store(_mm512_cvtneps_pbh(value), to); }

#endif

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
