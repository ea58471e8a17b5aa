#include "ops/ranks/shared_experts.h"

#include <algorithm>
#include <cstring>

#include "base/scratch.h"
#include "ops/experts/forward.h"
#include "ops/pairs/finite.h"
#include "ops/pairs/routing.h"
#include "threads/pool.h"

namespace kt {
namespace {

constexpr int64_t kFewTokens = 32;
constexpr int64_t kBytesAtOnce = int64_t{32} << 20;  // of the outputs of pairs, of all ranks
constexpr int64_t kTokensInTask = 8;

TensorView matrix(void* data, DType dtype, int64_t rows, int64_t cols) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.ndim = 2;
  view.shape[0] = rows;
  view.shape[1] = view.strides[0] = cols;
  view.strides[1] = 1;
  return view;
}

TensorView rows_of(const TensorView& all, int64_t first, int64_t rows) {
  TensorView some = all;
  some.data = all.as<char>() + first * all.strides[0] * dtype_bytes(all.dtype);
  some.shape[0] = rows;
  return some;
}

// One call for some tokens.
class SharedForward {
 public:
  SharedForward(const Engine& engine, Exchange& exchange, const RoutedCall& call, int64_t first_token,
                const TensorView& out, SharedExpertsWork* work)
      : engine_(engine), exchange_(exchange), call_(call), first_(first_token), out_(out), work_(*work) {}

  Status run() {
    place_pairs();
    const auto pairs = static_cast<int64_t>(work_.pairs.size());
    const TensorView own =
        matrix(work_.own_rows.reserve<float>(std::max<int64_t>(pairs * hidden(), 1)), DType::kF32, pairs, hidden());
    if (pairs > 0) {
      take_pairs();
      KT_RETURN_IF_ERROR(forward(engine_, work_.own, own));
    }
    int64_t all = 0;
    for (const int64_t count : work_.counts) all += count;
    const bool sums_all = exchange_.is_near() && tokens() <= kFewTokens;
    const int64_t cols = sums_all ? hidden() : hidden() / exchange_.num_ranks();
    const TensorView rows = matrix(work_.rows.reserve<float>(std::max<int64_t>(all * cols, 1)), DType::kF32, all, cols);
    KT_RETURN_IF_ERROR(exchange_.gather_rows(own, work_.counts, rows));
    add_up(rows, sums_all ? 0 : exchange_.rank() * cols);
    return sums_all ? Status() : exchange_.gather_columns(out_);
  }

 private:
  int64_t tokens() const { return out_.shape[0]; }
  int64_t hidden() const { return out_.shape[1]; }
  int64_t top_k() const { return call_.ids.shape[1]; }
  int64_t experts() const { return engine_.layer.shape().num_experts; }

  // The rank that has the expert of a pair; -1: not routed.
  int64_t owner_of(int64_t pair) const {
    const int64_t id = id_at(call_.ids, first_ + pair / top_k(), pair % top_k());
    return id < 0 ? -1 : id / experts();
  }

  // A rank's pairs lie in the order of tokens and positions, behind those of the ranks before it.
  void place_pairs() {
    const int64_t all = tokens() * top_k();
    std::vector<int64_t>& counts = work_.counts;
    counts.assign(static_cast<size_t>(exchange_.num_ranks()), 0);
    work_.row_of.resize(static_cast<size_t>(all));
    work_.pairs.clear();
    for (int64_t pair = 0; pair < all; ++pair) {
      const int64_t owner = owner_of(pair);
      work_.row_of[static_cast<size_t>(pair)] = owner < 0 ? -1 : counts[static_cast<size_t>(owner)]++;
      if (owner == exchange_.rank()) work_.pairs.push_back(pair);
    }
    for (int64_t pair = 0; pair < all; ++pair) {
      const int64_t owner = owner_of(pair);
      for (int64_t before = 0; before < owner; ++before)
        work_.row_of[static_cast<size_t>(pair)] += counts[static_cast<size_t>(before)];
    }
  }

  // This rank's pairs as tokens with one expert each, of weight 1.
  void take_pairs() {
    const auto pairs = static_cast<int64_t>(work_.pairs.size());
    const int64_t first_expert = exchange_.rank() * experts();
    const auto row_bytes = static_cast<size_t>(hidden() * dtype_bytes(call_.x.dtype));
    auto* const rows = work_.x.reserve<char>(pairs * static_cast<int64_t>(row_bytes));
    work_.ids.resize(static_cast<size_t>(pairs));
    work_.slots.resize(static_cast<size_t>(pairs));
    work_.weights.assign(static_cast<size_t>(pairs), 1.0f);
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t pair = work_.pairs[static_cast<size_t>(i)], token = first_ + pair / top_k();
      std::memcpy(rows + static_cast<size_t>(i) * row_bytes, rows_of(call_.x, token, 1).data, row_bytes);
      work_.ids[static_cast<size_t>(i)] = static_cast<int32_t>(id_at(call_.ids, token, pair % top_k()) - first_expert);
      work_.slots[static_cast<size_t>(i)] = static_cast<int32_t>(slot_at(call_, token));
    }
    RoutedCall& own = work_.own;
    own.x = matrix(rows, call_.x.dtype, pairs, hidden());
    own.ids = matrix(work_.ids.data(), DType::kI32, pairs, 1);
    own.weights = matrix(work_.weights.data(), DType::kF32, pairs, 1);
    own.token_slots = {};
    if (call_.token_slots.present()) {
      own.token_slots = matrix(work_.slots.data(), DType::kI32, pairs, 1);
      own.token_slots.ndim = 1;
    }
    own.slots = call_.slots;
  }

  // Columns [first, first + the columns of `rows`) of the sums, as combine_pairs has them.
  void add_up(const TensorView& rows, int64_t first) const {
    const OperationScope scope;
    const int64_t cols = rows.shape[1], element = dtype_bytes(out_.dtype);
    run_ranges(tokens(), kTokensInTask, engine_.num_threads, [&](int64_t from, int64_t count) {
      static thread_local Scratch scratch;
      for (int64_t token = from; token < from + count; ++token) {
        char* const to = out_.as<char>() + (token * out_.strides[0] + first) * element;
        float* sum = out_.dtype == DType::kBf16 ? scratch.reserve<float>(cols) : reinterpret_cast<float*>(to);
        std::fill(sum, sum + cols, 0.0f);
        for (int64_t position = 0; position < top_k(); ++position) {
          const int64_t row = work_.row_of[static_cast<size_t>(token * top_k() + position)];
          if (row < 0) continue;
          const float weight = call_.weights.as<float>()[(first_ + token) * call_.weights.strides[0] + position];
          engine_.tiles.add_scaled(rows.as<float>() + row * cols, weight, cols, sum);
        }
        if (out_.dtype == DType::kBf16) engine_.tiles.narrow(sum, cols, reinterpret_cast<uint16_t*>(to));
      }
    });
  }

  const Engine& engine_;
  Exchange& exchange_;
  const RoutedCall& call_;
  const int64_t first_;
  const TensorView& out_;
  SharedExpertsWork& work_;
};

}  // namespace

Status forward_over_ranks(const Engine& engine, Exchange& exchange, const RoutedCall& call, const TensorView& out,
                          SharedExpertsWork* work) {
  KT_RETURN_IF_ERROR(
      with_check({{&call.x, "x"}, {&call.weights, "weights"}}, engine.num_threads, [&](const FiniteCheck* finite) {
        if (!finite) return;
        ThreadPool::instance().run(finite->num_parts(), engine.num_threads,
                                   [&](int64_t part) { finite->check_part(part); });
      }));
  const int64_t pair_bytes = call.ids.shape[1] * call.x.shape[1] * static_cast<int64_t>(sizeof(float));
  const int64_t at_once = std::max(kBytesAtOnce / pair_bytes, kFewTokens);
  for (int64_t first = 0; first < out.shape[0]; first += at_once) {
    const TensorView some = rows_of(out, first, std::min(at_once, out.shape[0] - first));
    KT_RETURN_IF_ERROR(SharedForward(engine, exchange, call, first, some, work).run());
  }
  return {};
}

}  // namespace kt
