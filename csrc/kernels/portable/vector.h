// Four floats, whatever the processor is (GCC and Clang vector extension). The interface is the same for each
// instruction set's vectors:
//
//   Reg, Int, Short: vectors of float, int32_t, int16_t; kLanes floats
//   zero, set, load, store, broadcast(address), fma(a, b, c) = a * b + c
//   load_partial, store_partial: the first `count` lanes, the others read as zero and not written
//   widen, widen_partial: kLanes bf16 to floats; halves, bytes, signed_bytes: kLanes float16, uint8 or int8
//   high_bytes(from, h): of each 16 bytes the lower (h = 0) or upper 8, each the high byte of 16 bits
//   transpose(block): block[i] lane j <-> block[j] lane i
//   look_up(table, index): table[index] of a table of 16 floats, for each lane of an Int (8 lanes at most)
//   sum: all lanes, always in the same order
//
// Here fma rounds twice: a fused one without the instruction is a slow library call.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "base/fp16.h"

namespace kt {
namespace {

struct Vec4 {
  using Reg = float __attribute__((vector_size(16)));
  using Int = int32_t __attribute__((vector_size(16)));
  using Short = int16_t __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;

  static Reg zero() { return Reg{}; }
  static Reg set(float value) { return Reg{value, value, value, value}; }
  static Reg load(const float* from) {
    Reg value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
  }
  static Reg load_partial(const float* from, int count) {
    Reg value{};
    for (int i = 0; i < count; ++i) value[i] = from[i];
    return value;
  }
  static void store(float* to, Reg value) { __builtin_memcpy(to, &value, sizeof value); }
  static void store_partial(float* to, Reg value, int count) {
    for (int i = 0; i < count; ++i) to[i] = value[i];
  }
  static Reg broadcast(const float* from) { return set(*from); }
  static Reg fma(Reg a, Reg b, Reg c) { return a * b + c; }
  static Reg widen(const uint16_t* from) { return widen_partial(from, kLanes); }
  static Reg widen_partial(const uint16_t* from, int count) {
    Reg value{};
    for (int i = 0; i < count; ++i) value[i] = bf16_to_float(from[i]);
    return value;
  }
  static Reg halves(const uint16_t* from) {
    return Reg{fp16_to_float(from[0]), fp16_to_float(from[1]), fp16_to_float(from[2]), fp16_to_float(from[3])};
  }
  static Reg bytes(const uint8_t* from) {
    return Reg{static_cast<float>(from[0]), static_cast<float>(from[1]), static_cast<float>(from[2]),
               static_cast<float>(from[3])};
  }
  static Reg signed_bytes(const uint8_t* from) {
    return Reg{static_cast<float>(static_cast<int8_t>(from[0])), static_cast<float>(static_cast<int8_t>(from[1])),
               static_cast<float>(static_cast<int8_t>(from[2])), static_cast<float>(static_cast<int8_t>(from[3]))};
  }
  static Int high_bytes(const uint8_t* from, int half) {
    Short value;
    for (int i = 0; i < 8; ++i) value[i] = static_cast<int16_t>(from[8 * half + i] << 8);
    return (Int)value;
  }
  static Reg look_up(const float* table, Int index) {
    return Reg{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
  }
  static void transpose(Reg block[kLanes]) {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < i; ++j) {
        const float other = block[i][j];
        block[i][j] = block[j][i];
        block[j][i] = other;
      }
    }
  }
  static float sum(Reg value) { return (value[0] + value[2]) + (value[1] + value[3]); }
};

}  // namespace
}  // namespace kt
