// Codes as checkpoints pack them -> one byte a code; plain values -> bfloat16; the search for values that are not
// numbers.
#pragma once

#include <cstdint>

namespace kt {

// Index of the first value that is NaN or infinite; -1: none.
int64_t first_not_finite(const uint16_t* bf16, int64_t count);
// Index of the first NaN of e4m3; -1: none.
int64_t first_fp8_nan(const uint8_t* values, int64_t count);

// float16 and float32 -> bfloat16, rounded to nearest even. `wide`: bytes of a value, 2 or 4. Values that are not
// finite, or become so, stay for `first_not_finite` to find.
void narrow_to_bf16(const void* values, int64_t wide, int64_t count, uint16_t* bf16);

// `count` nibbles, low first.
void unpack_nibbles(const uint8_t* packed, int64_t count, uint8_t* codes);
// Signed bytes -> codes with 128 added.
void unpack_signed(const uint8_t* values, int64_t count, uint8_t* codes);

// A matrix of codes whose words lie column by column.
struct WordColumns {
  const uint32_t* words;
  int64_t rows, cols;
};
// GPTQ: words [cols / (32 / bits)][rows] -> codes [count][cols] of the rows from `first` on.
void unpack_gptq(const WordColumns& matrix, int bits, int64_t first, int64_t count, uint8_t* codes);
// AWQ: words [cols][rows / 8], each of eight rows in the order 0, 2, 4, 6, 1, 3, 5, 7 -> codes [count][cols] of the
// rows from `first` on; both multiples of 8.
void unpack_awq(const WordColumns& matrix, int64_t first, int64_t count, uint8_t* codes);

}  // namespace kt
