// Integer products: quantization against its definition, products against double precision from the same codes.
#include <algorithm>
#include <cmath>

#include "base/fp16.h"
#include "packed_case.h"
#include "reference.h"

namespace kt_test {
namespace {

using kt::Encoding;
using kt::Format;
using kt::PackedShape;

// Activations in the instruction set's own order, from an unaligned start. The last row first, so that one which wrote
// beyond its own would spoil the next.
class Quantized {
 public:
  Quantized(const kt::Tiles& tiles, const PackedShape& shape, const std::vector<float>& rows, int64_t count)
      : groups_(tiles.quantized_size(shape).groups),
        ld_(tiles.quantized_size(shape).row_bytes),
        ld_groups_(groups_ + 3) {
    values_.resize(static_cast<size_t>(count * ld_ + 32), 0x5a);
    scales_.resize(static_cast<size_t>(count * ld_groups_), -7.0f);
    sums_.resize(static_cast<size_t>(count * ld_groups_), -7);
    for (int64_t m = count; m-- > 0;) {
      const auto from = rows.begin() + m * shape.cols;
      const std::vector<float> row(from, from + shape.cols);  // of its own: reading beyond it is an error
      tiles.quantize(shape, row.data(), values_.data() + 16 + m * ld_, &scales_[static_cast<size_t>(m * ld_groups_)],
                     &sums_[static_cast<size_t>(m * ld_groups_)]);
    }
  }
  kt::QuantizedRows rows(int64_t first) const {
    return {.values = {values_.data() + 16 + first * ld_, ld_},
            .scales = {scales_.data() + first * ld_groups_, ld_groups_},
            .sums = {sums_.data() + first * ld_groups_, ld_groups_}};
  }
  float scale(int64_t m, int64_t g) const { return scales_[static_cast<size_t>(m * ld_groups_ + g)]; }
  int32_t sum(int64_t m, int64_t g) const { return sums_[static_cast<size_t>(m * ld_groups_ + g)]; }
  bool kept_within(int64_t count) const {
    bool kept = true;
    for (int64_t m = 0; m < count; ++m) {
      for (int64_t g = groups_; g < ld_groups_; ++g) kept &= scale(m, g) == -7.0f && sum(m, g) == -7;
    }
    for (int64_t i = 0; i < 16; ++i)
      kept &= values_[static_cast<size_t>(i)] == 0x5a && values_[static_cast<size_t>(16 + count * ld_ + i)] == 0x5a;
    return kept;
  }

 private:
  int64_t groups_, ld_, ld_groups_;
  std::vector<uint8_t> values_;
  std::vector<float> scales_;
  std::vector<int32_t> sums_;
};

// The definition: values of a row, scales and sums by group.
struct Definition {
  std::vector<double> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

bool has_planes(const kt::Tiles& tiles, const PackedShape& shape) {
  const std::string name = tiles.name;
  const bool amx = name == "amx" || name == "amx-model";
  return amx && shape.format == Format{Encoding::kInt8, 0, false} && shape.padded_cols() <= 65536;
}

Definition define_planes(const PackedShape& shape, const float* row) {
  float largest = 0.0f;
  for (int64_t k = 0; k < shape.cols; ++k) largest = std::max(largest, std::fabs(row[k]));
  const float factor = largest == 0.0f ? 0.0f : 16256.0f / largest, scale = largest / 16256.0f;
  Definition d{{}, {128 * scale, scale}, {0, 0}};
  for (int64_t k = 0; k < shape.cols; ++k) {
    const double code = std::nearbyint(row[k] * factor), high = std::floor((code + 64) / 128);
    d.values.push_back(code * static_cast<double>(scale));
    d.sums[0] += static_cast<int32_t>(high);
    d.sums[1] += static_cast<int32_t>(code - 128 * high);
  }
  return d;
}

Definition define(const kt::Tiles& tiles, const PackedShape& shape, const float* row) {
  if (has_planes(tiles, shape)) return define_planes(shape, row);
  Definition d;
  for (int64_t g = 0; g < shape.activation_groups(); ++g) {
    const int64_t begin = g * shape.activation_group();
    const int64_t end = std::min(shape.cols, begin + shape.activation_group());
    float largest = 0.0f;
    for (int64_t k = begin; k < end; ++k) largest = std::max(largest, std::fabs(row[k]));
    const float factor = largest == 0.0f ? 0.0f : 127.0f / largest;
    d.scales.push_back(largest / 127.0f);
    d.sums.push_back(0);
    for (int64_t k = begin; k < end; ++k) {
      const float code = std::nearbyint(row[k] * factor);
      d.values.push_back(static_cast<double>(code) * static_cast<double>(d.scales.back()));
      d.sums.back() += static_cast<int32_t>(code);
    }
  }
  return d;
}

// Scales and sums of groups are as defined.
void check_quantized(const std::string& what, const Quantized& got, int64_t m, const Definition& wanted,
                     Report& report) {
  for (size_t g = 0; g < wanted.scales.size(); ++g) {
    const auto where = [&](const char* field) {
      return [&, field] { return what + " row " + std::to_string(m) + " group " + std::to_string(g) + field; };
    };
    const auto at = static_cast<int64_t>(g);
    report.equal(where(": scale"), got.scale(m, at) == wanted.scales[g]);
    report.equal(where(": sum"), got.sum(m, at) == wanted.sums[g]);
  }
}

std::vector<float> run(const kt::Tiles& tiles, const Quantized& a, int64_t first, int64_t rows,
                       const PackedCase& weights, int64_t first_block, int64_t blocks, int64_t ldc) {
  std::vector<float> c(static_cast<size_t>(rows * ldc), 123.0f);
  const PackedShape& shape = weights.shape;
  const uint8_t* data = weights.data() + first_block * shape.block_bytes();
  tiles.multiply_int8({.rows = rows, .a = a.rows(first), .weights = {shape, data, blocks}, .c = {c.data(), ldc}});
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 16 * blocks; n < ldc; ++n) {
      if (c[static_cast<size_t>(m * ldc + n)] != 123.0f) return {};
    }
  }
  return c;
}

void check_product(const std::string& what, const std::vector<float>& c, int64_t ldc, const PackedCase& weights,
                   const std::vector<Definition>& a, Report& report) {
  const PackedShape& shape = weights.shape;
  for (size_t m = 0; m < a.size(); ++m) {
    for (int64_t n = 0; n < shape.padded_rows(); ++n) {
      const Sum sum = dot(
          shape.cols, [&](int64_t k) { return weights.at(n, k); },
          [&](int64_t k) { return a[m].values[static_cast<size_t>(k)]; });
      report.close([&] { return what + " row " + std::to_string(m) + " column " + std::to_string(n); },
                   static_cast<double>(c[static_cast<size_t>(static_cast<int64_t>(m) * ldc + n)]), sum.value,
                   kSumTolerance, sum.scale);
    }
  }
}

bool same_bits(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

// A row's bits depend neither on the rows beside it nor on the blocks of the call.
void check_cuts(const std::string& what, const kt::Tiles& tiles, const Quantized& a, const std::vector<float>& all,
                int64_t ldc, int64_t rows, const PackedCase& weights, Random& random, Report& report) {
  const int64_t blocks = weights.shape.blocks();
  for (int64_t trial = 0; trial < 3; ++trial) {
    const int64_t first = random.below(rows), count = 1 + random.below(std::min<int64_t>(rows - first, 3));
    const int64_t block = random.below(blocks), some = 1 + random.below(blocks - block);
    const int64_t ld = 16 * some + 1;
    const std::vector<float> part = run(tiles, a, first, count, weights, block, some, ld);
    bool same = !part.empty();
    for (int64_t m = 0; same && m < count; ++m)
      same = same_bits(part.data() + m * ld, all.data() + (first + m) * ldc + 16 * block, 16 * some);
    report.equal(what + ": same bits for rows " + std::to_string(first) + "+" + std::to_string(count), same);
  }
}

void check_case(const kt::Tiles& tiles, const Format& format, int64_t rows, int64_t out, int64_t cols, Random& random,
                Report& report) {
  if (!report.takes()) return;
  const PackedCase& weights = packed_case(out, cols, format, random);
  const std::string what = std::string(tiles.name) + " " + kt::format_name(format) + " " + std::to_string(rows) + "x" +
                           std::to_string(out) + "x" + std::to_string(cols);
  std::vector<float> in = random.floats(rows * cols);
  const bool one_scale = has_planes(tiles, weights.shape) && rows > 1;
  const int64_t zeros = one_scale ? cols : std::min(cols, weights.shape.activation_group());
  std::fill_n(in.begin() + (rows - 1) * cols, zeros, 0.0f);  // the last row's columns with the first scale
  const Quantized a(tiles, weights.shape, in, rows);
  std::vector<Definition> wanted;
  for (int64_t m = 0; m < rows; ++m) {
    wanted.push_back(define(tiles, weights.shape, in.data() + m * cols));
    check_quantized(what, a, m, wanted.back(), report);
  }
  report.equal(what + ": quantize writes its row only", a.kept_within(rows));
  const int64_t ldc = weights.shape.padded_rows() + 5;
  const std::vector<float> c = run(tiles, a, 0, rows, weights, 0, weights.shape.blocks(), ldc);
  if (c.empty()) return report.fail(what + ": wrote outside of the result");
  check_product(what, c, ldc, weights, wanted, report);
  check_cuts(what, tiles, a, c, ldc, rows, weights, random, report);
}

// Row 0: every column; row 1: none; then every other column, two of four, four of eight ...
bool at_top(int64_t row, int64_t col) { return row == 0 || (row > 1 && (col >> (row - 2)) % 2); }

// Weights' codes at the ends of their range; activations 127 and `low`.
void check_extremes(const kt::Tiles& tiles, const Format& format, int64_t cols, float low, Report& report) {
  const PackedShape shape{16, cols, format};
  const uint8_t top = top_code(format), bottom = bottom_code(format);
  Factors factors = Factors::units(shape);
  std::vector<uint8_t> codes;
  for (int64_t row = 0; row < 16; ++row) {
    for (int64_t k = 0; k < cols; ++k) codes.push_back(at_top(row, k) ? top : bottom);
    for (int64_t g = 0; format.zero_points && g < shape.groups(); ++g)
      factors.zeros.push_back(row % 2 ? top : uint8_t{0});
  }
  std::vector<uint8_t> packed(static_cast<size_t>(shape.bytes() + 64));
  uint8_t* data = packed.data() + (64 - reinterpret_cast<uintptr_t>(packed.data()) % 64) % 64;
  kt::pack_blocks(factors.plain(shape, codes.data()), 0, 1, data);
  constexpr int64_t kRows = 7;
  std::vector<float> in;
  for (int64_t m = 0; m < kRows; ++m) {
    for (int64_t k = 0; k < cols; ++k) in.push_back(at_top(m, k) || k == cols - 1 ? 127.0f : low);
  }
  const Quantized a(tiles, shape, in, kRows);
  std::vector<float> c(kRows * 16);
  tiles.multiply_int8({.rows = kRows, .a = a.rows(0), .weights = {shape, data, 1}, .c = {c.data(), 16}});
  // Equal terms round alike: their errors add up, one rounding for each group. Half of one is the largest error
  // measured with two groups at most; with more, the products of these scales are exact but for AMX's, a quarter of the
  // sum.
  const auto groups = static_cast<double>(std::max<int64_t>(tiles.quantized_size(shape).groups, 2));
  const std::string what = std::string(tiles.name) + " " + kt::format_name(format) + " extremes " + std::to_string(low);
  for (int64_t m = 0; m < kRows; ++m) {
    for (int64_t n = 0; n < 16; ++n) {
      const double zero = format.zero_points ? (n % 2 ? top : 0) : static_cast<double>(format.default_zero());
      const Sum sum = dot(
          cols, [&](int64_t k) { return level_of(format, at_top(n, k) ? top : bottom) - zero; },
          [&](int64_t k) { return in[static_cast<size_t>(m * cols + k)]; });
      report.close(what, static_cast<double>(c[static_cast<size_t>(m * 16 + n)]), sum.value, kFloatRounding,
                   groups * sum.scale);
    }
  }
}

// Each code by itself: weights with a single 1 a row, so that a result is one code times its scale.
void check_codes(const kt::Tiles& tiles, Encoding encoding, Random& random, Report& report) {
  const PackedShape shape{128, 100, {encoding, 0, false}};
  const auto zero = static_cast<uint8_t>(shape.format.default_zero());
  std::vector<uint8_t> codes(static_cast<size_t>(shape.rows * shape.cols), zero);
  for (int64_t k = 0; k < shape.cols; ++k) ++codes[static_cast<size_t>(k * shape.cols + k)];
  const std::vector<float> scales(static_cast<size_t>(shape.rows), 1.0f);
  std::vector<uint8_t> packed(static_cast<size_t>(shape.bytes() + 64));
  uint8_t* data = packed.data() + (64 - reinterpret_cast<uintptr_t>(packed.data()) % 64) % 64;
  kt::pack_blocks({shape, codes.data(), scales.data(), nullptr}, 0, shape.blocks(), data);
  std::vector<float> in = random.floats(2 * shape.cols);
  const int64_t group = shape.activation_group();
  const float step = has_planes(tiles, shape) ? 1.0f / 128 : 1.0f;
  for (int64_t k = 0; k < shape.cols; ++k)  // ties
    in[static_cast<size_t>(shape.cols + k)] = k % group == 0 ? 127.0f : step * (static_cast<float>(k) - 49.5f);
  const Quantized a(tiles, shape, in, 2);
  std::vector<float> c(static_cast<size_t>(2 * shape.rows));
  const kt::PackedBlocks weights{shape, data, shape.blocks()};
  tiles.multiply_int8({.rows = 2, .a = a.rows(0), .weights = weights, .c = {c.data(), shape.rows}});
  for (int64_t m = 0; m < 2; ++m) {
    const Definition wanted = define(tiles, shape, in.data() + m * shape.cols);
    for (int64_t k = 0; k < shape.cols; ++k) {
      report.equal(
          [&] { return std::string(tiles.name) + " code of column " + std::to_string(k); },
          c[static_cast<size_t>(m * shape.rows + k)] == static_cast<float>(wanted.values[static_cast<size_t>(k)]));
    }
  }
}

// Groups without a usable inverse count as zero; what is not finite stays so, in its own row.
void check_special(const kt::Tiles& tiles, const Format& format, Random& random, Report& report) {
  const PackedCase& weights = packed_case(20, 96, format, random);
  constexpr int64_t kRows = 4;
  std::vector<float> in = random.floats(kRows * 96);
  std::fill_n(in.begin(), has_planes(tiles, weights.shape) ? 96 : weights.shape.activation_group(), 1e-38f);
  in[96 + 40] = std::numeric_limits<float>::quiet_NaN();
  in[2 * 96 + 95] = -std::numeric_limits<float>::infinity();
  const Quantized a(tiles, weights.shape, in, kRows);
  const std::string what = std::string(tiles.name) + " " + kt::format_name(weights.shape.format);
  report.equal(what + ": tiny values are zero", a.scale(0, 0) == 0.0f && a.sum(0, 0) == 0);
  const std::vector<float> c = run(tiles, a, 0, kRows, weights, 0, 2, 32);
  for (int64_t m = 0; m < kRows; ++m) {
    for (int64_t n = 0; n < 20; ++n)
      report.equal(what + ": finite", std::isfinite(c[static_cast<size_t>(m * 32 + n)]) == (m == 0 || m == 3));
  }
}

}  // namespace

void test_integer(const kt::Tiles& tiles, Report& report) {
  Random random(3);
  for (Format format : all_formats()) {
    if (!format.integer()) continue;
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13, 29}) check_case(tiles, format, rows, 40, 160, random, report);
    for (const int64_t cols : {1, 31, 32, 33, 128, 300}) check_case(tiles, format, 5, 16, cols, random, report);
    for (const int64_t out : {1, 15, 33, 80}) check_case(tiles, format, 9, out, 64, random, report);
    check_case(tiles, format, 6, 48, 2600, random, report);  // beyond what is kept in a cache at once
    check_extremes(tiles, format, 1024, -127.0f, report);
    if (has_planes(tiles, {16, 1024, format})) {
      for (const float low : {126.5f, -126.5f, 126.4921875f, -126.4921875f}) {  // low digits -64 and 63
        check_extremes(tiles, format, 1024, low, report);
      }
      for (const int64_t cols : {65536, 65568}) check_extremes(tiles, format, cols, -127.0f, report);  // and too many
    }
    if (format.group == 128) {
      format.group = 96;  // the last group of 300 columns is shorter
      check_case(tiles, format, 8, 24, 300, random, report);
      format.group = 8192;
      check_extremes(tiles, format, 8192, -127.0f, report);
    }
  }
  for (const Encoding encoding : {Encoding::kInt8, Encoding::kInt4}) {
    check_codes(tiles, encoding, random, report);
    for (const int64_t group : {0, 32}) check_special(tiles, {encoding, group, false}, random, report);
  }
}

}  // namespace kt_test
