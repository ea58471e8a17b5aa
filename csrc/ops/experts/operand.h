// Rows of activations as the operand of a packed product: float32, bf16, or int8 with scales and sums.
#pragma once

#include "base/rows.h"
#include "base/scratch.h"
#include "ops/pairs/call.h"

namespace kt {

struct Operand {
  Arithmetic arithmetic = Arithmetic::kFloat;
  // Without data where the arithmetic does not use them.
  Rows<float> f32;  // in addition to the others where a caller needs it (LoRA)
  Rows<uint16_t> bf16;
  Rows<uint8_t> codes;
  Rows<float> scales;
  Rows<int32_t> sums;

  Operand from(int64_t row) const;
};

// Row stride of activations for a matrix with `cols` columns: padded as in the packed layout, plus one cache line, so
// that the rows of a register tile do not all fall into the same sets of the L1 cache.
inline int64_t activation_stride(int64_t cols) { return round_up(cols, kColumnUnit) + 16; }

// Memory of a thread for operands.
class OperandBuffer {
 public:
  // Room for `rows` rows of activations of a matrix of this shape. `with_f32`: the float32 rows too, in any arithmetic.
  Operand reserve(const Tiles& tiles, const PackedShape& shape, Arithmetic arithmetic, int64_t rows, bool with_f32);

 private:
  Scratch f32_, bf16_, codes_, scales_, sums_;
};

// Row `row` of `operand` from its float32 values (which may be its own f32 row): narrows or quantizes as needed.
void finish_row(const Tiles& tiles, const PackedShape& shape, const Operand& operand, int64_t row, const float* values);

// Copies row `from` of `source` to row `to` of `target`, in every form that both have.
void copy_row(const Operand& source, int64_t from, const Operand& target, int64_t to);

// c = rows of the operand times the blocks, transposed: c[m, 16 * b + i].
void multiply_rows(const Tiles& tiles, const Operand& operand, int64_t rows, const PackedBlocks& blocks, Rows<float> c);

}  // namespace kt
