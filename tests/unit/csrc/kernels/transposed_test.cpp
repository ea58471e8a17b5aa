// Products with the transposed of packed weights: sizes around the tiles' edges, misaligned pointers, matrices in
// pieces.
#include <algorithm>

#include "checks.h"
#include "packed_case.h"
#include "reference.h"

namespace kt_test {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

void transpose(const kt::Tiles& tiles, kt::Rows<const float> in, int64_t rows, int64_t cols, float* out, int64_t ld) {
  tiles.transpose_rows(in, rows, cols, out, ld);
}
void transpose(const kt::Tiles& tiles, kt::Rows<const float> in, int64_t rows, int64_t cols, uint16_t* out,
               int64_t ld) {
  tiles.transpose_rows_bf16(in, rows, cols, out, ld);
}
void multiply(const kt::Tiles& tiles, const kt::TransposedProduct<float>& p) { tiles.multiply_transposed(p); }
void multiply(const kt::Tiles& tiles, const kt::TransposedProduct<uint16_t>& p) { tiles.multiply_transposed_bf16(p); }

float poison(float) { return kPoison; }
uint16_t poison(uint16_t) { return 0x7fc1; }
bool is_poison(float value) { return std::isnan(value); }
bool is_poison(uint16_t value) { return value == 0x7fc1; }
float bits_of(float value, float) { return value; }
uint16_t bits_of(float value, uint16_t) { return kt::float_to_bf16(value); }

// Where (n, m) lies: in pairs of n for bf16.
int64_t place(int64_t n, int64_t m, int64_t ld, float) { return n * ld + m; }
int64_t place(int64_t n, int64_t m, int64_t ld, uint16_t) { return (n / 2 * ld + m) * 2 + n % 2; }

// Activations [tokens, width] with poison between the rows, and their transposed, one element off any alignment.
template <class T>
struct Tokens {
  Tokens(const kt::Tiles& tiles, int64_t tokens, int64_t width, Random& random)
      : count(tokens), ld_rows(width + 3), ld(kt::round_up(tokens, kt::kTokenUnit)) {
    rows.assign(static_cast<size_t>(1 + tokens * ld_rows), kPoison);
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t n = 0; n < width; ++n) {
        const float value = random.normal();
        rows[static_cast<size_t>(1 + m * ld_rows + n)] =
            sizeof(T) == 2 ? kt::bf16_to_float(kt::float_to_bf16(value)) : value;
      }
    }
    columns = transposed(tiles, 0, tokens, width);
  }
  std::vector<T> transposed(const kt::Tiles& tiles, int64_t first, int64_t number, int64_t width) const {
    const int64_t padded = kt::round_up(number, kt::kTokenUnit);
    std::vector<T> out(static_cast<size_t>(1 + kt::round_up(width, 16) * padded + 1), poison(T{}));
    transpose(tiles, {rows.data() + 1 + first * ld_rows, ld_rows}, number, width, out.data() + 1, padded);
    return out;
  }
  double at(int64_t m, int64_t n) const { return rows[static_cast<size_t>(1 + m * ld_rows + n)]; }

  int64_t count, ld_rows, ld;
  std::vector<float> rows;
  std::vector<T> columns;
};

template <class T>
void test_transpose(const kt::Tiles& tiles, int64_t tokens, int64_t width, Random& random, Report& report) {
  const Tokens<T> in(tiles, tokens, width, random);
  const int64_t padded_width = kt::round_up(width, 16);
  for (int64_t n = 0; n < padded_width; ++n) {
    for (int64_t m = 0; m < in.ld; ++m) {
      const float wanted = m < tokens && n < width ? static_cast<float>(in.at(m, n)) : 0.0f;
      report.equal("transpose_rows",
                   in.columns[static_cast<size_t>(1 + place(n, m, in.ld, T{}))] == bits_of(wanted, T{}));
    }
  }
  report.equal("transpose_rows writes beyond", is_poison(in.columns.front()) && is_poison(in.columns.back()));
}

// The blocks of a matrix in up to three pieces, some of them empty.
std::vector<kt::PackedBlocks> in_pieces(const PackedCase& weights, Random& random) {
  const int64_t blocks = weights.shape.blocks();
  int64_t cuts[4] = {0, random.below(blocks + 1), random.below(blocks + 1), blocks};
  std::sort(cuts, cuts + 4);
  std::vector<kt::PackedBlocks> pieces;
  for (int i = 0; i < 3; ++i)
    pieces.push_back({weights.shape, weights.data() + cuts[i] * weights.shape.block_bytes(), cuts[i + 1] - cuts[i]});
  return pieces;
}

template <class T>
std::string name_of(const PackedCase& weights) {
  return std::string(sizeof(T) == 2 ? "multiply_transposed_bf16 " : "multiply_transposed ") +
         kt::format_name(weights.shape.format);
}

template <class T>
void test_product(const kt::Tiles& tiles, const PackedCase& weights, int64_t tokens, Random& random, Report& report) {
  if (!report.takes()) return;
  const int64_t inner = weights.shape.rows, units = weights.shape.padded_cols() / kt::kColumnUnit;
  const Tokens<T> in(tiles, tokens, inner, random);
  const int64_t first = random.below(units), cols = (1 + random.below(units - first)) * kt::kColumnUnit;
  const int64_t first_col = first * kt::kColumnUnit, ldo = cols + 5;
  const bool accumulate = random.below(2) == 1;
  std::vector<float> out(static_cast<size_t>(1 + tokens * ldo), kPoison), before;
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t j = 0; j < cols && accumulate; ++j) out[static_cast<size_t>(1 + m * ldo + j)] = random.normal();
  }
  before = out;
  const std::vector<kt::PackedBlocks> pieces = in_pieces(weights, random);
  multiply(tiles, kt::TransposedProduct<T>{.rows = tokens,
                                           .in = in.columns.data() + 1,
                                           .ld = in.ld,
                                           .pieces = pieces.data(),
                                           .num_pieces = 3,
                                           .first_col = first_col,
                                           .cols = cols,
                                           .out = {out.data() + 1, ldo},
                                           .accumulate = accumulate});
  const bool exact = sizeof(T) == 4 || weights.shape.format.encoding == kt::Encoding::kBf16;
  // Scaled weights are rounded to bf16, each by less than 2^-8: a bound, which one product comes near (0.99 of it).
  const double tolerance = kSumTolerance + (exact ? 0 : 0x1p-8);
  const std::string name = name_of<T>(weights), beyond = name + " writes beyond its columns";
  report.equal(name + " writes before", std::isnan(out[0]));
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t j = 0; j < ldo; ++j) {
      const float got = out[static_cast<size_t>(1 + m * ldo + j)];
      if (j >= cols) {
        report.equal(beyond, std::isnan(got));
        continue;
      }
      const Sum sum = dot(
          inner, [&](int64_t n) { return in.at(m, n); }, [&](int64_t n) { return weights.at(n, first_col + j); },
          accumulate ? before[static_cast<size_t>(1 + m * ldo + j)] : 0.0);
      report.close(name, got, sum.value, tolerance, sum.scale);
    }
  }
}

// A token's result must not depend on the other tokens, its place among them, the pieces or the range of columns.
template <class T>
void test_alone(const kt::Tiles& tiles, const PackedCase& weights, int64_t tokens, Random& random, Report& report) {
  if (!report.takes()) return;
  const int64_t inner = weights.shape.rows, cols = weights.shape.padded_cols();
  const Tokens<T> in(tiles, tokens, inner, random);
  std::vector<float> all(static_cast<size_t>(tokens * cols)), some;
  const kt::PackedBlocks whole = weights.blocks();
  multiply(tiles, kt::TransposedProduct<T>{.rows = tokens,
                                           .in = in.columns.data() + 1,
                                           .ld = in.ld,
                                           .pieces = &whole,
                                           .num_pieces = 1,
                                           .first_col = 0,
                                           .cols = cols,
                                           .out = {all.data(), cols}});
  for (int64_t m = 0; m < tokens; m += 1 + random.below(3)) {
    const int64_t count = 1 + random.below(std::min<int64_t>(tokens - m, 20));
    const int64_t first = random.below(cols / 32) * 32, width = cols - first;
    const std::vector<T> columns = in.transposed(tiles, m, count, inner);
    const std::vector<kt::PackedBlocks> pieces = in_pieces(weights, random);
    some.assign(static_cast<size_t>(count * width), kPoison);
    multiply(tiles, kt::TransposedProduct<T>{.rows = count,
                                             .in = columns.data() + 1,
                                             .ld = kt::round_up(count, kt::kTokenUnit),
                                             .pieces = pieces.data(),
                                             .num_pieces = 3,
                                             .first_col = first,
                                             .cols = width,
                                             .out = {some.data(), width}});
    for (int64_t i = 0; i < count; ++i) {
      report.equal(name_of<T>(weights) + " depends on the other tokens",
                   std::memcmp(&some[static_cast<size_t>(i * width)], &all[static_cast<size_t>((m + i) * cols + first)],
                               static_cast<size_t>(width) * sizeof(float)) == 0);
    }
  }
}

template <class T>
void test_type(const kt::Tiles& tiles, Report& report) {
  Random random(3);
  for (const int64_t tokens : {1, 7, 8, 9, 17, 33}) {
    for (const int64_t width : {1, 7, 8, 15, 16, 17, 31, 70}) test_transpose<T>(tiles, tokens, width, random, report);
  }
  for (const kt::Format& format : all_formats()) {
    for (const int64_t rows : {1, 16, 21, 150}) {
      for (const int64_t cols : {1, 32, 40, 150, 270}) {
        const PackedCase& weights = packed_case(rows, cols, format, random);
        for (const int64_t tokens : {1, 8, 9, 17, 37}) test_product<T>(tiles, weights, tokens, random, report);
      }
    }
    const PackedCase& weights = packed_case(290, 170, format, random);
    for (const int64_t tokens : {5, 47, 58}) test_alone<T>(tiles, weights, tokens, random, report);
  }
  for (const int64_t tokens : {40, 56, 64, 100, 128, 129, 140, 270})
    test_product<T>(tiles, PackedCase(40, 80, {}, random), tokens, random, report);
}

}  // namespace

void test_transposed(const kt::Tiles& tiles, Report& report) {
  test_type<float>(tiles, report);
  if (tiles.multiply_transposed_bf16) test_type<uint16_t>(tiles, report);
}

}  // namespace kt_test
