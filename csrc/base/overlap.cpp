#include "base/overlap.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace kt {
namespace {

// steps * bytes, steps from 0 to `most`
struct Term {
  int64_t bytes, most;
};

void add(std::vector<Term>* terms, int64_t bytes, int64_t most) {
  if (bytes == 0 || most <= 0) return;
  const auto same = std::find_if(terms->begin(), terms->end(), [&](const Term& term) { return term.bytes == bytes; });
  if (same == terms->end()) {
    terms->push_back({bytes, most});
  } else {
    same->most += most;
  }
}

struct Span {
  int64_t first, last;  // addresses
};

bool empty(const TensorView& tensor) {
  return std::any_of(tensor.shape, tensor.shape + tensor.ndim, [](int64_t size) { return size == 0; });
}

Span span_of(const TensorView& tensor) {
  Span span{reinterpret_cast<int64_t>(tensor.data), reinterpret_cast<int64_t>(tensor.data)};
  const int64_t bytes = dtype_bytes(tensor.dtype);
  for (int i = 0; i < tensor.ndim; ++i) {
    const int64_t reach = (tensor.shape[i] - 1) * tensor.strides[i] * bytes;
    (reach < 0 ? span.first : span.last) += reach;
  }
  span.last += bytes - 1;
  return span;
}

// Whether steps exist whose bytes sum to `wanted`. Terms from `at` on, largest bytes first; `budget` bounds the search.
bool reaches(const std::vector<Term>& all, size_t at, int64_t wanted, int* budget) {
  if (wanted == 0 || --*budget < 0) return true;
  if (at == all.size()) return false;
  int64_t rest = 0;
  for (size_t i = at + 1; i < all.size(); ++i) rest += all[i].bytes * all[i].most;
  const Term& term = all[at];
  const int64_t fewest = wanted > rest ? (wanted - rest + term.bytes - 1) / term.bytes : 0;
  for (int64_t steps = std::min(term.most, wanted / term.bytes); steps >= fewest; --steps) {
    if (reaches(all, at + 1, wanted - steps * term.bytes, budget)) return true;
  }
  return false;
}

}  // namespace

bool overlaps_itself(const TensorView& tensor) {
  if (empty(tensor)) return false;
  std::vector<Term> dims;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] > 1) dims.push_back({std::abs(tensor.strides[i]), tensor.shape[i] - 1});
  }
  std::sort(dims.begin(), dims.end(), [](const Term& a, const Term& b) { return a.bytes < b.bytes; });
  int64_t reach = 0;
  for (const Term& dim : dims) {
    if (dim.bytes <= reach) return true;
    reach += dim.bytes * dim.most;
  }
  return false;
}

// An element of `one` at first_1 + sum(i * stride), counted from its first byte, and one of `other` at last_2 -
// sum(j * stride), counted from its last byte, meet where the two sums add up to last_2 - first_1.
bool share_memory(const TensorView& one, const TensorView& other) {
  if (!one.present() || !other.present() || empty(one) || empty(other)) return false;
  const Span first = span_of(one), second = span_of(other);
  if (first.last < second.first || second.last < first.first) return false;
  std::vector<Term> all;
  for (const TensorView* tensor : {&one, &other}) {
    for (int i = 0; i < tensor->ndim; ++i)
      add(&all, std::abs(tensor->strides[i]) * dtype_bytes(tensor->dtype), tensor->shape[i] - 1);
  }
  add(&all, 1, dtype_bytes(one.dtype) + dtype_bytes(other.dtype) - 2);
  std::sort(all.begin(), all.end(), [](const Term& a, const Term& b) { return a.bytes > b.bytes; });
  int budget = 100000;
  return reaches(all, 0, second.last - first.first, &budget);
}

}  // namespace kt
