#include "ops/experts/operand.h"

#include <algorithm>
#include <cstring>

namespace kt {

Operand Operand::from(int64_t row) const {
  Operand moved = *this;
  const auto move = [row](auto& rows) { rows = rows.data ? rows.from(row) : rows; };
  move(moved.f32);
  move(moved.bf16);
  move(moved.codes);
  move(moved.scales);
  move(moved.sums);
  return moved;
}

Operand OperandBuffer::reserve(const Tiles& tiles, const PackedShape& shape, Arithmetic arithmetic, int64_t rows,
                               bool with_f32) {
  Operand made;
  made.arithmetic = arithmetic;
  const int64_t ld = activation_stride(shape.cols);
  if (with_f32 || arithmetic == Arithmetic::kFloat) made.f32 = {f32_.reserve<float>(rows * ld), ld};
  if (arithmetic == Arithmetic::kBf16) made.bf16 = {bf16_.reserve<uint16_t>(rows * ld), ld};
  if (arithmetic == Arithmetic::kInt8) {
    const auto [row_bytes, groups] = tiles.quantized_size(shape);
    made.codes = {codes_.reserve<uint8_t>(rows * row_bytes), row_bytes};
    made.scales = {scales_.reserve<float>(rows * groups), groups};
    made.sums = {sums_.reserve<int32_t>(rows * groups), groups};
  }
  return made;
}

void finish_row(const Tiles& tiles, const PackedShape& shape, const Operand& operand, int64_t row,
                const float* values) {
  const Operand at = operand.from(row);
  const int64_t cols = shape.cols;
  if (at.f32.data) {
    if (at.f32.data != values) std::memcpy(at.f32.data, values, static_cast<size_t>(cols) * sizeof(float));
    std::fill(at.f32.data + cols, at.f32.row(1), 0.0f);
  }
  if (at.bf16.data) {
    tiles.narrow(values, cols, at.bf16.data);
    std::fill(at.bf16.data + cols, at.bf16.row(1), uint16_t{0});
  }
  if (at.codes.data) tiles.quantize(shape, values, at.codes.data, at.scales.data, at.sums.data);
}

void copy_row(const Operand& source, int64_t from, const Operand& target, int64_t to) {
  const auto copy = [](auto in, auto out) {
    if (in.data && out.data) std::memcpy(out.data, in.data, static_cast<size_t>(in.ld) * sizeof *in.data);
  };
  const Operand in = source.from(from), out = target.from(to);
  copy(in.f32, out.f32);
  copy(in.bf16, out.bf16);
  copy(in.codes, out.codes);
  copy(in.scales, out.scales);
  copy(in.sums, out.sums);
}

void multiply_rows(const Tiles& tiles, const Operand& operand, int64_t rows, const PackedBlocks& blocks,
                   Rows<float> c) {
  switch (operand.arithmetic) {
    case Arithmetic::kFloat:
      return tiles.multiply({.rows = rows, .a = operand.f32, .weights = blocks, .c = c});
    case Arithmetic::kBf16:
      return tiles.multiply_bf16({.rows = rows, .a = operand.bf16, .weights = blocks, .c = c});
    case Arithmetic::kInt8: {
      const QuantizedRows a{.values = operand.codes, .scales = operand.scales, .sums = operand.sums};
      return tiles.multiply_int8({.rows = rows, .a = a, .weights = blocks, .c = c});
    }
  }
}

}  // namespace kt
