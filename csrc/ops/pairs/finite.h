// The search for NaN and Inf in a call's inputs: part of the call's job, before any result is written.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "base/status.h"
#include "base/views.h"

namespace kt {

// "NAME[row, column] is NaN or Inf" for the first such element of a float32 or bf16 matrix.
Status check_finite(const TensorView& matrix, const char* name);

// Thrown by the part of the check that found NaN or Inf; `FiniteCheck::all` then finds the first one.
struct NotFinite {};

class FiniteCheck {
 public:
  struct Matrix {
    const TensorView* values;
    const char* name;
  };
  static constexpr size_t kMostMatrices = 4;
  FiniteCheck(std::initializer_list<Matrix> matrices);

  // True for so few elements that the calling thread finishes before a pool of threads would start.
  bool is_small() const;
  // In the order of the matrices, on this thread.
  Status all() const;

  int64_t num_parts() const { return num_parts_; }
  void check_part(int64_t part) const;

 private:
  std::span<const Matrix> matrices() const { return {matrices_, num_matrices_}; }

  Matrix matrices_[kMostMatrices] = {};
  size_t num_matrices_;
  int64_t num_parts_ = 0;
};

// Checks on the calling thread for small matrices or a single thread, else within `body`'s job: body(check or null)
// runs all parts of the check before it writes any result.
template <class Body>
Status with_check(std::initializer_list<FiniteCheck::Matrix> matrices, int num_threads, Body&& body) {
  const FiniteCheck finite(matrices);
  const bool here = num_threads == 1 || finite.is_small();
  if (here) KT_RETURN_IF_ERROR(finite.all());
  try {
    body(here ? nullptr : &finite);
  } catch (const NotFinite&) {
    return finite.all();
  }
  return {};
}

}  // namespace kt
