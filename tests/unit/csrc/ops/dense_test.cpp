// Row-major products and RMSNorm of one instruction set: sizes around the tiles' edges, every pair of dtypes,
// misaligned and strided operands with NaN beside them, bits that do not depend on the other rows, columns, calls or
// threads.
#include "ops/dense/dense.h"

#include <functional>

#include "checks.h"
#include "kernels/registry.h"
#include "reference.h"
#include "scratch_case.h"

namespace kt_test {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

// A matrix of float32 or bf16, one element off any alignment, with NaN before, between and after its rows.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, bool bf16) : rows_(rows), cols_(cols), stride_(cols + 3), bf16_(bf16) {
    const auto count = static_cast<size_t>(1 + rows * stride_);
    wide_.assign(bf16 ? 0 : count, kPoison);
    narrow_.assign(bf16 ? count : 0, kt::float_to_bf16(kPoison));
  }
  Matrix(int64_t rows, int64_t cols, bool bf16, Random& random) : Matrix(rows, cols, bf16) {
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t k = 0; k < cols; ++k) set(m, k, random.normal());
    }
  }

  float at(int64_t m, int64_t k) const { return bf16_ ? kt::bf16_to_float(narrow_[place(m, k)]) : wide_[place(m, k)]; }
  void set(int64_t m, int64_t k, float value) {
    if (bf16_) {
      narrow_[place(m, k)] = kt::float_to_bf16(value);
    } else {
      wide_[place(m, k)] = value;
    }
  }
  bool neighbours_untouched() const {
    bool untouched = std::isnan(bf16_ ? kt::bf16_to_float(narrow_[0]) : wide_[0]);
    for (int64_t m = 0; m < rows_; ++m) {
      for (int64_t k = cols_; k < stride_; ++k) untouched &= std::isnan(at(m, k));
    }
    return untouched;
  }
  bool same_bits(const Matrix& other) const {
    for (int64_t m = 0; m < rows_; ++m) {
      if (!same_row(m, other)) return false;
    }
    return true;
  }
  bool same_row(int64_t m, const Matrix& other) const {
    const auto first = place(m, 0), count = static_cast<size_t>(cols_);
    if (cols_ == 0) return true;
    return bf16_ ? std::memcmp(&narrow_[first], &other.narrow_[first], 2 * count) == 0
                 : std::memcmp(&wide_[first], &other.wide_[first], 4 * count) == 0;
  }
  kt::TensorView view(int64_t first, int64_t rows) const {
    return matrix_view(data(first), bf16_ ? kt::DType::kBf16 : kt::DType::kF32, rows, cols_, stride_);
  }
  kt::TensorView view() const { return view(0, rows_); }
  // Of one row, without the dimension of rows.
  kt::TensorView row_view() const {
    kt::TensorView view;
    view.data = data(0);
    view.dtype = bf16_ ? kt::DType::kBf16 : kt::DType::kF32;
    view.ndim = 1;
    view.shape[0] = cols_;
    view.strides[0] = 1;
    return view;
  }

 private:
  size_t place(int64_t m, int64_t k) const { return static_cast<size_t>(1 + m * stride_ + k); }
  void* data(int64_t row) const {
    const void* first = bf16_ ? static_cast<const void*>(narrow_.data() + place(row, 0)) : wide_.data() + place(row, 0);
    return const_cast<void*>(first);
  }

  int64_t rows_, cols_, stride_;
  bool bf16_;
  std::vector<float> wide_;
  std::vector<uint16_t> narrow_;
};

struct Dtypes {
  bool x, w, y, bias;  // bf16
};

struct LinearCase {
  LinearCase(int64_t rows, int64_t cols, int64_t inner, Dtypes bf16, Random& random)
      : rows(rows),
        cols(cols),
        inner(inner),
        bf16(bf16),
        x(rows, inner, bf16.x, random),
        w(cols, inner, bf16.w, random),
        bias(1, cols, bf16.bias, random) {}

  Matrix result(const kt::DenseEngine& engine, bool with_bias, bool y_bf16) const {
    Matrix y(rows, cols, y_bf16);
    kt::linear(engine, x.view(), w.view(), with_bias ? bias.row_view() : kt::TensorView{}, y.view());
    return y;
  }
  std::string name() const {
    const auto dtype = [](bool narrow) { return narrow ? " bf16" : " float32"; };
    return "linear " + std::to_string(rows) + " x " + std::to_string(cols) + " x " + std::to_string(inner) +
           dtype(bf16.x) + dtype(bf16.w) + dtype(bf16.y);
  }

  int64_t rows, cols, inner;
  Dtypes bf16;
  Matrix x, w, bias;
};

// Values against float64; a bf16 result is the float32 one rounded.
void test_values(const kt::DenseEngine& engine, const LinearCase& problem, bool with_bias, Report& report) {
  const Matrix y = problem.result(engine, with_bias, false);
  const std::string name = problem.name(), rounded = name + " is not rounded once";
  report.equal(name + " writes beside its result", y.neighbours_untouched());
  for (int64_t m = 0; m < problem.rows; ++m) {
    for (int64_t n = 0; n < problem.cols; ++n) {
      const Sum sum = dot(
          problem.inner, [&](int64_t k) { return problem.x.at(m, k); }, [&](int64_t k) { return problem.w.at(n, k); },
          with_bias ? problem.bias.at(0, n) : 0.0);
      report.close(name, y.at(m, n), sum.value, kSumTolerance, sum.scale);
    }
  }
  if (!problem.bf16.y) return;
  const Matrix narrow = problem.result(engine, with_bias, true);
  report.equal(name + " writes beside its result", narrow.neighbours_untouched());
  for (int64_t m = 0; m < problem.rows; ++m) {
    for (int64_t n = 0; n < problem.cols; ++n)
      report.equal(rounded, narrow.at(m, n) == kt::bf16_to_float(kt::float_to_bf16(y.at(m, n))));
  }
}

// Every element alone, as a call of one row and one column.
void test_elements(const kt::DenseEngine& engine, const LinearCase& problem, Report& report) {
  const Matrix y = problem.result(engine, true, false);
  const std::string what = problem.name() + " depends on the other rows or columns";
  for (int64_t m = 0; m < problem.rows; ++m) {
    for (int64_t n = 0; n < problem.cols; ++n) {
      Matrix alone(1, 1, false), bias(1, 1, false);
      bias.set(0, 0, problem.bias.at(0, n));
      kt::linear(engine, problem.x.view(m, 1), problem.w.view(n, 1), bias.row_view(), alone.view());
      const float got = alone.at(0, 0), wanted = y.at(m, n);
      report.equal(what, std::memcmp(&got, &wanted, 4) == 0);
    }
  }
}

// Calls of a few rows, and threads.
void test_cuts(const kt::DenseEngine& engine, const LinearCase& problem, Report& report) {
  const Matrix y = problem.result(engine, true, problem.bf16.y);
  for (const int threads : {1, 2, 3, 8}) {
    const kt::DenseEngine other{engine.tiles, threads};
    report.equal(problem.name() + " depends on the number of threads",
                 y.same_bits(problem.result(other, true, problem.bf16.y)));
  }
  for (const int64_t cut : {1, 5, 8, 19}) {
    Matrix pieces(problem.rows, problem.cols, problem.bf16.y);
    for (int64_t m = 0; m < problem.rows; m += cut) {
      const int64_t rows = std::min(cut, problem.rows - m);
      kt::linear(engine, problem.x.view(m, rows), problem.w.view(), problem.bias.row_view(), pieces.view(m, rows));
    }
    report.equal(problem.name() + " depends on how rows are cut into calls", y.same_bits(pieces));
  }
}

// NaN and Inf of a row of x, or of w, reach that row, or that column, only.
void test_not_finite(const kt::DenseEngine& engine, const LinearCase& problem, Report& report) {
  const Matrix clean = problem.result(engine, false, problem.bf16.y);
  const std::string what = problem.name() + ": NaN or Inf in other rows";
  for (const int64_t k : {int64_t{0}, problem.inner - 1}) {
    LinearCase spoiled = problem;
    spoiled.x.set(1, k, kPoison);
    spoiled.w.set(2, k, -kInf);
    const Matrix y = spoiled.result(engine, false, problem.bf16.y);
    for (int64_t m = 0; m < problem.rows; ++m) {
      for (int64_t n = 0; n < problem.cols; ++n) {
        const bool is_hit = m == 1 ? std::isnan(y.at(m, n)) : n == 2 && std::isinf(y.at(m, n));
        report.equal(what, m == 1 || n == 2 ? is_hit : y.at(m, n) == clean.at(m, n));
      }
    }
  }
}

void test_linear(const kt::DenseEngine& engine, Random& random, Report& report) {
  for (const int variant : {0, 1, 2, 3, 4, 5, 6, 7}) {
    const Dtypes bf16{(variant & 1) != 0, (variant & 2) != 0, (variant & 4) != 0, (variant & 4) != 0};
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 26}) {
      for (const int64_t inner : {0, 1, 7, 16, 31, 32, 33, 100}) {
        if (!report.takes()) continue;
        const LinearCase problem(rows, rows % 3 == 0 ? 27 : 9, inner, bf16, random);
        test_values(engine, problem, inner % 2 == 1, report);
        if (rows > 5) test_elements(engine, problem, report);
      }
    }
    for (const int64_t cols : {1, 2, 3, 4, 5, 6, 8, 11, 24, 25, 49})
      test_values(engine, LinearCase(8, cols, 70, bf16, random), true, report);
    test_values(engine, LinearCase(3, 5, 4100, bf16, random), true, report);
    test_elements(engine, LinearCase(18, 7, 2070, bf16, random), report);
    test_values(engine, LinearCase(14, 40, 512, bf16, random), true, report);  // short_sums.h: the longest sum,
    test_values(engine, LinearCase(14, 40, 513, bf16, random), true, report);  // one longer,
    test_elements(engine, LinearCase(70, 17, 500, bf16, random), report);      // and x in two copies
    test_cuts(engine, LinearCase(41, 530, 65, bf16, random), report);          // units of columns
    test_cuts(engine, LinearCase(300, 30, 130, bf16, random), report);         // blocks of rows
    test_cuts(engine, LinearCase(20, 50, 3100, bf16, random), report);         // parts of the columns of x
    for (const int64_t rows : {11, 14}) test_not_finite(engine, LinearCase(rows, 30, 67, bf16, random), report);
  }
}

void test_memory(const kt::Tiles& tiles, Random& random, Report& report) {
  const LinearCase few(1, 16, 32, {true, true, true, true}, random);
  const LinearCase many(40, 4000, 64, {true, true, true, true}, random);
  const auto multiply = [&](const LinearCase& problem) {
    return std::function<void()>([&] { problem.result({tiles, 1}, true, true); });
  };
  test_scratch("linear", multiply(few), multiply(many), report);
}

struct NormCase {
  NormCase(int64_t rows, int64_t cols, bool bf16, Random& random)
      : rows(rows),
        cols(cols),
        bf16(bf16),
        x(rows, cols, bf16, random),
        residual(rows, cols, bf16, random),
        weight(1, cols, bf16, random),
        y(rows, cols, bf16),
        total(rows, cols, bf16),
        inverse(static_cast<size_t>(rows), kPoison) {}

  void run(const kt::DenseEngine& engine, bool with_residual) {
    kt::TensorView inverses;
    inverses.data = inverse.data();
    inverses.dtype = kt::DType::kF32;
    inverses.ndim = 1;
    inverses.shape[0] = rows;
    inverses.strides[0] = 1;
    kt::rms_norm(engine, {.x = x.view(),
                          .residual = with_residual ? residual.view() : kt::TensorView{},
                          .weight = weight.row_view(),
                          .out = y.view(),
                          .total = with_residual ? total.view() : kt::TensorView{},
                          .inverse = inverses,
                          .epsilon = 1e-6f});
  }
  float rounded(float value) const { return bf16 ? kt::bf16_to_float(kt::float_to_bf16(value)) : value; }

  int64_t rows, cols;
  bool bf16;
  Matrix x, residual, weight, y, total;
  std::vector<float> inverse;
};

void test_norm(const kt::DenseEngine& engine, NormCase problem, bool with_residual, Report& report) {
  problem.run(engine, with_residual);
  report.equal("norm writes beside its result", problem.y.neighbours_untouched());
  report.equal("norm writes beside the sum", problem.total.neighbours_untouched());
  NormCase portable = problem;
  portable.run({*kt::available_tiles().back(), 1}, with_residual);
  report.equal("norm has other bits than the portable one", problem.y.same_bits(portable.y));
  for (int64_t m = 0; m < problem.rows; ++m) {
    for (int64_t k = 0; with_residual && k < problem.cols; ++k) {
      const float sum = problem.rounded(problem.x.at(m, k) + problem.residual.at(m, k));
      report.equal("x + residual", problem.total.at(m, k) == sum);
    }
    const Matrix& total = with_residual ? problem.total : problem.x;
    const double wanted = inverse_rms(problem.cols, [&](int64_t k) { return total.at(m, k); }, 1e-6);
    const float inverse = problem.inverse[static_cast<size_t>(m)];
    report.close("1 / rms", inverse, wanted, kSumTolerance, wanted);
    for (int64_t k = 0; k < problem.cols; ++k) {
      const float normalised = problem.rounded(total.at(m, k) * inverse);
      report.equal("norm rounds as Hugging Face's",
                   problem.y.at(m, k) == problem.rounded(problem.weight.at(0, k) * normalised));
    }
    Random unused(1);
    NormCase alone(1, problem.cols, problem.bf16, unused);
    for (int64_t k = 0; k < problem.cols; ++k) {
      alone.x.set(0, k, problem.x.at(m, k));
      alone.residual.set(0, k, problem.residual.at(m, k));
      alone.weight.set(0, k, problem.weight.at(0, k));
    }
    alone.run(engine, with_residual);
    for (int64_t k = 0; k < problem.cols; ++k)
      report.equal("norm depends on the other rows", alone.y.at(0, k) == problem.y.at(m, k));
  }
}

void test_norms(const kt::DenseEngine& engine, Random& random, Report& report) {
  for (const bool bf16 : {false, true}) {
    for (const int64_t cols : {1, 2, 15, 16, 17, 31, 64, 100}) {
      for (const bool with_residual : {false, true})
        test_norm(engine, NormCase(3, cols, bf16, random), with_residual, report);
    }
    NormCase many(301, 700, bf16, random);  // several tasks
    test_norm(engine, many, true, report);
    many.run(engine, true);
    NormCase other = many;
    other.run({engine.tiles, 1}, true);
    report.equal("norm depends on the number of threads", many.y.same_bits(other.y));
    other.x.set(7, 699, kPoison);
    other.run(engine, true);
    for (int64_t m = 0; m < 301; ++m) {
      report.equal("norm: NaN in another row", m == 7 ? std::isnan(other.y.at(m, 0)) : other.y.same_row(m, many.y));
    }
  }
}

}  // namespace

void test_dense(const kt::Tiles& tiles, Report& report) {
  Random random(9);
  const kt::DenseEngine engine{tiles, 2};
  test_linear(engine, random, report);
  test_norms(engine, random, report);
  test_memory(tiles, random, report);
}

}  // namespace kt_test
