// Products with row-major matrices, as SGLang and Hugging Face hold the weights of linear layers, and what a decoder
// layer computes row by row: RMSNorm, rotary embedding, the choice of experts. Weights are read in place; there is no
// packed copy.
//
// Every element of a product is one sum over the inner index, in float32, in an order that depends on the instruction
// set, the two dtypes and `inner` only: not on the number of rows or columns, nor on the element's place. So a row of
// the result depends on its own row of x and on w. Kernels use other register tiles for few rows than for many; a tile
// has one vector of sums for each of its elements. Kernels allocate nothing and start no threads.
//
// The order: with L lanes, a step is L columns, or 2 L columns where both matrices are bf16. Steps are added in
// ascending order. Columns beyond `inner` in the last step count as zeros.
//   float32 in either matrix   lane l takes column l of a step: sum = fma(x, w, sum); portable: product and sum rounded
//   both bf16                  lane l takes columns 2 l and 2 l + 1: AVX-512's vdpbf16ps for the pair; elsewhere the
//                              even columns' step as above, then the odd columns' one; AMX: TDPBF16PS for 32 columns,
//                              without lanes
// Then lane l is added to lane l + L / 2, the half that remains is halved in the same way, and so on to one number;
// then the bias is added, and the result is rounded once.
//
// NaN and Inf propagate as in any product; they reach the results of their own row of x, or of their row of w, alone.
#pragma once

#include <cstdint>

#include "kernels/delta.h"
#include "kernels/tiles.h"

namespace kt {

// A row-major matrix of float32 or bf16: its rows are `stride` elements apart, its columns adjacent.
struct RowMajor {
  void* data = nullptr;
  int64_t stride = 0;
  bool bf16 = false;

  template <class T>
  T* row(int64_t index) const {
    return static_cast<T*>(data) + index * stride;
  }
};

// y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n], for m < rows, first_col <= n < first_col + cols, k < inner.
struct DenseProduct {
  int64_t first_row, rows;
  int64_t first_col, cols;
  int64_t inner;
  RowMajor x, w, y;
  const float* bias = nullptr;    // by n; null: none
  const void* operand = nullptr;  // of all rows of x, where the instruction set has `prepare` and needs it
};

// Products and `prepare` begin at multiples of this many rows.
constexpr int64_t kDenseRowUnit = 16;

// For m < rows, k < cols, with T the dtype of all matrices but `inverse`, and each result of T rounded once:
//
//   total[m, k] = x[m, k] + residual[m, k]                          where there is a residual; else total is x
//   inverse[m]  = 1 / sqrt(mean over k of total[m, k]^2 + epsilon)  float32
//   y[m, k]     = weight[k] * T(total[m, k] * inverse[m])
//
// With `offset` the weight is an offset from one, and there is no rounding between the products:
//
//   y[m, k]     = (1 + weight[k]) * (total[m, k] * inverse[m])
//
// The squares are float32 and summed in 16 lanes, lane l taking the columns l, l + 16, ... in this order; then halves
// are added as in a product. The bits are the same on every instruction set.
struct NormRows {
  int64_t first_row, rows, cols;
  RowMajor x, residual, total, y;  // residual.data, total.data null: no residual
  const void* weight;
  float epsilon;
  float* inverse;  // null: not wanted
  bool offset = false;
};

// Rotary embedding of one token's heads, in place: the two elements of each of a head's `half` pairs rotate by the
// token's angle i. Pair i is elements i and half + i, or 2 i and 2 i + 1 if `interleaved`. With T the dtype of `x` and
// `angles`, (a, b) a pair, and every product and sum rounded to T:
//
//   a = a * cos[i] - b * sin[i],    b = b * cos[i] + a * sin[i]    (both from the old a and b)
//
// The elements from 2 * half on do not change. The bits are the same on every instruction set, and those of torch.
struct RotaryRows {
  int64_t heads, half;
  RowMajor x;          // a row for each head
  const void* angles;  // of the token: `half` cosines, then `half` sines
  bool interleaved = false;
};

// The choice of experts: for each row of logits the `top_k` largest, larger ones first, of equal ones the first. With
// p = softmax of the row, in float32:
//
//   weights[m, k] = p[ids[m, k]], divided by the sum of the row's weights (in their order) if `normalises`
//
// The softmax's sum has 16 lanes as in RMSNorm. The bits are the same on every instruction set. NaN or +Inf among the
// logits makes all weights of the row NaN; the ids are valid. With `given` ids only the weights are computed.
struct RouterRows {
  int64_t first_row, rows, experts, top_k;  // top_k <= experts
  RowMajor logits;
  bool normalises;
  float* weights;      // [rows from row 0, top_k]
  int32_t* ids;        // the same
  bool given = false;  // `ids` are read: each in [0, experts)
};

struct Dense {
  void (*multiply)(const DenseProduct&);
  void (*normalise)(const NormRows&);
  void (*rotate)(const RotaryRows&);
  void (*choose_experts)(const RouterRows&);

  // Null where `multiply` reads x as it lies. Else the bytes of the operand for all rows of x, aligned to a cache line;
  // 0: none is needed for these dtypes. `prepare` writes the part for rows [unit * kDenseRowUnit, + kDenseRowUnit).
  int64_t (*operand_bytes)(const DenseProduct&) = nullptr;
  void (*prepare)(const DenseProduct&, int64_t unit, void* operand) = nullptr;

  void (*delta_rule)(const DeltaRule&) = nullptr;  // every instruction set has both
  void (*delta_rule_backward)(const DeltaGradient&) = nullptr;
};

namespace portable {
extern const Dense kDense;
}
namespace avx2 {
extern const Dense kDense;
}
namespace avx512_base {
extern const Dense kDense;
}
namespace avx512 {
extern const Dense kDense;
}

}  // namespace kt
