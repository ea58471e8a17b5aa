// Shared by the C++ tests: random data, comparison with a stated tolerance, a list of failures.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <source_location>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/bf16.h"
#include "base/views.h"
#include "kernels/tiles.h"

namespace kt_test {

class Report {
 public:
  // `part`: 1, or of the combinations of sizes that a test repeats, one of so many is run (see `takes`).
  explicit Report(int part = 1) : part_(part) {}
  // Whether a test runs its next combination of sizes. They are drawn, so that what is left out of one format, dtype or
  // kernel is run with another.
  bool takes() { return part_ == 1 || draw_() % static_cast<unsigned>(part_) == 0; }
  // Of two variants, whether a test runs the second one (`second`), or the first: both, or one after the other in turn.
  bool takes(bool second) { return part_ == 1 || second == (turn_++ / 2 % 2 == 1); }

  // `what`: a text, or a function that makes one, which is called where the check fails: of millions of checks almost
  // none needs its text.
  // |got - wanted| <= tolerance * scale, and got is a number. Calls on one line with one tolerance are a gate: a
  // tolerance that differs by size, and not by what is computed, belongs in the scale.
  template <class What>
  void close(const What& what, double got, double wanted, double tolerance, double scale,
             const std::source_location& at = std::source_location::current()) {
    ++checks_;
    const double error = std::fabs(got - wanted), allowed = tolerance * scale;
    Gate& gate = gate_of(at, tolerance);
    if (error <= allowed) {
      if (error > 0) gate.used = std::fmax(gate.used, error / allowed);
      return;
    }
    fail(text_of(what) + ": got " + std::to_string(got) + ", expected " + std::to_string(wanted));
  }
  template <class What>
  void equal(const What& what, bool same) {
    ++checks_;
    if (!same) fail(text_of(what));
  }
  void fail(const std::string& message) {
    if (++failures_ <= 20) std::printf("FAIL %s\n", message.c_str());
  }
  long checks() const { return checks_; }
  long failures() const { return failures_; }

  struct Gate {
    const char* path;
    unsigned line;
    double tolerance;
    double used = 0;  // the largest error, as a share of what is allowed

    std::string_view file() const {
      const std::string_view all = path;
      return all.substr(all.rfind('/') + 1);
    }
  };
  const std::vector<Gate>& gates() const { return gates_; }

 private:
  Gate& gate_of(const std::source_location& at, double tolerance) {
    const auto is_it = [&](const Gate& gate) {
      return gate.line == at.line() && gate.tolerance == tolerance && std::strcmp(gate.path, at.file_name()) == 0;
    };
    if (last_ < gates_.size() && is_it(gates_[last_])) return gates_[last_];
    last_ = static_cast<size_t>(std::find_if(gates_.begin(), gates_.end(), is_it) - gates_.begin());
    if (last_ == gates_.size()) gates_.push_back({at.file_name(), at.line(), tolerance});
    return gates_[last_];
  }

  template <class What>
  static std::string text_of(const What& what) {
    if constexpr (std::is_invocable_v<What>) {
      return what();
    } else {
      return what;
    }
  }

  const int part_;
  std::minstd_rand draw_;
  int turn_ = 0;
  long checks_ = 0, failures_ = 0;
  std::vector<Gate> gates_;
  size_t last_ = 0;  // of gates_: most calls are of the same gate as the one before
};

class Random {
 public:
  explicit Random(unsigned seed) : state_(seed), engine_(seed) {}
  float normal() {
    note(1);
    return normal_(engine_);
  }
  uint16_t bf16() { return kt::float_to_bf16(normal()); }
  int64_t below(int64_t bound) {
    note(2);
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(bound));
  }
  // A hash of the seed and of what has been drawn: where it is the same, the next numbers are.
  uint64_t state() const { return state_; }
  std::vector<float> floats(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal();
    return values;
  }
  std::vector<uint16_t> bf16s(int64_t count) {
    std::vector<uint16_t> values(static_cast<size_t>(count));
    for (uint16_t& value : values) value = bf16();
    return values;
  }

 private:
  void note(uint64_t kind) { state_ = (state_ ^ kind) * 0x9e3779b97f4a7c15u; }

  uint64_t state_;
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

constexpr double kFloatRounding = 0x1p-24;  // relative error of one rounding to float32

// Sums of float32 products with random signs, relative to the sum of magnitudes. A partial sum grows with the root of
// its length and the magnitudes with the length itself: the roundings of all partial sums together are as large as one
// of the whole, whatever the length. Measured over portable, AVX2, AVX-512 kernels and AMX's on the model of its tiles:
// 0.8e-7 (integers), 2.6e-7 (bf16), 4.6e-7 (fp8, whose largest values are far above the others).
constexpr double kSumTolerance = 12 * kFloatRounding;

void test_topology(Report& report);                            // topology_test.cpp
void test_threads(Report& report);                             // threads_test.cpp
void test_fp16(Report& report);                                // fp16_test.cpp
void test_plan(Report& report);                                // plan_test.cpp
void test_finite(Report& report);                              // finite_test.cpp
void test_float(const kt::Tiles& tiles, Report& report);       // float_test.cpp
void test_integer(const kt::Tiles& tiles, Report& report);     // integer_test.cpp
void test_transposed(const kt::Tiles& tiles, Report& report);  // transposed_test.cpp
void test_rows(const kt::Tiles& tiles, Report& report);        // rows_test.cpp
void test_layer(const kt::Tiles& tiles, Report& report);       // layer_test.cpp
void test_amx(const kt::Tiles& tiles, Report& report);         // amx_test.cpp
void test_attention(const kt::Tiles& tiles, Report& report);   // attention_test.cpp
void test_dense(const kt::Tiles& tiles, Report& report);       // dense_test.cpp
void test_packed(const kt::Tiles& tiles, Report& report);      // packed_test.cpp
void test_decoder(const kt::Tiles& tiles, Report& report);     // decoder_test.cpp
void test_step(const kt::Tiles& tiles, Report& report);        // step_test.cpp
void test_contract(const kt::Tiles& tiles, Report& report);    // step_contract_test.cpp
void test_unpack(const kt::Tiles& tiles, Report& report);      // unpack_test.cpp

inline double norm(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

// A contiguous tensor.
inline kt::TensorView tensor_view(const void* data, kt::DType dtype, const std::vector<int64_t>& shape) {
  kt::TensorView view;
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.shape[i] = shape[static_cast<size_t>(i)];
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

// `stride`: elements from one row to the next.
inline kt::TensorView matrix_view(const void* data, kt::DType dtype, int64_t rows, int64_t cols, int64_t stride) {
  kt::TensorView view;
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.ndim = 2;
  view.shape[0] = rows;
  view.shape[1] = cols;
  view.strides[0] = stride;
  view.strides[1] = 1;
  return view;
}

}  // namespace kt_test
