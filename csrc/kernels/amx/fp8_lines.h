// A packed line of fp8 (4 columns) to two lines of bf16 (2 columns each). Exact: every fp8 number is a bf16.
#pragma once

#include <cstdint>

#include "kernels/amx/kernels.h"
#include "kernels/generic/fp8_bytes.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

inline void unpack_fp8_line(const uint8_t* line, uint8_t* out) {
  look_up_fp8(line, kFp8Bytes.low, kFp8Bytes.high, out);
}

// `cols` columns, a multiple of 4, from the line that `lines` points to; lines `ahead` bytes away are prefetched.
inline void unpack_fp8(const uint8_t* lines, int64_t cols, uint8_t* out, int64_t ahead) {
  for (int64_t line = 0; line < cols / 4; ++line) {
    __builtin_prefetch(lines + line * kLineBytes + ahead);
    unpack_fp8_line(lines + line * kLineBytes, out + 2 * line * kLineBytes);
  }
}

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
