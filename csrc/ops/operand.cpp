#include "ops/operand.h"

#include <algorithm>
#include <cstring>

namespace kt {

Operand Operand::from(int64_t row) const {
  Operand moved = *this;
  if (f32) moved.f32 += row * ld;
  if (bf16) moved.bf16 += row * ld;
  if (codes) {
    moved.codes += row * ld_codes;
    moved.scales += row * ld_groups;
    moved.sums += row * ld_groups;
  }
  return moved;
}

Operand OperandBuffer::reserve(const Tiles& tiles, const PackedShape& shape, Arithmetic arithmetic, int64_t rows,
                               bool with_f32) {
  Operand made;
  made.arithmetic = arithmetic;
  made.ld = activation_stride(shape.cols);
  if (with_f32 || arithmetic == Arithmetic::kFloat) made.f32 = f32_.reserve<float>(rows * made.ld);
  if (arithmetic == Arithmetic::kBf16) made.bf16 = bf16_.reserve<uint16_t>(rows * made.ld);
  if (arithmetic == Arithmetic::kInt8) {
    const QuantizedSize size = tiles.quantized_size(shape);
    made.ld_codes = size.row_bytes;
    made.ld_groups = size.groups;
    made.codes = codes_.reserve<uint8_t>(rows * made.ld_codes);
    made.scales = scales_.reserve<float>(rows * made.ld_groups);
    made.sums = sums_.reserve<int32_t>(rows * made.ld_groups);
  }
  return made;
}

void finish_row(const Tiles& tiles, const PackedShape& shape, const Operand& operand, int64_t row,
                const float* values) {
  const Operand at = operand.from(row);
  const int64_t cols = shape.cols;
  if (at.f32) {
    if (at.f32 != values) std::memcpy(at.f32, values, static_cast<size_t>(cols) * sizeof(float));
    std::fill(at.f32 + cols, at.f32 + at.ld, 0.0f);
  }
  if (at.bf16) {
    tiles.narrow(values, cols, at.bf16);
    std::fill(at.bf16 + cols, at.bf16 + at.ld, uint16_t{0});
  }
  if (at.codes) tiles.quantize(shape, values, at.codes, at.scales, at.sums);
}

void copy_row(const Operand& source, int64_t from, const Operand& target, int64_t to) {
  const Operand in = source.from(from), out = target.from(to);
  if (in.f32 && out.f32) std::memcpy(out.f32, in.f32, static_cast<size_t>(in.ld) * sizeof(float));
  if (in.bf16 && out.bf16) std::memcpy(out.bf16, in.bf16, static_cast<size_t>(in.ld) * sizeof(uint16_t));
  if (in.codes && out.codes) {
    std::memcpy(out.codes, in.codes, static_cast<size_t>(in.ld_codes));
    std::memcpy(out.scales, in.scales, static_cast<size_t>(in.ld_groups) * sizeof(float));
    std::memcpy(out.sums, in.sums, static_cast<size_t>(in.ld_groups) * sizeof(int32_t));
  }
}

void multiply_rows(const Tiles& tiles, const Operand& operand, int64_t rows, const PackedBlocks& blocks, float* c,
                   int64_t ldc) {
  switch (operand.arithmetic) {
    case Arithmetic::kFloat:
      return tiles.multiply({rows, operand.f32, operand.ld, blocks, c, ldc});
    case Arithmetic::kBf16:
      return tiles.multiply_bf16({rows, operand.bf16, operand.ld, blocks, c, ldc});
    case Arithmetic::kInt8:
      return tiles.multiply_int8(
          {rows, {operand.codes, operand.ld_codes, operand.scales, operand.sums, operand.ld_groups}, blocks, c, ldc});
  }
}

}  // namespace kt
