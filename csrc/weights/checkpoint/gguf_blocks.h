// Blocks of GGUF's quantized types -> plain codes, scales and minima; the same numbers, in the order of the columns.
//
// Layouts (https://github.com/ggml-org/ggml, src/ggml-common.h), all little-endian; d and dmin are float16, q a code:
//
//   Q8_0    32 weights, 34 bytes: d, 32 int8                                               W = d * q
//   Q4_0    32 weights, 18 bytes: d, 16 bytes (weights i and 16 + i)                       W = d * (q - 8)
//   Q5_0    32 weights, 22 bytes: d, 32 high bits, 16 bytes as Q4_0                        W = d * (q - 16)
//   MXFP4   32 weights, 17 bytes: exponent e, 16 bytes as Q4_0 (e2m1)                      W = 2^(e - 127) * q
//   IQ4_NL  32 weights, 18 bytes: d, 16 bytes as Q4_0 (v: kIq4Levels - 127)               W = d * v[q]
//   IQ4_XS  256 weights, 136 bytes: d, 8 s of 6 bits (high bits in uint16, low ones in 4 bytes), 128 bytes, each 16 as
//           Q4_0                                                                           W = d * (s - 32) * v[q]
//   Q4_K    256 weights, 144 bytes: d, dmin, 8 pairs of 6 bits (s, m), 128 bytes           W = d * s * q - dmin * m
//   Q5_K    256 weights, 176 bytes: as Q4_K, with 32 bytes of high bits before the codes
//   Q6_K    256 weights, 210 bytes: 128 bytes low nibbles, 64 of high bits, 16 int8 s, d   W = d * s * (q - 32)
#pragma once

#include <cstdint>
#include <string>

#include "kernels/format.h"

namespace kt {

struct GgufType {
  const char* name;
  Format format;
  int64_t columns, bytes;  // of a block
};

// Null for a type that is not known. BF16 is one, with blocks of one weight.
const GgufType* find_gguf_type(const std::string& name);
// "BF16, Q8_0, ..."
std::string known_gguf_types();

// Where the parts of the blocks go, one after the other (weights/packed.h, PlainMatrix). Those that the format lacks
// are null.
struct GgufParts {
  uint8_t* codes;
  float* scales;
  uint8_t *scale_bytes, *mins;
  uint16_t *supers, *min_supers;
};

// Index of the first block whose scale is NaN, infinite or beyond 1e30; -1: none. For all types but BF16.
int64_t unpack_gguf(const GgufType& type, const uint8_t* blocks, int64_t count, GgufParts parts);

}  // namespace kt
