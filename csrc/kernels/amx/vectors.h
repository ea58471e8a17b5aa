// Sixteen numbers at a time beside the tiles: GCC's and Clang's vector extension. amx_primitives.h has the operations
// that it lacks.
#pragma once

#include <cstdint>
#include <cstring>

namespace kt::amx {
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

}  // namespace
}  // namespace kt::amx
