// What an instruction set must provide. A new weight format is one decoder, a new instruction set one more Tiles.
//
// Three ways to multiply, chosen by the caller for a whole call, never by the number of rows:
//   multiply        float32 activations; weights decoded to float32; exact products, float32 sums
//   multiply_bf16   bf16 activations and weights (bf16, fp8), float32 sums
//   multiply_int8   activations quantized to int8, integer weights, exact integer sums within a group
//
// Every element of a result is one chain of additions in the order of the inner index (group by group, where the
// weights have groups), whatever the other rows and columns of the call are. A token's result therefore depends neither
// on the batch nor on the split of work between threads. A kernel may use other register tiles for few rows than for
// many, but the same order of additions. Kernels allocate nothing and start no threads; panels lie on the stack (64 KiB
// at most).
#pragma once

#include <cstdint>

#include "base/rows.h"
#include "kernels/activation.h"
#include "kernels/layout.h"

namespace kt {

// c[m, n] (+)= sum over i of a[m * a_row + i * a_col] * b[i, n], for m < rows, n < cols, i < inner.
struct PlainProduct {
  int64_t rows, cols, inner;
  const float* a;
  int64_t a_row, a_col;
  Rows<const float> b;
  Rows<float> c;
  bool accumulate = false;
};

// c[m, n] = factor * sum over i of a[m, i] * b[n, i]: rows of a against rows of b. For few n (a LoRA's rank).
struct RowProduct {
  int64_t rows, cols, inner;
  Rows<const float> a;
  Rows<const float> b{};  // or
  Rows<const uint16_t> b_bf16{};
  float factor;
  Rows<float> c;
};

// c[m, j] (+)= sum over n of a[m, n] * b[n, j], for m < rows, j < cols, n < inner: bf16 matrices as they lie, float32
// sums. At most kPairCols columns and kPairInner rows of b.
struct PairProduct {
  int64_t rows, cols, inner;
  Rows<const uint16_t> a, b;
  Rows<float> c;
  bool accumulate = false;
};
constexpr int64_t kPairCols = 48, kPairInner = 256;

// Consecutive blocks of a packed matrix. A matrix in pieces (NUMA nodes) is several PackedBlocks.
struct PackedBlocks {
  PackedShape shape;    // of the whole matrix
  const uint8_t* data;  // the first of these blocks
  int64_t blocks;
  const uint8_t* next = nullptr;  // blocks of this shape that are read next, if known: only prefetched
};

// c[m, 16 * b + i] = sum over k of a[m, k] * W(16 * b + i, k) for m < rows, b < blocks. a has shape.padded_cols()
// columns (padding zero), c has 16 * blocks. Neither a nor c need be aligned.
template <class T>
struct PackedProduct {
  int64_t rows;
  Rows<const T> a;
  PackedBlocks weights;
  Rows<float> c;
};

// Rows of int8 activations, written by `quantize`. `values` holds the codes in an order that the instruction set
// chooses. A row is the sum of its groups, each codes times one scale:
//   columns  group g is columns g * shape.activation_group() and on: shape.activation_groups() groups
//   planes   group 0 is the high and group 1 the low digit of every column (AMX, int8 weights with one scale a row)
// scales and sums (of the codes of a group) are [rows][groups].
struct QuantizedRows {
  Rows<const uint8_t> values;
  Rows<const float> scales;
  Rows<const int32_t> sums;
};

struct QuantizedSize {
  int64_t row_bytes;  // from one row to the next, exactly: the ld of QuantizedRows::values
  int64_t groups;     // scales and sums of a row
};

struct IntegerProduct {
  int64_t rows;
  QuantizedRows a;
  PackedBlocks weights;
  Rows<float> c;
};

// out[m, j] (+)= sum over n of in[m, n] * W(n, first_col + j), for m < rows, j < cols; W decoded with its scales.
// `transpose_rows` makes `in`. first_col and cols are multiples of 32; columns up to shape.padded_cols() may be asked
// for and are zero beyond shape.cols. The matrix is given in pieces of consecutive blocks, in order.
template <class T>
struct TransposedProduct {
  int64_t rows;
  const T* in;  // float: [padded_rows][padded m]; bf16: [padded_rows / 2][padded m][2]
  int64_t ld;   // padded m: round_up(rows, kTokenUnit)
  const PackedBlocks* pieces;
  int64_t num_pieces;
  int64_t first_col, cols;
  Rows<float> out;
  bool accumulate = false;
  bool resume = false;  // resume from the sums in `out`: the product over earlier pieces
};
constexpr int64_t kTokenUnit = 8;

// Weights as rows of bf16: out[m, k] = W(m, k) for m < rows, k < shape.cols, where row 0 is the first of the blocks.
// A value is that of float32, rounded once. Nothing beyond these rows and columns is written.
struct UnpackedRows {
  PackedBlocks weights;
  int64_t rows;  // at most 16 * blocks
  Rows<uint16_t> out;
};

struct Dense;      // kernels/dense.h
struct Attention;  // kernels/attention.h

struct Tiles {
  const char* name;
  uint32_t required;   // bits of CpuFeature
  const Dense* dense;  // on row-major matrices
  const Attention* attention;

  void (*multiply)(const PackedProduct<float>&);          // any encoding
  void (*multiply_bf16)(const PackedProduct<uint16_t>&);  // bf16, fp8. Null: widen the activations, use `multiply`
  void (*multiply_int8)(const IntegerProduct&);           // integers and mxfp4
  void (*multiply_transposed)(const TransposedProduct<float>&);
  void (*multiply_transposed_bf16)(const TransposedProduct<uint16_t>&);  // null where multiply_bf16 is
  void (*unpack)(const UnpackedRows&);                                   // any encoding
  void (*product)(const PlainProduct&);
  void (*row_product)(const RowProduct&);
  void (*pair_product)(const PairProduct&);  // null: widen, and use `product`

  // One row of `cols` floats -> codes in `values` (zero from there to shape.padded_cols(); the rest of the row's bytes
  // is neither written nor used), scales and sums by group. A group of zeros has scale 0. Codes are round-to-nearest-
  // even of x * 127 / absmax; as planes, 128 * high + low is that of x * 16256 / absmax.
  QuantizedSize (*quantized_size)(const PackedShape&);
  void (*quantize)(const PackedShape&, const float* row, uint8_t* values, float* scales, int32_t* sums);

  // in[m, n] -> the operand of a transposed product: out[n * ld + m], padding zero in n (to padded_rows) and m.
  void (*transpose_rows)(Rows<const float> in, int64_t rows, int64_t cols, float* out, int64_t ld);
  void (*transpose_rows_bf16)(Rows<const float> in, int64_t rows, int64_t cols, uint16_t* out, int64_t ld);

  // Elementwise. An element's arithmetic does not depend on its place in the array.
  void (*widen)(const uint16_t* from, int64_t count, float* to);   // bf16 -> float32
  void (*narrow)(const float* from, int64_t count, uint16_t* to);  // float32 -> bf16, nearest even
  // h = f(gate, up); of an activation without a gate `gate` is not read, and may be null.
  void (*activate)(const Activation&, const float* gate, const float* up, int64_t count, float* h);
  // `dh` is the gradient of h without the routing weight. Returns <h, dh>; overwrites gate and up with their gradients
  // times `weight`.
  double (*activate_backward)(const Activation&, float* gate, float* up, const float* dh, float weight, int64_t count);
  void (*add_scaled)(const float* from, float factor, int64_t count, float* to);    // to += factor * from
  void (*sigmoid)(const float* from, int64_t count, float* to);                     // 1 / (1 + e^-from)
  void (*exponential)(const float* from, float largest, int64_t count, float* to);  // e^(from - largest), at most 1
};

}  // namespace kt
