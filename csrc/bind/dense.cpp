#include "ops/dense/dense.h"

#include <string>

#include "bind/binders.h"
#include "bind/dlpack.h"
#include "bind/layer.h"
#include "kernels/registry.h"
#include "ops/dense/activation.h"
#include "ops/dense/dense_backward.h"
#include "ops/dense/heads.h"
#include "ops/dense/low_rank.h"
#include "ops/dense/norm_backward.h"
#include "ops/dense/rotary.h"
#include "ops/packed/linear.h"
#include "ops/router/grouped_router.h"
#include "ops/router/router.h"

namespace py = pybind11;

namespace kt {
namespace {

const std::vector<DType> kFloats = {DType::kF32, DType::kBf16};

class NativeDense {
 public:
  NativeDense(const std::string& isa, int num_threads) : num_threads_(num_threads) {
    check(find_tiles(isa, &tiles_));
    if (num_threads < 1)
      throw BindError{"invalid_value", "num_threads is " + std::to_string(num_threads) + "; allowed: 1 or more"};
  }

  void linear(py::handle x, py::handle weight, py::handle bias, py::handle out) const {
    const TensorView rows = view_of(x, {.name = "x", .dtypes = kFloats, .shape = {-1, -1}});
    const TensorView matrix = view_of(weight, {.name = "weight", .dtypes = kFloats, .shape = {-1, rows.shape[1]}});
    const int64_t cols = matrix.shape[0];
    TensorView added;
    if (!bias.is_none()) added = view_of(bias, {.name = "bias", .dtypes = kFloats, .shape = {cols}});
    const TensorView result =
        view_of(out, {.name = "out", .dtypes = kFloats, .shape = {rows.shape[0], cols}, .written = true});
    check_disjoint({{"out", result}}, {{"x", rows}, {"weight", matrix}, {"bias", added}});
    const py::gil_scoped_release release;
    kt::linear(engine(), rows, matrix, added, result);
  }

  void linear_backward(py::handle by_out, py::handle weight, py::handle by_x) const {
    const TensorView rows = view_of(by_out, {.name = "by_out", .dtypes = kFloats, .shape = {-1, -1}});
    const TensorView matrix = view_of(weight, {.name = "weight", .dtypes = {rows.dtype}, .shape = {rows.shape[1], -1}});
    const TensorView result = view_of(
        by_x, {.name = "by_x", .dtypes = {rows.dtype}, .shape = {rows.shape[0], matrix.shape[1]}, .written = true});
    check_disjoint({{"by_x", result}}, {{"by_out", rows}, {"weight", matrix}});
    const py::gil_scoped_release release;
    kt::linear_backward(engine(), rows, matrix, result);
  }

  void linear_packed(py::handle x, const PackedMatrix& matrix, py::handle bias, py::handle out) const {
    const TensorView rows = view_of(x, {.name = "x", .dtypes = kFloats, .shape = {-1, matrix.cols()}});
    TensorView added;
    if (!bias.is_none()) added = view_of(bias, {.name = "bias", .dtypes = kFloats, .shape = {matrix.rows()}});
    const TensorView result =
        view_of(out, {.name = "out", .dtypes = kFloats, .shape = {rows.shape[0], matrix.rows()}, .written = true});
    check_disjoint({{"out", result}}, {{"x", rows}, {"bias", added}});
    const py::gil_scoped_release release;
    kt::linear(engine(), rows, matrix, added, result);
  }

  void linear_packed_backward(py::handle by_out, const PackedMatrix& matrix, py::handle by_x) const {
    const TensorView rows = view_of(by_out, {.name = "by_out", .dtypes = kFloats, .shape = {-1, matrix.rows()}});
    const TensorView result = view_of(
        by_x, {.name = "by_x", .dtypes = {rows.dtype}, .shape = {rows.shape[0], matrix.cols()}, .written = true});
    check_disjoint({{"by_x", result}}, {{"by_out", rows}});
    const py::gil_scoped_release release;
    kt::linear_backward(engine(), rows, matrix, result);
  }

  void linear_heads(py::handle x, py::handle weight, py::handle out) const {
    const TensorView tokens = view_of(x, {.name = "x", .dtypes = kFloats, .shape = {-1, -1, -1}});
    const TensorView matrices =
        view_of(weight, {.name = "weight", .dtypes = kFloats, .shape = {tokens.shape[1], -1, tokens.shape[2]}});
    const TensorView result = view_of(out, {.name = "out",
                                            .dtypes = kFloats,
                                            .shape = {tokens.shape[0], tokens.shape[1], matrices.shape[1]},
                                            .written = true});
    check_disjoint({{"out", result}}, {{"x", tokens}, {"weight", matrices}});
    const py::gil_scoped_release release;
    kt::linear_heads(engine(), tokens, matrices, result);
  }

  // `out` may be `base`.
  void linear_added(py::handle x, py::handle weight, float alpha, py::handle base, py::handle out) const {
    const TensorView rows = view_of(x, {.name = "x", .dtypes = kFloats, .shape = {-1, -1}});
    const TensorView matrix = view_of(weight, {.name = "weight", .dtypes = kFloats, .shape = {-1, rows.shape[1]}});
    const std::vector<int64_t> shape = {rows.shape[0], matrix.shape[0]};
    TensorView added;
    if (!base.is_none()) added = view_of(base, {.name = "base", .dtypes = kFloats, .shape = shape});
    const TensorView result = view_of(out, {.name = "out", .dtypes = kFloats, .shape = shape, .written = true});
    check_disjoint({{"out", result}}, {{"x", rows}, {"weight", matrix}});
    const py::gil_scoped_release release;
    kt::linear_added(engine(), rows, matrix, alpha, added, result);
  }

  void inner_product(py::handle a, py::handle b, float alpha, py::handle out) const {
    const TensorView left = view_of(a, {.name = "a", .dtypes = kFloats, .shape = {-1, -1}});
    const TensorView right = view_of(b, {.name = "b", .dtypes = kFloats, .shape = {left.shape[0], -1}});
    const TensorView result = view_of(out, {.name = "out",
                                            .dtypes = {DType::kF32},
                                            .shape = {left.shape[1], right.shape[1]},
                                            .contiguous = true,
                                            .written = true});
    check_disjoint({{"out", result}}, {{"a", left}, {"b", right}});
    const py::gil_scoped_release release;
    kt::inner_product(engine(), left, right, alpha, result);
  }

  void silu_and_multiply(py::handle gate, py::handle up, py::handle out) const {
    const TensorView gates = view_of(gate, {.name = "gate", .dtypes = kFloats, .shape = {-1, -1}});
    const std::vector<int64_t> shape = {gates.shape[0], gates.shape[1]};
    const TensorView ups = view_of(up, {.name = "up", .dtypes = {gates.dtype}, .shape = shape});
    const TensorView result = view_of(out, {.name = "out", .dtypes = {gates.dtype}, .shape = shape, .written = true});
    check_disjoint({{"out", result}}, {{"gate", gates}, {"up", ups}});
    const py::gil_scoped_release release;
    kt::silu_and_multiply(engine(), gates, ups, result);
  }

  void silu_and_multiply_backward(py::handle by_out, py::handle gate, py::handle up, py::handle by_gate,
                                  py::handle by_up) const {
    const TensorView gates = view_of(gate, {.name = "gate", .dtypes = kFloats, .shape = {-1, -1}});
    const auto matching = [&](const py::handle& tensor, const char* name, bool written) {
      return view_of(
          tensor,
          {.name = name, .dtypes = {gates.dtype}, .shape = {gates.shape[0], gates.shape[1]}, .written = written});
    };
    const SwigluGradient gradient{.by_out = matching(by_out, "by_out", false),
                                  .gate = gates,
                                  .up = matching(up, "up", false),
                                  .by_gate = matching(by_gate, "by_gate", true),
                                  .by_up = matching(by_up, "by_up", true)};
    check_disjoint({{"by_gate", gradient.by_gate}, {"by_up", gradient.by_up}},
                   {{"by_out", gradient.by_out}, {"gate", gates}, {"up", gradient.up}});
    const py::gil_scoped_release release;
    kt::silu_and_multiply_backward(engine(), gradient);
  }

  // [M, G] and [M, I], I a multiple of G.
  static void check_gates(const TensorView& gates, const TensorView& x) {
    if (gates.shape[1] < 1 || x.shape[1] % gates.shape[1] != 0)
      throw BindError{"invalid_value", "gate has " + std::to_string(gates.shape[1]) +
                                           " columns; allowed: a divisor of x's " + std::to_string(x.shape[1])};
  }

  void sigmoid_and_multiply(py::handle gate, py::handle x, py::handle out) const {
    const TensorView values = view_of(x, {.name = "x", .dtypes = kFloats, .shape = {-1, -1}});
    const TensorView gates = view_of(gate, {.name = "gate", .dtypes = {values.dtype}, .shape = {values.shape[0], -1}});
    check_gates(gates, values);
    const TensorView result = view_of(
        out, {.name = "out", .dtypes = {values.dtype}, .shape = {values.shape[0], values.shape[1]}, .written = true});
    check_disjoint({{"out", result}}, {{"gate", gates}, {"x", values}});
    const py::gil_scoped_release release;
    kt::sigmoid_and_multiply(engine(), gates, values, result);
  }

  void sigmoid_and_multiply_backward(py::handle by_out, py::handle gate, py::handle x, py::handle by_gate,
                                     py::handle by_x) const {
    SigmoidGradient g{};
    g.x = view_of(x, {.name = "x", .dtypes = kFloats, .shape = {-1, -1}});
    const std::vector<DType> same = {g.x.dtype};
    const std::vector<int64_t> shape = {g.x.shape[0], g.x.shape[1]};
    g.gate = view_of(gate, {.name = "gate", .dtypes = same, .shape = {shape[0], -1}});
    check_gates(g.gate, g.x);
    g.by_out = view_of(by_out, {.name = "by_out", .dtypes = same, .shape = shape});
    g.by_x = view_of(by_x, {.name = "by_x", .dtypes = same, .shape = shape, .written = true});
    g.by_gate =
        view_of(by_gate, {.name = "by_gate", .dtypes = same, .shape = {shape[0], g.gate.shape[1]}, .written = true});
    check_disjoint({{"by_gate", g.by_gate}, {"by_x", g.by_x}}, {{"by_out", g.by_out}, {"gate", g.gate}, {"x", g.x}});
    const py::gil_scoped_release release;
    kt::sigmoid_and_multiply_backward(engine(), g);
  }

  void rotate(py::handle x, py::handle angles, py::handle positions, bool interleaved, bool inverse,
              py::handle out) const {
    Rotation rotation;
    rotation.interleaved = interleaved;
    rotation.inverse = inverse;
    rotation.x = view_of(x, {.name = "x", .dtypes = kFloats, .shape = {-1, -1, -1}});
    const int64_t tokens = rotation.x.shape[0], size = rotation.x.shape[2];
    rotation.angles =
        view_of(angles, {.name = "angles", .dtypes = {rotation.x.dtype}, .shape = {-1, -1}, .contiguous = true});
    const int64_t places = rotation.angles.shape[0], rotated = rotation.angles.shape[1];
    if (rotated % 2 != 0 || rotated > size) {
      throw BindError{"invalid_value", "angles has " + std::to_string(rotated) +
                                           " columns; allowed: an even number, at most the size of a head, " +
                                           std::to_string(size)};
    }
    rotation.positions =
        view_of(positions, {.name = "positions", .dtypes = {DType::kI64}, .shape = {tokens}, .contiguous = true});
    rotation.out = view_of(
        out,
        {.name = "out", .dtypes = {rotation.x.dtype}, .shape = {tokens, rotation.x.shape[1], size}, .written = true});
    check_disjoint({{"out", rotation.out}}, {{"x", rotation.x}, {"angles", rotation.angles}});
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t position = rotation.positions.as<const int64_t>()[t];
      if (position < 0 || position >= places)
        throw BindError{"invalid_value", "positions[" + std::to_string(t) + "] is " + std::to_string(position) +
                                             "; allowed: 0 to " + std::to_string(places - 1)};
    }
    const py::gil_scoped_release release;
    kt::rotate(engine(), rotation);
  }

  void linear_heads_backward(py::handle by_out, py::handle weight, py::handle by_x) const {
    const TensorView tokens = view_of(by_out, {.name = "by_out", .dtypes = kFloats, .shape = {-1, -1, -1}});
    const TensorView matrices =
        view_of(weight, {.name = "weight", .dtypes = {tokens.dtype}, .shape = {tokens.shape[1], tokens.shape[2], -1}});
    const TensorView result = view_of(by_x, {.name = "by_x",
                                             .dtypes = {tokens.dtype},
                                             .shape = {tokens.shape[0], tokens.shape[1], matrices.shape[2]},
                                             .written = true});
    check_disjoint({{"by_x", result}}, {{"by_out", tokens}, {"weight", matrices}});
    const py::gil_scoped_release release;
    kt::linear_heads_backward(engine(), tokens, matrices, result);
  }

  void choose_from_groups(py::handle logits, py::handle bias, int64_t groups, int64_t top_groups, bool is_sigmoid,
                          bool normalises, float scaling, py::handle weights, py::handle ids) const {
    const TensorView rows = view_of(logits, {.name = "logits", .dtypes = {DType::kF32}, .shape = {-1, -1}});
    const int64_t tokens = rows.shape[0], experts = rows.shape[1];
    TensorView added;
    if (!bias.is_none())
      added = view_of(bias, {.name = "bias", .dtypes = {DType::kF32}, .shape = {experts}, .contiguous = true});
    const TensorView chosen = view_of(
        weights,
        {.name = "weights", .dtypes = {DType::kF32}, .shape = {tokens, -1}, .contiguous = true, .written = true});
    const int64_t top_k = chosen.shape[1];
    const TensorView places = view_of(
        ids, {.name = "ids", .dtypes = {DType::kI32}, .shape = {tokens, top_k}, .contiguous = true, .written = true});
    if (groups < 1 || experts % groups != 0)
      throw BindError{"invalid_value", "groups is " + std::to_string(groups) + ", which does not divide the " +
                                           std::to_string(experts) + " experts"};
    if (top_groups < 1 || top_groups > groups)
      throw BindError{"invalid_value",
                      "top_groups is " + std::to_string(top_groups) + "; allowed: 1 to " + std::to_string(groups)};
    if (top_k > top_groups * (experts / groups))
      throw BindError{"invalid_value", "top_k is " + std::to_string(top_k) + "; " + std::to_string(top_groups) +
                                           " groups have " + std::to_string(top_groups * (experts / groups)) +
                                           " experts"};
    check_disjoint({{"weights", chosen}, {"ids", places}}, {{"logits", rows}, {"bias", added}});
    const GroupedRouting routing{.score = is_sigmoid ? RouterScore::kSigmoid : RouterScore::kSoftmax,
                                 .groups = groups,
                                 .top_groups = top_groups,
                                 .normalises = normalises,
                                 .scaling = scaling};
    const py::gil_scoped_release release;
    kt::choose_from_groups(engine(), routing, rows, added, chosen, places);
  }

  void rms_norm(py::handle x, py::handle residual, py::handle weight, float epsilon, py::handle out, py::handle total,
                py::handle inverse) const {
    NormViews views{};
    views.epsilon = epsilon;
    views.x = view_of(x, {.name = "x", .dtypes = kFloats, .shape = {-1, -1}});
    const std::vector<DType> same = {views.x.dtype};
    const std::vector<int64_t> shape = {views.x.shape[0], views.x.shape[1]};
    views.weight = view_of(weight, {.name = "weight", .dtypes = same, .shape = {shape[1]}});
    views.out = view_of(out, {.name = "out", .dtypes = same, .shape = shape, .written = true});
    if (residual.is_none() != total.is_none())
      throw BindError{"invalid_value", "residual and total come together: one of them is None"};
    if (!residual.is_none()) {
      views.residual = view_of(residual, {.name = "residual", .dtypes = same, .shape = shape});
      views.total = view_of(total, {.name = "total", .dtypes = same, .shape = shape, .written = true});
    }
    if (!inverse.is_none()) {
      views.inverse = view_of(
          inverse,
          {.name = "inverse", .dtypes = {DType::kF32}, .shape = {shape[0]}, .contiguous = true, .written = true});
    }
    check_disjoint({{"out", views.out}, {"total", views.total}, {"inverse", views.inverse}},
                   {{"x", views.x}, {"residual", views.residual}, {"weight", views.weight}});
    const py::gil_scoped_release release;
    kt::rms_norm(engine(), views);
  }

  void choose_experts(py::handle logits, bool normalises, py::handle weights, py::handle ids) const {
    const TensorView rows = view_of(logits, {.name = "logits", .dtypes = kFloats, .shape = {-1, -1}});
    const TensorView chosen = view_of(weights, {.name = "weights",
                                                .dtypes = {DType::kF32},
                                                .shape = {rows.shape[0], -1},
                                                .contiguous = true,
                                                .written = true});
    const int64_t top_k = chosen.shape[1];
    if (top_k > rows.shape[1]) {
      throw BindError{"invalid_value", "top_k is " + std::to_string(top_k) + "; there are " +
                                           std::to_string(rows.shape[1]) + " experts"};
    }
    const TensorView places = view_of(
        ids,
        {.name = "ids", .dtypes = {DType::kI32}, .shape = {rows.shape[0], top_k}, .contiguous = true, .written = true});
    check_disjoint({{"weights", chosen}, {"ids", places}}, {{"logits", rows}});
    const py::gil_scoped_release release;
    kt::choose_experts(engine(), rows, normalises, chosen, places);
  }

  // The weights of given experts: choose_experts, or choose_from_groups without a bias.
  void weigh_experts(py::handle logits, bool normalises, py::handle ids, py::handle weights) const {
    const GivenExperts given = given_experts(logits, kFloats, ids, weights);
    const py::gil_scoped_release release;
    kt::weigh_experts(engine(), given.logits, normalises, given.ids, given.weights);
  }

  void weigh_from_groups(py::handle logits, bool is_sigmoid, bool normalises, float scaling, py::handle ids,
                         py::handle weights) const {
    const GivenExperts given = given_experts(logits, {DType::kF32}, ids, weights);
    const GroupedRouting routing{.score = is_sigmoid ? RouterScore::kSigmoid : RouterScore::kSoftmax,
                                 .groups = 1,
                                 .top_groups = 1,
                                 .normalises = normalises,
                                 .scaling = scaling};
    const py::gil_scoped_release release;
    kt::weigh_from_groups(engine(), routing, given.logits, given.ids, given.weights);
  }

  void rms_norm_backward(py::handle by_out, py::handle x, py::handle weight, py::handle inverse,
                         py::handle by_x) const {
    NormGradient gradient{};
    gradient.x = view_of(x, {.name = "x", .dtypes = kFloats, .shape = {-1, -1}});
    const std::vector<DType> same = {gradient.x.dtype};
    const std::vector<int64_t> shape = {gradient.x.shape[0], gradient.x.shape[1]};
    gradient.by_out = view_of(by_out, {.name = "by_out", .dtypes = same, .shape = shape});
    gradient.weight = view_of(weight, {.name = "weight", .dtypes = same, .shape = {shape[1]}});
    gradient.inverse =
        view_of(inverse, {.name = "inverse", .dtypes = {DType::kF32}, .shape = {shape[0]}, .contiguous = true});
    gradient.by_x = view_of(by_x, {.name = "by_x", .dtypes = same, .shape = shape, .written = true});
    check_disjoint(
        {{"by_x", gradient.by_x}},
        {{"by_out", gradient.by_out}, {"x", gradient.x}, {"weight", gradient.weight}, {"inverse", gradient.inverse}});
    const py::gil_scoped_release release;
    kt::rms_norm_backward(engine(), gradient);
  }

  std::string isa() const { return tiles_->name; }
  int num_threads() const { return num_threads_; }

 private:
  struct GivenExperts {
    TensorView logits, ids, weights;  // [T, E], [T, K], [T, K]
  };
  static GivenExperts given_experts(py::handle logits, const std::vector<DType>& dtypes, py::handle ids,
                                    py::handle weights) {
    GivenExperts given;
    given.logits = view_of(logits, {.name = "logits", .dtypes = dtypes, .shape = {-1, -1}});
    const int64_t tokens = given.logits.shape[0], experts = given.logits.shape[1];
    given.ids = view_of(ids, {.name = "ids", .dtypes = {DType::kI32}, .shape = {tokens, -1}, .contiguous = true});
    given.weights = view_of(weights, {.name = "weights",
                                      .dtypes = {DType::kF32},
                                      .shape = {tokens, given.ids.shape[1]},
                                      .contiguous = true,
                                      .written = true});
    for (int64_t i = 0; i < tokens * given.ids.shape[1]; ++i) {
      const int32_t id = given.ids.as<const int32_t>()[i];
      if (id < 0 || id >= experts)
        throw BindError{"invalid_value", "ids[" + std::to_string(i / given.ids.shape[1]) + "] names expert " +
                                             std::to_string(id) + "; allowed: 0 to " + std::to_string(experts - 1)};
    }
    check_disjoint({{"weights", given.weights}}, {{"logits", given.logits}, {"ids", given.ids}});
    return given;
  }
  DenseEngine engine() const { return {*tiles_, num_threads_}; }

  const Tiles* tiles_ = nullptr;
  int num_threads_;
};

}  // namespace

void bind_dense(py::module_& module) {
  py::class_<NativeDense>(module, "Dense")
      .def(py::init<const std::string&, int>())
      .def("linear", &NativeDense::linear)
      .def("linear_backward", &NativeDense::linear_backward)
      .def("linear_packed", &NativeDense::linear_packed)
      .def("linear_packed_backward", &NativeDense::linear_packed_backward)
      .def("linear_heads", &NativeDense::linear_heads)
      .def("linear_added", &NativeDense::linear_added)
      .def("inner_product", &NativeDense::inner_product)
      .def("silu_and_multiply", &NativeDense::silu_and_multiply)
      .def("silu_and_multiply_backward", &NativeDense::silu_and_multiply_backward)
      .def("sigmoid_and_multiply", &NativeDense::sigmoid_and_multiply)
      .def("sigmoid_and_multiply_backward", &NativeDense::sigmoid_and_multiply_backward)
      .def("linear_heads_backward", &NativeDense::linear_heads_backward)
      .def("rotate", &NativeDense::rotate)
      .def("choose_from_groups", &NativeDense::choose_from_groups)
      .def("rms_norm_backward", &NativeDense::rms_norm_backward)
      .def("rms_norm", &NativeDense::rms_norm)
      .def("choose_experts", &NativeDense::choose_experts)
      .def("weigh_experts", &NativeDense::weigh_experts)
      .def("weigh_from_groups", &NativeDense::weigh_from_groups)
      .def_property_readonly("isa", &NativeDense::isa)
      .def_property_readonly("num_threads", &NativeDense::num_threads);
}

}  // namespace kt
