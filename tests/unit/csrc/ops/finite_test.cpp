// NaN and Inf in the inputs of large calls on several threads: whichever thread comes to the part of the search that
// holds one, the call is refused and names it.
#include "ops/pairs/finite.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "checks.h"
#include "kernels/registry.h"
#include "ops/experts/forward.h"
#include "ops/ranks/shared_experts.h"
#include "threads/pool.h"

namespace kt_test {
namespace {

constexpr int64_t kTokens = 2048, kHidden = 512, kInner = 16, kExperts = 4, kPartRows = 64;
constexpr int kNumThreads = 3;

std::atomic<int> woken{0};

// No call gets as far as the other ranks: each is refused before.
class NoExchange : public kt::Exchange {
 public:
  NoExchange() : Exchange(0, 2) {}
  kt::Status gather_columns(const kt::TensorView&) override { return kt::invalid_value("exchanged"); }
  kt::Status gather_rows(const kt::TensorView&, const std::vector<int64_t>&, const kt::TensorView&) override {
    return kt::invalid_value("exchanged");
  }
  bool is_near() const override { return true; }
};

struct LargeCall {
  explicit LargeCall(const kt::Tiles& tiles) : engine{layer, tiles, kNumThreads} {
    for (int64_t t = 0; t < kTokens; ++t) ids.push_back(static_cast<int32_t>(t % kExperts));
    gradients.x = tensor_view(grad_x.data(), kt::DType::kF32, {kTokens, kHidden});
    gradients.weights = tensor_view(grad_weights.data(), kt::DType::kF32, {kTokens, 1});
  }
  kt::RoutedCall call(bool bf16) {
    kt::RoutedCall made;
    made.x = bf16 ? tensor_view(x_bf16.data(), kt::DType::kBf16, {kTokens, kHidden})
                  : tensor_view(x.data(), kt::DType::kF32, {kTokens, kHidden});
    made.ids = tensor_view(ids.data(), kt::DType::kI32, {kTokens, 1});
    made.weights = tensor_view(weights.data(), kt::DType::kF32, {kTokens, 1});
    return made;
  }
  kt::TensorView result() { return tensor_view(out.data(), kt::DType::kF32, {kTokens, kHidden}); }
  kt::TensorView outputs_gradient() { return tensor_view(grad_out.data(), kt::DType::kF32, {kTokens, kHidden}); }

  kt::ExpertLayer layer{{kExperts, kHidden, kInner}, {}, 1};  // of zeros
  kt::Engine engine;
  std::vector<float> x = std::vector<float>(kTokens * kHidden, 1.0f), grad_out = x, out = x, grad_x = x;
  std::vector<uint16_t> x_bf16 = std::vector<uint16_t>(kTokens * kHidden, kt::float_to_bf16(1.0f));
  std::vector<float> weights = std::vector<float>(kTokens, 1.0f), grad_weights = weights;
  std::vector<int32_t> ids;
  kt::RoutedGradients gradients;
};

// Every call on one bad value at a time, at this place.
void test_place(LargeCall& large, const kt::Retained& retained, int64_t row, int64_t col, Report& report) {
  const auto refused = [&](const std::string& call, const kt::Status& status, const std::string& name, int64_t at) {
    const std::string place = name + "[" + std::to_string(row) + ", " + std::to_string(at) + "]";
    report.equal(call + " accepts " + place,
                 status.code() == kt::StatusCode::kNumerics && status.message() == place + " is NaN or Inf");
  };
  const auto spoil = [](auto& value, auto bad, auto&& body) {
    const auto before = std::exchange(value, bad);
    body();
    value = before;
  };
  const auto at = static_cast<size_t>(row * kHidden + col);
  const kt::RoutedCall call = large.call(false), narrow = large.call(true);
  const auto backward = [&](const kt::Retained* kept) {
    return kt::backward(large.engine, call, large.outputs_gradient(), large.gradients, kept);
  };
  NoExchange exchange;
  kt::SharedExpertsWork work;
  const auto over_ranks = [&] { return kt::forward_over_ranks(large.engine, exchange, call, large.result(), &work); };
  spoil(large.x[at], NAN, [&] {
    refused("forward", kt::forward(large.engine, call, large.result()), "x", col);
    refused("backward", backward(nullptr), "x", col);
    refused("backward with activations", backward(&retained), "x", col);
    refused("forward over ranks", over_ranks(), "x", col);
  });
  spoil(large.x_bf16[at], uint16_t{0x7f80},
        [&] { refused("forward in bf16", kt::forward(large.engine, narrow, large.result()), "x", col); });
  spoil(large.grad_out[at], INFINITY, [&] {
    refused("backward", backward(nullptr), "grad_out", col);
    refused("backward with activations", backward(&retained), "grad_out", col);
  });
  spoil(large.weights[static_cast<size_t>(row)], NAN,
        [&] { refused("forward over ranks", over_ranks(), "weights", 0); });
}

}  // namespace

// A thread that left out its share would be noticed in all calls together, not in each: which parts it takes is chance.
void test_finite(Report& report) {
  const kt::Tiles* portable = nullptr;
  report.equal("there is always a portable set", kt::find_tiles("portable", &portable).ok());
  LargeCall large(*portable);
  const kt::RoutedCall call = large.call(false);
  report.equal("the search is in many parts",
               kt::FiniteCheck({{&call.x, "x"}}).num_parts() == kTokens / kPartRows && kTokens / kPartRows >= 32);
  kt::Retained retained;
  report.equal("finite values pass",
               kt::forward(large.engine, call, large.result(), &retained).ok() &&
                   kt::backward(large.engine, call, large.outputs_gradient(), large.gradients, &retained).ok());
  woken = 0;
  kt::ThreadPool::instance().set_wake_hook([] { ++woken; });
  {
    const kt::ThreadPool::Awake awake;  // workers take parts at once
    test_place(large, retained, 0, 0, report);
    for (int64_t part = 0; part < kTokens / kPartRows; ++part)  // other rows of the part, other columns
      test_place(large, retained, part * kPartRows + part * 37 % kPartRows, part * 101 % kHidden, report);
    test_place(large, retained, kTokens - 1, kHidden - 1, report);
  }
  // Other threads were awake for these calls.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (woken == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  kt::ThreadPool::instance().set_wake_hook(nullptr);
  report.equal("no other thread woke", woken > 0);
}

}  // namespace kt_test
