// Tile products of one instruction set: sizes around the tiles' edges, misaligned pointers, NaN beside the operands.
#include <algorithm>

#include "checks.h"
#include "weights/packed.h"

namespace kt_test {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

struct Packed {
  Packed(int64_t rows, int64_t cols, Random& random) : shape{rows, cols}, plain(random.bf16s(rows * cols)) {
    data.resize(static_cast<size_t>(shape.elements()));
    kt::pack_bf16(plain.data(), cols, shape, data.data());
  }
  double at(int64_t row, int64_t col) const {
    return kt::bf16_to_float(plain[static_cast<size_t>(row * shape.cols + col)]);
  }
  kt::PackedShape shape;
  std::vector<uint16_t> plain, data;
};

void test_layout(int64_t rows, int64_t cols, Random& random, Report& report) {
  const Packed packed(rows, cols, random);
  std::vector<uint16_t> back(static_cast<size_t>(rows * cols));
  kt::unpack_bf16({packed.shape, packed.data.data()}, back.data());
  report.equal("pack and unpack", back == packed.plain);
  long outside = 0;
  for (const uint16_t bits : packed.data) outside += bits != 0;
  report.equal("padding is zero", outside <= rows * cols);
}

// T is float or bf16 (uint16_t).
template <class T>
void test_packed(void (*multiply)(const kt::PackedProduct<T>&), const std::string& name, int64_t tokens, int64_t rows,
                 int64_t cols, Random& random, Report& report) {
  const Packed packed(rows, cols, random);
  const int64_t lda = packed.shape.padded_cols() + 3, ldc = packed.shape.padded_rows() + 5;
  std::vector<T> a(static_cast<size_t>(tokens * lda + 1), T{});
  std::vector<double> values(static_cast<size_t>(tokens * cols));
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t k = 0; k < cols; ++k) {
      const uint16_t bits = random.bf16();
      const float value = sizeof(T) == 2 ? kt::bf16_to_float(bits) : random.normal();
      a[static_cast<size_t>(1 + m * lda + k)] = sizeof(T) == 2 ? static_cast<T>(bits) : static_cast<T>(value);
      values[static_cast<size_t>(m * cols + k)] = value;
    }
  }
  std::vector<float> c(static_cast<size_t>(tokens * ldc + 1), kPoison);
  multiply(
      {tokens, a.data() + 1, lda, packed.data.data(), packed.shape.pairs(), packed.shape.blocks(), c.data() + 1, ldc});
  for (int64_t m = 0; m < tokens; ++m) {
    for (int64_t n = 0; n < rows; ++n) {
      double sum = 0, scale = 0;
      for (int64_t k = 0; k < cols; ++k) {
        const double term = values[static_cast<size_t>(m * cols + k)] * packed.at(n, k);
        sum += term;
        scale += std::fabs(term);
      }
      report.close(name, c[static_cast<size_t>(1 + m * ldc + n)], sum, sum_tolerance(cols), scale);
    }
    for (int64_t n = packed.shape.padded_rows(); n < ldc && 1 + m * ldc + n < static_cast<int64_t>(c.size()); ++n)
      report.equal(name + " writes beyond its columns", std::isnan(c[static_cast<size_t>(1 + m * ldc + n)]));
  }
}

// A row's result must not depend on how many rows are multiplied with it.
template <class T>
void test_row_alone(void (*multiply)(const kt::PackedProduct<T>&), const std::vector<T>& a, const std::string& name,
                    int64_t tokens, const Packed& packed, Report& report) {
  const int64_t lda = packed.shape.padded_cols(), ldc = packed.shape.padded_rows();
  std::vector<float> all(static_cast<size_t>(tokens * ldc)), one(static_cast<size_t>(ldc));
  const auto product = [&](int64_t row, int64_t count, float* c) {
    multiply(
        {count, a.data() + row * lda, lda, packed.data.data(), packed.shape.pairs(), packed.shape.blocks(), c, ldc});
  };
  product(0, tokens, all.data());
  for (int64_t m = 0; m < tokens; ++m) {
    product(m, 1, one.data());
    report.equal(name + " depends on the other rows", std::equal(one.begin(), one.end(), all.begin() + m * ldc));
  }
}

void test_invariance(const kt::Tiles& tiles, Random& random, Report& report) {
  const Packed packed(80, 1100, random);
  for (const int64_t tokens : {2, 5, 13, 29}) {
    const int64_t count = tokens * packed.shape.padded_cols();
    test_row_alone<float>(tiles.multiply, random.floats(count), "multiply", tokens, packed, report);
    if (tiles.multiply_bf16)
      test_row_alone<uint16_t>(tiles.multiply_bf16, random.bf16s(count), "multiply_bf16", tokens, packed, report);
  }
}

void test_unpack(const kt::Tiles& tiles, int64_t rows, int64_t cols, Random& random, Report& report) {
  const Packed packed(rows, cols, random);
  const int64_t ld = 37;
  for (int64_t block = 0; block < packed.shape.blocks(); ++block) {
    for (int64_t pair = 0; pair < packed.shape.pairs(); pair += 16) {
      std::vector<float> out(static_cast<size_t>(16 * ld + 1), kPoison);
      tiles.unpack_rows(packed.data.data() + block * packed.shape.block_elements(), pair, 16, out.data() + 1, ld);
      for (int64_t i = 0; i < 16; ++i) {
        for (int64_t j = 0; j < 32; ++j) {
          const int64_t row = block * 16 + i, col = 2 * pair + j;
          const double wanted = row < rows && col < cols ? packed.at(row, col) : 0.0;
          report.equal("unpack_rows", out[static_cast<size_t>(1 + i * ld + j)] == wanted);
        }
      }
    }
  }
}

void test_plain(const kt::Tiles& tiles, int64_t rows, int64_t cols, int64_t inner, bool transposed, bool accumulate,
                Random& random, Report& report) {
  const int64_t a_row = transposed ? 1 : inner + 2, a_col = transposed ? rows + 3 : 1;
  const int64_t ldb = cols + 1, ldc = cols + 2;
  const auto a = random.floats(rows * a_row + inner * a_col + 1), b = random.floats(inner * ldb + 1);
  std::vector<float> c = random.floats(rows * ldc + 1);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = cols; n < ldc; ++n) c[static_cast<size_t>(1 + m * ldc + n)] = kPoison;
  }
  const std::vector<float> before = c;
  tiles.product({rows, cols, inner, a.data() + 1, a_row, a_col, b.data() + 1, ldb, c.data() + 1, ldc, accumulate});
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < ldc; ++n) {
      const float got = c[static_cast<size_t>(1 + m * ldc + n)];
      if (n >= cols) {
        report.equal("product writes beyond its columns", std::isnan(got));
        continue;
      }
      double sum = accumulate ? before[static_cast<size_t>(1 + m * ldc + n)] : 0.0, scale = std::fabs(sum);
      for (int64_t i = 0; i < inner; ++i) {
        const double term = static_cast<double>(a[static_cast<size_t>(1 + m * a_row + i * a_col)]) *
                            b[static_cast<size_t>(1 + i * ldb + n)];
        sum += term;
        scale += std::fabs(term);
      }
      report.close("product", got, sum, sum_tolerance(inner), scale);
    }
  }
}

}  // namespace

void test_tiles(const kt::Tiles& tiles, Report& report) {
  Random random(1);
  for (const int64_t rows : {1, 15, 16, 17, 33, 80}) {
    for (const int64_t cols : {1, 2, 31, 32, 33, 65, 600}) {
      test_layout(rows, cols, random, report);
      test_unpack(tiles, rows, cols, random, report);
      for (const int64_t tokens : {1, 2, 3, 5, 6, 7, 12, 13, 31}) {
        test_packed<float>(tiles.multiply, "multiply", tokens, rows, cols, random, report);
        if (tiles.multiply_bf16)
          test_packed<uint16_t>(tiles.multiply_bf16, "multiply_bf16", tokens, rows, cols, random, report);
      }
    }
  }
  test_invariance(tiles, random, report);
  for (const int64_t rows : {1, 2, 5, 6, 7, 12, 13, 29}) {
    for (const int64_t cols : {1, 3, 8, 15, 16, 17, 33, 64}) {
      for (const int64_t inner : {0, 1, 7, 33}) {
        for (const int variant : {0, 1, 2, 3})
          test_plain(tiles, rows, cols, inner, variant & 1, variant & 2, random, report);
      }
    }
  }
}

}  // namespace kt_test
