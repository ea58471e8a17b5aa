// kt_runtime._experts: the private native half of kt_runtime.experts. Tensors arrive as DLPack capsules; all errors
// leave as NativeError(kind, message), which the Python layer turns into the classes of kt_runtime.errors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bind/dlpack.h"
#include "kernels/registry.h"
#include "ops/forward.h"
#include "ops/routing.h"
#include "threads/pool.h"
#include "weights/loader.h"

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
    default:
      return "ok";
  }
}

void check(const Status& status) {
  if (!status.ok()) throw BindError{kind_name(status.code()), status.message()};
}

// Slots arrive as None or (gate_a, gate_b, up_a, up_b, down_a, down_b, scaling), pairs of capsules or of None.
std::vector<LoraSlot> parse_slots(const py::sequence& slots, const ExpertShape& shape, bool gradients) {
  static const char* const kNames[] = {"gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b"};
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
      const std::string a_name = prefix + kNames[2 * part], b_name = prefix + kNames[2 * part + 1];
      if (a.is_none() || b.is_none()) {
        throw BindError{"invalid_value", (a.is_none() ? a_name : b_name) + " is missing: A and B come in pairs"};
      }
      const int64_t in = part == kDown ? shape.intermediate : shape.hidden,
                    out = part == kDown ? shape.hidden : shape.intermediate;
      LoraPair& pair = slot.pairs[part];
      pair.a = view_of(a, {a_name.c_str(), dtypes, {shape.num_experts, -1, in}, false});
      pair.b = view_of(b, {b_name.c_str(), dtypes, {shape.num_experts, out, pair.a.shape[1]}, false});
    }
    slot.scaling = fields[6].cast<float>();
    if (!(slot.scaling - slot.scaling == 0.0f))
      throw BindError{"invalid_value", prefix + "scaling is not a finite number"};
  }
  return parsed;
}

RoutedCall parse_call(const ExpertShape& shape, py::handle x, py::handle ids, py::handle weights,
                      const py::sequence& slots, py::handle token_slots) {
  RoutedCall call;
  call.x = view_of(x, {"x", {DType::kF32, DType::kBf16}, {-1, shape.hidden}});
  const int64_t tokens = call.x.shape[0];
  call.ids = view_of(ids, {"ids", {DType::kI32, DType::kI64}, {tokens, -1}});
  call.weights = view_of(weights, {"weights", {DType::kF32}, {tokens, call.ids.shape[1]}});
  call.slots = parse_slots(slots, shape, false);
  if (!token_slots.is_none()) call.token_slots = view_of(token_slots, {"token_slots", {DType::kI32}, {tokens}});
  return call;
}

// One layer with the instruction set and thread count of its store.
class NativeLayer {
 public:
  NativeLayer(std::shared_ptr<ExpertLayer> layer, const Tiles* tiles, int num_threads)
      : layer_(std::move(layer)), tiles_(tiles), num_threads_(num_threads) {}

  void forward(py::handle x, py::handle ids, py::handle weights, const py::sequence& slots, py::handle token_slots,
               py::handle out) const {
    const RoutedCall call = parse_call(layer_->shape(), x, ids, weights, slots, token_slots);
    const TensorView result = view_of(out, {"out", {call.x.dtype}, {call.x.shape[0], call.x.shape[1]}});
    run([&] { return kt::forward(engine(), call, result); });
  }

  void backward(py::handle grad_out, py::handle x, py::handle ids, py::handle weights, const py::sequence& slots,
                py::handle token_slots, py::handle x_grad, py::handle weights_grad,
                const py::sequence& slot_grads) const {
    const RoutedCall call = parse_call(layer_->shape(), x, ids, weights, slots, token_slots);
    const std::vector<int64_t> shape = {call.x.shape[0], call.x.shape[1]};
    const TensorView grad = view_of(grad_out, {"grad_out", {DType::kF32, DType::kBf16}, shape});
    RoutedGradients gradients;
    gradients.x = view_of(x_grad, {"gradient of x", {call.x.dtype}, shape});
    gradients.weights = view_of(weights_grad, {"gradient of weights", {DType::kF32}, {shape[0], call.ids.shape[1]}});
    gradients.slots = parse_slots(slot_grads, layer_->shape(), true);
    if (gradients.slots.size() != call.slots.size())
      throw BindError{"invalid_value", "one gradient slot for each slot"};
    for (size_t i = 0; i < call.slots.size(); ++i) {
      for (int part = 0; part < kNumProjections; ++part) {
        if (gradients.slots[i].pairs[part].rank() == call.slots[i].pairs[part].rank()) continue;
        throw BindError{"invalid_value", "gradients of slots[" + std::to_string(i) + "]." + kProjectionNames[part] +
                                             " have another rank"};
      }
    }
    run([&] { return kt::backward(engine(), call, grad, gradients); });
  }

  void unpack(int64_t expert, py::handle gate, py::handle up, py::handle down) const {
    const ExpertShape& shape = layer_->shape();
    if (expert < 0 || expert >= shape.num_experts) {
      throw BindError{"invalid_value", "expert " + std::to_string(expert) + " is out of range; there are " +
                                           std::to_string(shape.num_experts)};
    }
    const auto rule = [](const char* name, int64_t rows, int64_t cols) {
      return TensorRule{name, {DType::kBf16}, {rows, cols}, true};
    };
    unpack_bf16(layer_->gate(expert), view_of(gate, rule("gate", shape.intermediate, shape.hidden)).as<uint16_t>());
    unpack_bf16(layer_->up(expert), view_of(up, rule("up", shape.intermediate, shape.hidden)).as<uint16_t>());
    unpack_bf16(layer_->down(expert), view_of(down, rule("down", shape.hidden, shape.intermediate)).as<uint16_t>());
  }

  int64_t weight_bytes() const { return layer_->weight_bytes(); }
  int64_t resident_bytes() const { return layer_->resident_bytes(); }
  py::buffer_info bytes() const {
    return py::buffer_info(const_cast<void*>(layer_->bytes()), 1, "B", 1, {layer_->resident_bytes()}, {1}, true);
  }

 private:
  Engine engine() const { return {*layer_, *tiles_, num_threads_}; }

  template <class Call>
  static void run(Call&& call) {
    Status status;
    {
      py::gil_scoped_release release;
      status = call();
    }
    check(status);
  }

  std::shared_ptr<ExpertLayer> layer_;
  const Tiles* tiles_;
  int num_threads_;
};

std::shared_ptr<Checkpoint> open_checkpoint(const std::string& directory) {
  std::shared_ptr<Checkpoint> checkpoint;
  Status status;
  {
    py::gil_scoped_release release;
    status = Checkpoint::open(directory, &checkpoint);
  }
  check(status);
  return checkpoint;
}

NativeLayer load(const Checkpoint& checkpoint, const std::string& prefix, int64_t num_experts, int64_t hidden,
                 int64_t intermediate, const std::string& isa, int num_threads) {
  constexpr int64_t kLimit = int64_t{1} << 24;
  for (const int64_t size : {num_experts, hidden, intermediate}) {
    if (size < 1 || size > kLimit)
      throw BindError{"invalid_value", "expert shape has size " + std::to_string(size) + "; allowed: 1 to 2^24"};
  }
  if (num_threads < 1)
    throw BindError{"invalid_value", "num_threads is " + std::to_string(num_threads) + "; allowed: 1 or more"};
  const Tiles* tiles = nullptr;
  check(find_tiles(isa, &tiles));
  std::shared_ptr<ExpertLayer> layer;
  Status status;
  {
    py::gil_scoped_release release;
    status = load_layer(checkpoint, prefix, {num_experts, hidden, intermediate}, num_threads, &layer);
  }
  check(status);
  return {std::move(layer), tiles, num_threads};
}

std::string resolve_isa(const std::string& name) {
  const Tiles* tiles = nullptr;
  check(find_tiles(name, &tiles));
  return tiles->name;
}

}  // namespace
}  // namespace kt

PYBIND11_MODULE(_experts, module) {
  using kt::NativeLayer;
  static PyObject* native_error = PyErr_NewException("kt_runtime._experts.NativeError", PyExc_RuntimeError, nullptr);
  module.attr("NativeError") = py::handle(native_error);
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const kt::BindError& bind_error) {
      PyErr_SetObject(native_error, py::make_tuple(bind_error.kind, bind_error.message).ptr());
    }
  });

  module.def("available_isas", [] {
    std::vector<std::string> names;
    for (const kt::Tiles* tiles : kt::available_tiles()) names.emplace_back(tiles->name);
    return names;
  });
  module.def("resolve_isa", &kt::resolve_isa, py::arg("name"));
  module.def("default_num_threads", &kt::default_num_threads);
  py::class_<kt::Checkpoint, std::shared_ptr<kt::Checkpoint>>(module, "Checkpoint");
  module.def("open_checkpoint", &kt::open_checkpoint, py::arg("directory"));
  module.def("load_layer", &kt::load);
  py::class_<NativeLayer>(module, "Layer", py::buffer_protocol())
      .def("forward", &NativeLayer::forward)
      .def("backward", &NativeLayer::backward)
      .def("unpack", &NativeLayer::unpack)
      .def_property_readonly("weight_bytes", &NativeLayer::weight_bytes)
      .def_property_readonly("resident_bytes", &NativeLayer::resident_bytes)
      .def_buffer([](const NativeLayer& layer) { return layer.bytes(); });
}
