// Integer products for any processor: plain loops, 16 sums of one row at a time. Codes lie in the order of the columns.
#include "kernels/generic/group_factors.h"
#include "kernels/generic/nibbles.h"
#include "kernels/generic/quantize.h"
#include "kernels/portable/kernels.h"

namespace kt::portable {
namespace {

struct Group {
  int64_t col, cols;
};

Group group_at(const PackedShape& shape, int64_t g) {
  const int64_t group = shape.activation_group(), col = g * group, left = shape.padded_cols() - col;
  return {col, group < left ? group : left};
}

void add_int8(const uint8_t* lines, const int8_t* a, int64_t cols, int32_t* sum) {
  for (int64_t col = 0; col < cols; col += 4) {
    const uint8_t* line = lines + col / 4 * kLineBytes;
    for (int64_t r = 0; r < kBlockRows; ++r) {
      for (int64_t j = 0; j < 4; ++j) sum[r] += line[4 * r + j] * a[col + j];
    }
  }
}

// The level of row r in column `col` of a unit of nibbles.
template <Encoding kEncoding>
int32_t level(const uint8_t* unit, int64_t r, int64_t col) {
  using Unit = Nibbles<kEncoding>;
  const int64_t step = col / 4, byte = 4 * r + col % 4;
  const int32_t both = unit[step / 2 * kLineBytes + byte], nibble = step % 2 ? both >> 4 : both & 15;
  if (levels_of_nibbles(kEncoding)) return levels_of_nibbles(kEncoding)[nibble];
  if (Unit::kHighBits == 0) return nibble;
  const int32_t high = unit[Unit::kLines * kLineBytes + byte] >> (Unit::kHighBits * step);
  return nibble | (high << 4 & Unit::kHighMask);
}

template <Encoding kEncoding>
void add_nibbles(const uint8_t* lines, const int8_t* a, int64_t cols, int32_t* sum) {
  using Unit = Nibbles<kEncoding>;
  for (; cols > 0; cols -= Unit::kColumns, a += Unit::kColumns, lines += Unit::kAllLines * kLineBytes) {
    for (int64_t r = 0; r < kBlockRows; ++r) {
      for (int64_t col = 0; col < Unit::kColumns; ++col) sum[r] += level<kEncoding>(lines, r, col) * a[col];
    }
  }
}

using AddGroup = void (*)(const uint8_t* lines, const int8_t* a, int64_t cols, int32_t* sum);

AddGroup add_group(Encoding encoding) {
  switch (encoding) {
    case Encoding::kInt4:
      return add_nibbles<Encoding::kInt4>;
    case Encoding::kInt5:
      return add_nibbles<Encoding::kInt5>;
    case Encoding::kInt6:
      return add_nibbles<Encoding::kInt6>;
    case Encoding::kFp4:
      return add_nibbles<Encoding::kFp4>;
    case Encoding::kFp4By16:
      return add_nibbles<Encoding::kFp4By16>;
    case Encoding::kIq4:
      return add_nibbles<Encoding::kIq4>;
    default:
      return add_int8;
  }
}

void multiply_row(const PackedShape& shape, const Block& block, const int8_t* a, const float* scales,
                  const int32_t* sums, float* c) {
  const AddGroup add = add_group(shape.format.encoding);
  float total[kBlockRows] = {};
  for (int64_t g = 0; g < shape.activation_groups(); ++g) {
    const Group group = group_at(shape, g);
    int32_t sum[kBlockRows];
    for (int64_t r = 0; r < kBlockRows; ++r) {
      const int64_t zero = block.zeros ? block.zeros[g * kBlockRows + r] : shape.format.default_zero();
      sum[r] = -static_cast<int32_t>(zero) * sums[g];
    }
    const uint8_t* lines = block.lines + shape.lines(group.col) * kLineBytes;
    add(lines, a + group.col, group.cols, sum);
    for (int64_t r = 0; r < kBlockRows; ++r) {
      const float factor = block.group_scales ? group_scale(shape.format, block, g, r) * scales[g] : scales[g];
      total[r] += static_cast<float>(sum[r]) * factor;
      if (block.mins) total[r] -= group_min(shape.format, block, g, r) * (scales[g] * static_cast<float>(sums[g]));
    }
  }
  for (int64_t r = 0; r < kBlockRows; ++r) c[r] = total[r] * block.row_scales[r];
}

}  // namespace

QuantizedSize quantized_size(const PackedShape& shape) { return size_in_bytes(shape); }

void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  quantize_to_bytes(shape, row, values, scales, sums);
}

void multiply_int8(const IntegerProduct& p) {
  for (int64_t b = 0; b < p.weights.blocks; ++b) {
    const Block block = block_at(p.weights.shape, p.weights.data, b);
    for (int64_t m = 0; m < p.rows; ++m) {
      multiply_row(p.weights.shape, block, reinterpret_cast<const int8_t*>(p.a.values.row(m)), p.a.scales.row(m),
                   p.a.sums.row(m), p.c.row(m) + b * kBlockRows);
    }
  }
}

}  // namespace kt::portable
