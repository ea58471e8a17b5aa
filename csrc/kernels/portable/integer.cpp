// Integer products for any processor: plain loops, 16 sums of one row at a time. Codes lie in the order of the columns.
#include "base/fp16.h"
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

void add_int4(const uint8_t* lines, const int8_t* a, int64_t cols, int32_t* sum) {
  for (int64_t col = 0; col < cols; col += 8) {
    const uint8_t* line = lines + col / 8 * kLineBytes;
    for (int64_t r = 0; r < kBlockRows; ++r) {
      for (int64_t j = 0; j < 4; ++j) {
        const int32_t both = line[4 * r + j];
        sum[r] += (both & 15) * a[col + j] + (both >> 4) * a[col + 4 + j];
      }
    }
  }
}

void multiply_row(const PackedShape& shape, const Block& block, const int8_t* a, const float* scales,
                  const int32_t* sums, float* c) {
  const auto* group_scales = static_cast<const uint16_t*>(block.group_scales);
  float total[kBlockRows] = {};
  for (int64_t g = 0; g < shape.activation_groups(); ++g) {
    const Group group = group_at(shape, g);
    int32_t sum[kBlockRows];
    for (int64_t r = 0; r < kBlockRows; ++r) {
      const int64_t zero = block.zeros ? block.zeros[g * kBlockRows + r] : shape.format.default_zero();
      sum[r] = -static_cast<int32_t>(zero) * sums[g];
    }
    const uint8_t* lines = block.lines + group.col / shape.columns_per_line() * kLineBytes;
    (shape.format.encoding == Encoding::kInt4 ? add_int4 : add_int8)(lines, a + group.col, group.cols, sum);
    for (int64_t r = 0; r < kBlockRows; ++r) {
      const float factor = group_scales ? fp16_to_float(group_scales[g * kBlockRows + r]) * scales[g] : scales[g];
      total[r] += static_cast<float>(sum[r]) * factor;
    }
  }
  for (int64_t r = 0; r < kBlockRows; ++r) c[r] = total[r] * block.row_scales[r];
}

}  // namespace

QuantizedSize quantized_size(const PackedShape& shape) { return grouped_size(shape, 1); }

void quantize(const PackedShape& shape, const float* row, uint8_t* values, float* scales, int32_t* sums) {
  quantize_row(shape, row, scales, sums, [&](int64_t unit, const int8_t* codes) {
    std::memcpy(values + unit * kQuantizeUnit, codes, kQuantizeUnit);
  });
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
