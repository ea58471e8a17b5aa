// What an instruction set must provide. Formats unpack a tile, instruction sets multiply one: a new weight format
// hands its blocks over in the layout of layout.h, a new instruction set fills in one more Tiles.
//
// Every element of a result is one chain of additions in the order of the inner index, whatever the other rows and
// columns of the call are. So a token's result does not depend on the batch, nor on how work is cut for threads.
#pragma once

#include <cstdint>

namespace kt {

// c[m, n] (+)= sum over i of a[m * a_row + i * a_col] * b[i * ldb + n], for m < rows, n < cols, i < inner.
struct PlainProduct {
  int64_t rows, cols, inner;
  const float* a;
  int64_t a_row, a_col;
  const float* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  bool accumulate;
};

// c[m, 16 * b + i] = sum over k of a[m, k] * W(16 * b + i, k) for m < rows, b < blocks; `weights` points to the first
// block; a has 2 * pairs columns (padding zero), c 16 * blocks.
template <class T>
struct PackedProduct {
  int64_t rows;
  const T* a;
  int64_t lda;
  const uint16_t* weights;
  int64_t pairs, blocks;
  float* c;
  int64_t ldc;
};

struct Tiles {
  const char* name;
  uint32_t required;  // bits of CpuFeature

  void (*multiply)(const PackedProduct<float>&);
  // Activations in bf16, products and sums in float32. Null: widen the activations and use `multiply`.
  void (*multiply_bf16)(const PackedProduct<uint16_t>&);
  // out[i * ld + j] = W(i, 2 * first_pair + j) of one block, i < 16, j < 2 * num_pairs; num_pairs is a multiple of 16.
  void (*unpack_rows)(const uint16_t* block, int64_t first_pair, int64_t num_pairs, float* out, int64_t ld);
  void (*product)(const PlainProduct&);
};

}  // namespace kt
