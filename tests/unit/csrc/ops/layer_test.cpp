// A whole layer, forward and backward, on one instruction set. Forward: double precision. Backward: the derivative of
// the double-precision forward along random directions, by central differences.
#include <cstring>

#include "nodes.h"
#include "ops/experts/forward.h"
#include "packed_case.h"
#include "reference.h"
#include "remembered.h"

namespace kt_test {
namespace {

template <class T>
kt::TensorView view(std::vector<T>& data, kt::DType dtype, const std::vector<int64_t>& shape) {
  return tensor_view(data.data(), dtype, shape);
}

struct Case {
  int64_t tokens, top_k;
  kt::ExpertShape shape;
  int64_t rank;
  bool bf16;
  kt::Format format{};
  kt::ExpertMlp mlp{};
  // Relative to the norm. int8 activations are as wide as a step of 1/127 of their group's largest; all else is
  // rounding of bf16 or float32. Measured forward: 4.8e-7, 1.8e-2, 2.4e-3.
  double forward_tolerance() const { return !bf16 ? 2e-6 : format.integer() ? 4e-2 : 6e-3; }
  // Measured: 1.1e-6, 1.7e-2, 5.7e-3. `rounds`: whether the result or a factor of its products is rounded to bf16.
  double backward_tolerance(bool rounds) const {
    return !bf16 || (!rounds && !format.integer()) ? 3e-6 : format.integer() ? 4e-2 : 1.2e-2;
  }
};

constexpr double kScaling = 0.5;

// Everything one call needs; x and the adapter are held in float and rounded to bf16 where the case says so.
struct Problem {
  Problem(const Case& c, Random& random)
      : config(c),
        layer(c.shape, c.format, 1, c.mlp),
        two_nodes(c.shape, c.format, 2, c.mlp),
        four_nodes(c.shape, c.format, 4, c.mlp) {
    const auto [experts, hidden, inner] = c.shape;
    for (int part = 0; part < 3; ++part) {
      const kt::PackedShape shape = layer.shape_of(static_cast<kt::Projection>(part));
      for (int64_t e = 0; e < experts; ++e) {
        const PackedCase& matrix =
            packed_case(shape.rows, shape.cols, c.format, random, 1 / std::sqrt(static_cast<float>(shape.cols)));
        if (part > 0 || c.mlp.has_gate()) add_matrix(matrix, e, static_cast<kt::Projection>(part), random);
        for (int64_t row = 0; row < shape.rows; ++row) {
          for (int64_t col = 0; col < shape.cols; ++col) plain[part].push_back(matrix.at(row, col));
        }
      }
      const int64_t in = part < 2 ? hidden : inner, out = part < 2 ? inner : hidden;
      lora[2 * part] = random.floats(experts * c.rank * in);
      lora[2 * part + 1] = random.floats(experts * out * c.rank);
      for (float& value : lora[2 * part]) value *= 0.2f;
      for (float& value : lora[2 * part + 1]) value *= 0.2f;
    }
    x = random.floats(c.tokens * hidden);
    x_bf16.resize(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      x_bf16[i] = kt::float_to_bf16(x[i]);
      if (c.bf16) x[i] = kt::bf16_to_float(x_bf16[i]);
    }
    weights = random.floats(c.tokens * c.top_k);
    for (int64_t i = 0; i < c.tokens * c.top_k; ++i) ids.push_back(static_cast<int32_t>(random.below(experts + 1) - 1));
    for (int64_t t = 0; t < c.tokens; ++t) token_slots.push_back(static_cast<int32_t>(random.below(2) - 1));
    add_to(&digest);
  }

  // All that the exact result depends on.
  void add_to(Digest* to) const {
    const kt::Activation& activation = config.mlp.activation;
    to->add(config.tokens).add(config.top_k).add(config.rank).add(config.mlp.has_bias);
    to->add(static_cast<int>(activation.kind)).add(activation.limit).add(activation.alpha);
    to->add(config.shape.num_experts).add(config.shape.hidden).add(config.shape.intermediate);
    for (int part = 0; part < 3; ++part) to->add(plain[part]).add(bias[part]);
    for (const std::vector<float>& each : lora) to->add(each);
    to->add(x).add(weights).add(ids).add(token_slots);
  }

  void add_matrix(const PackedCase& matrix, int64_t expert, kt::Projection part, Random& random) {
    std::vector<float> drawn;
    if (config.mlp.has_bias) drawn = random.floats(matrix.shape.rows);
    bias[part].insert(bias[part].end(), drawn.begin(), drawn.end());
    for (kt::ExpertLayer* each : {&layer, &two_nodes, &four_nodes}) {
      pack_into(each, matrix, expert, part);
      if (config.mlp.has_bias) std::copy(drawn.begin(), drawn.end(), each->bias_data(expert, part));
    }
  }

  kt::LoraSlot slot(std::vector<float> (&tensors)[6]) {
    const auto [experts, hidden, inner] = config.shape;
    kt::LoraSlot made;
    made.scaling = static_cast<float>(kScaling);
    for (const kt::Projection part : config.mlp.projections()) {
      const int64_t in = part < 2 ? hidden : inner, out = part < 2 ? inner : hidden;
      made.pairs[part].a = view(tensors[2 * part], kt::DType::kF32, {experts, config.rank, in});
      made.pairs[part].b = view(tensors[2 * part + 1], kt::DType::kF32, {experts, out, config.rank});
    }
    return made;
  }

  kt::RoutedCall call() {
    kt::RoutedCall made;
    const std::vector<int64_t> rows = {config.tokens, config.shape.hidden}, routed = {config.tokens, config.top_k};
    made.x = config.bf16 ? view(x_bf16, kt::DType::kBf16, rows) : view(x, kt::DType::kF32, rows);
    made.ids = view(ids, kt::DType::kI32, routed);
    made.weights = view(weights, kt::DType::kF32, routed);
    made.token_slots = view(token_slots, kt::DType::kI32, {config.tokens});
    made.slots = {slot(lora)};
    return made;
  }

  Case config;
  kt::ExpertLayer layer, two_nodes, four_nodes;
  std::vector<double> plain[3];
  std::vector<float> bias[3];
  std::vector<uint16_t> x_bf16;
  std::vector<float> lora[6], x, weights;
  std::vector<int32_t> ids, token_slots;
  Digest digest;
};

// The arguments that gradients are taken of, in double.
struct Point {
  std::vector<double> x, weights, lora[6];
  explicit Point(const Problem& p) : x(p.x.begin(), p.x.end()), weights(p.weights.begin(), p.weights.end()) {
    for (int i = 0; i < 6; ++i) lora[i].assign(p.lora[i].begin(), p.lora[i].end());
  }
};

Row project(const Problem& p, const Point& at, int part, int64_t expert, bool adapted, const Row& in) {
  const auto cols = static_cast<int64_t>(in.size());
  const int64_t rows = part < 2 ? p.config.shape.intermediate : p.config.shape.hidden, rank = p.config.rank;
  Row out = times(p.plain[part], expert * rows * cols, cols, rows, in);
  for (size_t i = 0; p.config.mlp.has_bias && i < out.size(); ++i)
    out[i] += p.bias[part][static_cast<size_t>(expert * rows) + i];
  if (!adapted) return out;
  const Row low = times(at.lora[2 * part], expert * rank * cols, cols, rank, in);
  add(out, times(at.lora[2 * part + 1], expert * rows * rank, rank, rows, low), kScaling);
  return out;
}

Row reference(const Problem& p, const Point& at) {
  const int64_t hidden = p.config.shape.hidden;
  Row out;
  for (int64_t t = 0; t < p.config.tokens; ++t) {
    const Row x(at.x.begin() + t * hidden, at.x.begin() + (t + 1) * hidden);
    Row sum(x.size(), 0.0);
    for (int64_t k = t * p.config.top_k; k < (t + 1) * p.config.top_k; ++k) {
      const int64_t expert = p.ids[static_cast<size_t>(k)];
      if (expert < 0) continue;
      const bool adapted = p.token_slots[static_cast<size_t>(t)] >= 0;
      const auto product = [&](int part, const Row& in) { return project(p, at, part, expert, adapted, in); };
      const Row up = product(kt::kUp, x), gate = p.config.mlp.has_gate() ? product(kt::kGate, x) : up;
      Row h(up.size());
      for (size_t i = 0; i < h.size(); ++i) h[i] = activated(p.config.mlp.activation, gate[i], up[i]);
      add(sum, product(kt::kDown, h), at.weights[static_cast<size_t>(k)]);
    }
    out.insert(out.end(), sum.begin(), sum.end());
  }
  return out;
}

void test_forward(Problem& p, const kt::Tiles& tiles, Report& report) {
  std::vector<float> out(p.x.size(), NAN);
  std::vector<uint16_t> out_bf16(p.x.size());
  const std::vector<int64_t> shape = {p.config.tokens, p.config.shape.hidden};
  const kt::TensorView result =
      p.config.bf16 ? view(out_bf16, kt::DType::kBf16, shape) : view(out, kt::DType::kF32, shape);
  const kt::Status status = kt::forward({p.layer, tiles, 2}, p.call(), result);
  if (!status.ok()) return report.fail("forward: " + status.message());
  const Row& wanted = remembered(p.digest, [&] { return reference(p, Point(p)); });
  std::vector<double> error(wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    error[i] = (p.config.bf16 ? kt::bf16_to_float(out_bf16[i]) : out[i]) - wanted[i];
  }
  report.close("forward", norm(error), 0.0, p.config.forward_tolerance(), norm(wanted));
}

// The slope of <grad_out, forward> along a direction of x, of the weights or of an adapter's matrix. No kernel is
// called here.
double slope_of(const Problem& p, const std::vector<float>& grad_out, const Row& direction,
                std::vector<double> Point::* x, int lora_index) {
  constexpr double kStep = 1e-7;  // short: of a clamp only one side
  double slope = 0;
  for (const double sign : {1.0, -1.0}) {
    Point at(p);
    std::vector<double>& moved = x ? at.*x : at.lora[lora_index];
    for (size_t i = 0; i < moved.size(); ++i) moved[i] += sign * kStep * direction[i];
    const std::vector<double> out = reference(p, at);
    for (size_t i = 0; i < out.size(); ++i) slope += sign * out[i] * grad_out[i] / (2 * kStep);
  }
  return slope;
}

// <gradient, direction> against the slope of <grad_out, forward> along the direction.
void test_direction(const Problem& p, const std::vector<float>& grad_out, const std::vector<float>& gradient,
                    std::vector<double> Point::* x, int lora_index, const char* name, bool rounds, Random& random,
                    Report& report) {
  if (!report.takes()) return;
  std::vector<double> direction(gradient.size());
  double got = 0;
  for (size_t i = 0; i < direction.size(); ++i) {
    direction[i] = random.normal();
    got += direction[i] * gradient[i];
  }
  Digest digest = p.digest;
  digest.add(grad_out).add(direction).add(name, std::strlen(name));
  const double slope = remembered(digest, [&] { return slope_of(p, grad_out, direction, x, lora_index); });
  const std::vector<double> wide(gradient.begin(), gradient.end());
  const std::string of = ", activation " + std::to_string(static_cast<int>(p.config.mlp.activation.kind));
  report.close(std::string("gradient of ") + name + of, got, slope, p.config.backward_tolerance(rounds),
               norm(wide) + 1e-3);
}

// All results of one forward and backward, as bits.
struct Gradients {
  explicit Gradients(const Problem& p)
      : out(p.x.size(), NAN), x(p.x.size()), weights(p.weights.size()), out_bf16(p.x.size()), x_bf16(p.x.size()) {
    for (int i = 0; i < 6; ++i) lora[i].assign(p.lora[i].size(), 0.0f);
  }
  bool operator==(const Gradients& other) const {
    bool same = same_bits(weights, other.weights) && out_bf16 == other.out_bf16 && x_bf16 == other.x_bf16 &&
                same_bits(x, other.x) && same_bits(out, other.out);
    for (int i = 0; i < 6; ++i) same = same && same_bits(lora[i], other.lora[i]);
    return same;
  }
  static bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
  }
  std::vector<float> out, x, weights, lora[6];
  std::vector<uint16_t> out_bf16, x_bf16;
};

bool run(Problem& p, const kt::ExpertLayer& layer, const kt::Tiles& tiles, int num_threads, bool retain,
         std::vector<float>& grad_out, Gradients* result, Report& report) {
  const std::vector<int64_t> shape = {p.config.tokens, p.config.shape.hidden};
  const kt::Engine engine{layer, tiles, num_threads};
  const bool bf16 = p.config.bf16;
  kt::Retained retained;
  kt::RoutedGradients gradients;
  gradients.x = bf16 ? view(result->x_bf16, kt::DType::kBf16, shape) : view(result->x, kt::DType::kF32, shape);
  gradients.weights = view(result->weights, kt::DType::kF32, {p.config.tokens, p.config.top_k});
  gradients.slots = {p.slot(result->lora)};
  kt::Status status =
      kt::forward(engine, p.call(),
                  bf16 ? view(result->out_bf16, kt::DType::kBf16, shape) : view(result->out, kt::DType::kF32, shape),
                  retain ? &retained : nullptr);
  if (status.ok())
    status =
        kt::backward(engine, p.call(), view(grad_out, kt::DType::kF32, shape), gradients, retain ? &retained : nullptr);
  if (!status.ok()) report.fail(status.message());
  return status.ok();
}

void test_backward(Problem& p, const kt::Tiles& tiles, Random& random, Report& report) {
  std::vector<float> grad_out = random.floats(static_cast<int64_t>(p.x.size()));
  Gradients got(p);
  if (!run(p, p.layer, tiles, 1, false, grad_out, &got, report)) return;
  for (const int num_threads : {1, 3}) {
    for (const bool retain : {false, true}) {
      for (const kt::ExpertLayer* layer : {&p.layer, &p.two_nodes, &p.four_nodes}) {
        const kt::SimulatedTopology nodes(simulated(layer->num_nodes()));
        Gradients again(p);
        if (!run(p, *layer, tiles, num_threads, retain, grad_out, &again, report)) return;
        report.equal("bits depend on threads, retention or memory nodes", again == got);
      }
    }
  }
  for (size_t i = 0; p.config.bf16 && i < got.x.size(); ++i) got.x[i] = kt::bf16_to_float(got.x_bf16[i]);
  const bool rounds = tiles.multiply_bf16 != nullptr;
  test_direction(p, grad_out, got.x, &Point::x, 0, "x", true, random, report);
  test_direction(p, grad_out, got.weights, &Point::weights, 0, "weights", rounds, random, report);
  static const char* const kNames[] = {"gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b"};
  for (int i = p.config.mlp.has_gate() ? 0 : 2; i < 6; ++i)
    test_direction(p, grad_out, got.lora[i], nullptr, i, kNames[i], rounds, random, report);
}

void test_mlps(const kt::Tiles& tiles, Random& random, Report& report) {
  const kt::Format int4{kt::Encoding::kInt4, 32};
  for (const kt::Activation& activation : all_activations()) {
    for (const bool has_bias : {false, true}) {
      const kt::ExpertMlp mlp{activation, has_bias};
      // Rounded activations fall on another side of a clamp's border than exact ones, where gradients jump.
      const bool bf16 = has_bias && activation.limit == 0;
      const Case cases[] = {
          {32, 2, {3, 96, 90}, 4, false, {}, mlp},  // the last rows of a block are beyond the matrix
          {32, 2, {3, 96, 96}, 4, bf16, int4, mlp},
      };
      for (const Case& c : cases) {
        Problem problem(c, random);
        test_forward(problem, tiles, report);
        test_backward(problem, tiles, random, report);
      }
    }
  }
}

void test_adapter_without_gate(const kt::Tiles& tiles, Random& random, Report& report) {
  Problem problem({3, 1, {2, 16, 16}, 2, false, {}, {{kt::ActivationKind::kReluSquared}}}, random);
  kt::RoutedCall call = problem.call();
  call.slots[0].pairs[kt::kGate] = call.slots[0].pairs[kt::kUp];
  std::vector<float> out(problem.x.size());
  const kt::Status status = kt::forward({problem.layer, tiles, 1}, call, view(out, kt::DType::kF32, {3, 16}));
  report.equal("an adapter of a gate that is not there is refused",
               status.message() == "slots[0] adapts gate, but the experts of this layer have no gate");
}

}  // namespace

void test_layer(const kt::Tiles& tiles, Report& report) {
  Random random(2);
  const Case cases[] = {
      {1, 1, {1, 1, 1}, 1, false},  {5, 2, {3, 33, 17}, 3, false}, {19, 3, {2, 64, 48}, 4, false},
      {7, 2, {4, 31, 15}, 8, true}, {40, 2, {2, 80, 33}, 2, true}, {0, 2, {2, 16, 16}, 1, false},
  };
  for (const Case& c : cases) {
    Problem problem(c, random);
    test_forward(problem, tiles, report);
    test_backward(problem, tiles, random, report);
  }
  test_mlps(tiles, random, report);
  test_adapter_without_gate(tiles, random, report);
  // Large enough for several threads (schedule.h), with every format.
  for (const kt::Format& format : all_formats()) {
    for (const bool bf16 : {false, true}) {
      if (!report.takes(bf16)) continue;
      const int64_t cols = format.group ? 2 * format.group : 96;
      Problem problem({32, 2, {3, cols, cols}, 4, bf16, format}, random);
      test_forward(problem, tiles, report);
      test_backward(problem, tiles, random, report);
    }
  }
}

}  // namespace kt_test
