#include "bind/layer.h"

#include <pybind11/stl.h>

#include <chrono>
#include <utility>
#include <vector>

#include "base/bf16.h"
#include "ops/experts/unpack.h"
#include "ops/pairs/token_rows.h"

namespace py = pybind11;

namespace kt {
namespace {

const char* kind_name(StatusCode code) {
  switch (code) {
    case StatusCode::kInvalidValue:
      return "invalid_value";
    case StatusCode::kUnknownName:
      return "unknown_name";
    case StatusCode::kNotFound:
      return "not_found";
    case StatusCode::kBadCheckpoint:
      return "bad_checkpoint";
    case StatusCode::kNumerics:
      return "numerics";
    case StatusCode::kLostRank:
      return "lost_rank";
    default:
      return "ok";
  }
}

constexpr const char* kSlotTensors[] = {"gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b"};

// Slots arrive as None or (gate_a, gate_b, up_a, up_b, down_a, down_b, scaling, dropout, seed, tokens, first_expert),
// pairs of capsules or of None; tokens may be None. `num_tokens`: of the call.
std::vector<LoraSlot> parse_slots(const py::sequence& slots, const ExpertShape& shape, int64_t num_tokens,
                                  bool gradients) {
  const std::vector<DType> dtypes =
      gradients ? std::vector<DType>{DType::kF32} : std::vector<DType>{DType::kF32, DType::kBf16};
  std::vector<LoraSlot> parsed;
  for (const py::handle item : slots) {
    LoraSlot& slot = parsed.emplace_back();
    if (item.is_none()) continue;
    const auto fields = py::reinterpret_borrow<py::tuple>(item);
    const std::string prefix = "slots[" + std::to_string(parsed.size() - 1) + "].";
    for (size_t part = 0; part < kNumProjections; ++part) {
      const py::handle a = fields[2 * part], b = fields[2 * part + 1];
      if (a.is_none() && b.is_none()) continue;
      const std::string a_name = prefix + kSlotTensors[2 * part], b_name = prefix + kSlotTensors[2 * part + 1];
      if (a.is_none() || b.is_none()) {
        throw BindError{"invalid_value", (a.is_none() ? a_name : b_name) + " is missing: A and B come in pairs"};
      }
      const int64_t in = part == kDown ? shape.intermediate : shape.hidden,
                    out = part == kDown ? shape.hidden : shape.intermediate;
      LoraPair& pair = slot.pairs[part];
      pair.a = view_of(
          a, {.name = a_name.c_str(), .dtypes = dtypes, .shape = {shape.num_experts, -1, in}, .written = gradients});
      pair.b = view_of(b, {.name = b_name.c_str(),
                           .dtypes = dtypes,
                           .shape = {shape.num_experts, out, pair.a.shape[1]},
                           .written = gradients});
    }
    slot.scaling = fields[6].cast<float>();
    if (!(slot.scaling - slot.scaling == 0.0f))
      throw BindError{"invalid_value", prefix + "scaling is not a finite number"};
    slot.dropout = fields[7].cast<float>();
    slot.seed = fields[8].cast<uint64_t>();
    if (!(slot.dropout >= 0.0f && slot.dropout < 1.0f))
      throw BindError{"invalid_value", prefix + "dropout is " + std::to_string(slot.dropout) + ", expected [0, 1)"};
    if (!fields[9].is_none()) {
      const std::string name = prefix + "tokens";
      slot.tokens = view_of(fields[9], {.name = name.c_str(), .dtypes = {DType::kI64}, .shape = {num_tokens}});
    }
    slot.first_expert = fields[10].cast<int64_t>();
  }
  return parsed;
}

RoutedCall parse_call(const ExpertShape& shape, py::handle x, py::handle ids, py::handle weights,
                      const py::sequence& slots, py::handle token_slots) {
  RoutedCall call;
  call.x = view_of(x, {.name = "x", .dtypes = {DType::kF32, DType::kBf16}, .shape = {-1, shape.hidden}});
  const int64_t tokens = call.x.shape[0];
  call.ids = view_of(ids, {.name = "ids", .dtypes = {DType::kI32, DType::kI64}, .shape = {tokens, -1}});
  call.weights = view_of(weights, {.name = "weights", .dtypes = {DType::kF32}, .shape = {tokens, call.ids.shape[1]}});
  call.slots = parse_slots(slots, shape, tokens, false);
  if (!token_slots.is_none())
    call.token_slots = view_of(token_slots, {.name = "token_slots", .dtypes = {DType::kI32}, .shape = {tokens}});
  return call;
}

void add_slots(const std::vector<LoraSlot>& slots, const char* name, std::vector<NamedView>* views) {
  for (size_t i = 0; i < slots.size(); ++i) {
    for (int part = 0; part < kNumProjections; ++part) {
      const LoraPair& pair = slots[i].pairs[part];
      views->push_back({name, pair.a, static_cast<int>(i), kSlotTensors[2 * part]});
      views->push_back({name, pair.b, static_cast<int>(i), kSlotTensors[2 * part + 1]});
    }
  }
}

// All tensors that a call reads.
std::vector<NamedView> views_of(const RoutedCall& call) {
  std::vector<NamedView> views = {
      {"x", call.x}, {"ids", call.ids}, {"weights", call.weights}, {"token_slots", call.token_slots}};
  add_slots(call.slots, "", &views);
  return views;
}

// What calls on experts took since `take_engine_seconds`, without Python and their arguments; by calling thread.
thread_local double engine_seconds = 0;

template <class Call>
void run(Call&& call) {
  using Clock = std::chrono::steady_clock;
  Status status;
  {
    py::gil_scoped_release release;
    const auto start = Clock::now();
    status = call();
    engine_seconds += std::chrono::duration<double>(Clock::now() - start).count();
  }
  check(status);
}

void unpack_matrix(const ExpertLayer& layer, int64_t expert, Projection part, py::handle target) {
  const PackedShape shape = layer.shape_of(part);
  const bool bf16 = shape.format.encoding == Encoding::kBf16;
  const TensorRule rule{.name = kProjectionNames[part],
                        .dtypes = {bf16 ? DType::kBf16 : DType::kF32},
                        .shape = {shape.rows, shape.cols},
                        .contiguous = true,
                        .written = true};
  const TensorView out = view_of(target, rule);
  for (int node = 0; node < layer.num_nodes(); ++node) {
    const auto piece = layer.piece(expert, part, node);
    const int64_t first = piece.first * kBlockRows,
                  end = std::min(shape.rows, first + piece.blocks.blocks * kBlockRows);
    for (int64_t row = first; row < end; ++row) {
      for (int64_t col = 0; col < shape.cols; ++col) {
        const auto value = static_cast<float>(decode(shape, piece.blocks.data, row - first, col));
        if (bf16) {
          out.as<uint16_t>()[row * shape.cols + col] = float_to_bf16(value);
        } else {
          out.as<float>()[row * shape.cols + col] = value;
        }
      }
    }
  }
}

}  // namespace

void check(const Status& status) {
  if (!status.ok()) throw BindError{kind_name(status.code()), status.message()};
}

std::shared_ptr<Retained> NativeLayer::forward(py::handle x, py::handle ids, py::handle weights,
                                               const py::sequence& slots, py::handle token_slots, py::handle out,
                                               bool retain) const {
  const RoutedCall call = parse_call(layer_->shape(), x, ids, weights, slots, token_slots);
  const std::vector<int64_t> shape = {call.x.shape[0], call.x.shape[1]};
  const TensorView result =
      view_of(out, {.name = "out", .dtypes = {call.x.dtype, DType::kF32}, .shape = shape, .written = true});
  check_disjoint({{"out", result}}, views_of(call));
  const auto retained = retain ? std::make_shared<Retained>() : nullptr;
  run([&] { return kt::forward(engine(), call, result, retained.get()); });
  return retained;
}

void NativeLayer::backward(py::handle grad_out, py::handle x, py::handle ids, py::handle weights,
                           const py::sequence& slots, py::handle token_slots, py::handle x_grad,
                           py::handle weights_grad, const py::sequence& slot_grads,
                           const std::shared_ptr<Retained>& retained) const {
  const RoutedCall call = parse_call(layer_->shape(), x, ids, weights, slots, token_slots);
  const std::vector<int64_t> shape = {call.x.shape[0], call.x.shape[1]};
  const TensorView grad =
      view_of(grad_out, {.name = "grad_out", .dtypes = {DType::kF32, DType::kBf16}, .shape = shape});
  RoutedGradients gradients;
  gradients.x = view_of(
      x_grad, {.name = "gradient of x", .dtypes = {call.x.dtype, DType::kF32}, .shape = shape, .written = true});
  gradients.weights = view_of(weights_grad, {.name = "gradient of weights",
                                             .dtypes = {DType::kF32},
                                             .shape = {shape[0], call.ids.shape[1]},
                                             .written = true});
  gradients.slots = parse_slots(slot_grads, layer_->shape(), shape[0], true);
  if (gradients.slots.size() != call.slots.size()) throw BindError{"invalid_value", "one gradient slot for each slot"};
  for (size_t i = 0; i < call.slots.size(); ++i) {
    for (int part = 0; part < kNumProjections; ++part) {
      if (gradients.slots[i].pairs[part].rank() == call.slots[i].pairs[part].rank()) continue;
      throw BindError{"invalid_value",
                      "gradients of slots[" + std::to_string(i) + "]." + kProjectionNames[part] + " have another rank"};
    }
  }
  std::vector<NamedView> written = {{"gradient of x", gradients.x}, {"gradient of weights", gradients.weights}},
                         read = views_of(call);
  add_slots(gradients.slots, "gradient of ", &written);
  read.push_back({"grad_out", grad});
  check_disjoint(written, read);
  run([&] { return kt::backward(engine(), call, grad, gradients, retained.get()); });
}

void NativeLayer::combine(py::handle rows, py::handle row_of, py::handle weights, py::handle out) const {
  const std::vector<DType> floats{DType::kF32, DType::kBf16};
  PairRows call;
  call.rows = view_of(rows, {.name = "rows", .dtypes = {DType::kF32}, .shape = {-1, -1}});
  call.row_of = view_of(row_of, {.name = "row_of", .dtypes = {DType::kI64}, .shape = {-1, -1}});
  const int64_t tokens = call.row_of.shape[0];
  call.weights =
      view_of(weights, {.name = "weights", .dtypes = {DType::kF32}, .shape = {tokens, call.row_of.shape[1]}});
  const TensorView result =
      view_of(out, {.name = "out", .dtypes = floats, .shape = {tokens, call.rows.shape[1]}, .written = true});
  check_disjoint({{"out", result}}, {{"rows", call.rows}, {"row_of", call.row_of}, {"weights", call.weights}});
  run([&] { return combine_rows(*tiles_, num_threads_, call, result); });
}

void NativeLayer::check_expert(int64_t expert) const {
  if (expert >= 0 && expert < layer_->shape().num_experts) return;
  throw BindError{"invalid_value", "expert " + std::to_string(expert) + " is out of range; there are " +
                                       std::to_string(layer_->shape().num_experts)};
}

void NativeLayer::unpack(int64_t expert, py::handle gate, py::handle up, py::handle down) const {
  check_expert(expert);
  if (layer_->mlp().has_gate()) unpack_matrix(*layer_, expert, kGate, gate);
  unpack_matrix(*layer_, expert, kUp, up);
  unpack_matrix(*layer_, expert, kDown, down);
}

void NativeLayer::unpack_range(int64_t first, int64_t count, py::handle w13, py::handle w2) const {
  const auto [experts, hidden, inner] = layer_->shape();
  if (first < 0 || count < 1 || first >= experts || count > experts - first)
    throw BindError{"invalid_value", std::to_string(count) + " experts from expert " + std::to_string(first) +
                                         " on are not a range; there are " + std::to_string(experts)};
  TensorRule rule{.name = "w13",
                  .dtypes = {DType::kBf16},
                  .shape = {count, static_cast<int64_t>(layer_->mlp().inputs().size()) * inner, hidden},
                  .contiguous = true,
                  .written = true};
  UnpackedExperts out;
  out.gate_up = view_of(w13, rule);
  rule.name = "w2";
  rule.shape = {count, hidden, inner};
  out.down = view_of(w2, rule);
  check_disjoint({{"w13", out.gate_up}, {"w2", out.down}}, {});
  run([&] {
    kt::unpack(engine(), {first, count}, out);
    return Status();
  });
}

PieceBytes NativeLayer::piece_bytes(int64_t expert, int projection, int node) const {
  check_expert(expert);
  if (projection < 0 || projection >= kNumProjections || node < 0 || node >= layer_->num_nodes())
    throw BindError{"invalid_value", "no such projection or memory node"};
  const auto piece = layer_->piece(expert, static_cast<Projection>(projection), node);
  return {layer_, piece.blocks.data, piece.blocks.blocks * piece.blocks.shape.block_bytes()};
}

PieceBytes NativeLayer::bias_bytes(int64_t expert) const {
  check_expert(expert);
  const Projection first = layer_->mlp().projections().front();
  const float* bias = layer_->bias(expert, first);
  const int64_t bytes =
      bias ? reinterpret_cast<const uint8_t*>(layer_->bias(expert + 1, first)) - reinterpret_cast<const uint8_t*>(bias)
           : 0;
  return {layer_, reinterpret_cast<const uint8_t*>(bias), bytes};
}

std::vector<int64_t> NativeLayer::node_bytes() const {
  std::vector<int64_t> bytes;
  for (int node = 0; node < num_nodes(); ++node) bytes.push_back(layer_->node_bytes(node));
  return bytes;
}

void bind_layer(py::module_& module) {
  module.def("take_engine_seconds", [] { return std::exchange(engine_seconds, 0.0); });
  py::class_<Retained, std::shared_ptr<Retained>>(module, "Retained").def_property_readonly("bytes", &Retained::bytes);
  py::class_<PieceBytes>(module, "PieceBytes", py::buffer_protocol()).def_buffer([](const PieceBytes& piece) {
    return py::buffer_info(const_cast<uint8_t*>(piece.data), 1, "B", 1, {piece.bytes}, {1}, true);
  });
  py::class_<NativeLayer>(module, "Layer")
      .def("forward", &NativeLayer::forward, py::kw_only(), py::arg("x"), py::arg("ids"), py::arg("weights"),
           py::arg("slots"), py::arg("token_slots"), py::arg("out"), py::arg("retain"))
      .def("backward", &NativeLayer::backward, py::kw_only(), py::arg("grad_out"), py::arg("x"), py::arg("ids"),
           py::arg("weights"), py::arg("slots"), py::arg("token_slots"), py::arg("x_grad"), py::arg("weights_grad"),
           py::arg("slot_grads"), py::arg("retained"))
      .def("combine", &NativeLayer::combine)
      .def("unpack", &NativeLayer::unpack)
      .def("unpack_range", &NativeLayer::unpack_range)
      .def("piece_bytes", &NativeLayer::piece_bytes)
      .def("bias_bytes", &NativeLayer::bias_bytes)
      .def_property_readonly("format", &NativeLayer::format)
      .def_property_readonly("num_nodes", &NativeLayer::num_nodes)
      .def_property_readonly("node_bytes", &NativeLayer::node_bytes)
      .def_property_readonly("weight_bytes", &NativeLayer::weight_bytes)
      .def_property_readonly("resident_bytes", &NativeLayer::resident_bytes);
}

}  // namespace kt
