#include "bind/step.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/attention.h"
#include "bind/dlpack.h"
#include "bind/layer.h"
#include "kernels/registry.h"
#include "step/program.h"

namespace py = pybind11;

namespace kt {
namespace {

// The tensors of a table that Python hands over by name. All have the embedding's dtype.
class Tensors {
 public:
  Tensors(py::dict named, std::string prefix, DType dtype)
      : named_(std::move(named)), prefix_(std::move(prefix)), dtype_(dtype) {}

  TensorView operator()(const char* name, const std::vector<int64_t>& shape, bool written = false) const {
    const std::string full = prefix_ + name;
    return view_of(named_[name],
                   {.name = full.c_str(), .dtypes = {dtype_}, .shape = shape, .contiguous = true, .written = written});
  }
  TensorView optional(const char* name, const std::vector<int64_t>& shape) const {
    return named_[name].is_none() ? TensorView{} : (*this)(name, shape);
  }

 private:
  py::dict named_;
  std::string prefix_;
  DType dtype_;
};

// The LoRA pool in one layer: pairs of A and B by name, both or neither of them None.
class LoraTensors {
 public:
  LoraTensors(const Stack& stack, const py::dict& named, const std::string& prefix)
      : stack_(stack), prefix_(prefix), tensor_(named, prefix, stack.dtype()) {}

  // The shapes are those of a slot.
  void put(const char* name, std::vector<int64_t> a_shape, std::vector<int64_t> b_shape, TensorView* a,
           TensorView* b) const {
    a_shape.insert(a_shape.begin(), stack_.lora_slots);
    b_shape.insert(b_shape.begin(), stack_.lora_slots);
    const std::string a_name = std::string(name) + "_a", b_name = std::string(name) + "_b";
    *a = tensor_.optional(a_name.c_str(), a_shape);
    *b = tensor_.optional(b_name.c_str(), b_shape);
    if (a->present() != b->present()) {
      throw BindError{"invalid_value",
                      prefix_ + (a->present() ? b_name : a_name) + " is missing: A and B come in pairs"};
    }
  }

  LowRankPool dense(const char* name, int64_t in, std::initializer_list<int64_t> ends) const {
    LowRankPool pool;
    pool.parts = static_cast<int>(ends.size());
    std::copy(ends.begin(), ends.end(), pool.ends);
    put(name, {pool.parts * stack_.lora_rank, in}, {pool.ends[pool.parts - 1], stack_.lora_rank}, &pool.a, &pool.b);
    return pool;
  }

 private:
  const Stack& stack_;
  const std::string prefix_;
  const Tensors tensor_;
};

StackLora lora_of(const Stack& stack, const ExpertShape& experts, const py::object& given, const std::string& prefix) {
  StackLora lora;
  if (given.is_none()) return lora;
  const LoraTensors tensors(stack, py::reinterpret_borrow<py::dict>(given), prefix);
  const int64_t rank = stack.lora_rank, queries = stack.heads * stack.head_size;
  const int64_t keys = stack.key_heads * stack.head_size;
  lora.qkv = tensors.dense("qkv", stack.hidden(), {queries, queries + keys, queries + 2 * keys});
  lora.out = tensors.dense("out", queries, {stack.hidden()});
  tensors.put("gate_up", {experts.num_experts, 2 * rank, stack.hidden()},
              {experts.num_experts, 2 * experts.intermediate, rank}, &lora.gate_up_a, &lora.gate_up_b);
  tensors.put("down", {experts.num_experts, rank, experts.intermediate}, {experts.num_experts, stack.hidden(), rank},
              &lora.down_a, &lora.down_b);
  return lora;
}

StackLayer layer_of(const Stack& stack, const py::dict& named, int64_t index) {
  const Tensors tensor(named, "layers[" + std::to_string(index) + "].", stack.dtype());
  const int64_t hidden = stack.hidden(), size = stack.head_size;
  StackLayer layer;
  layer.experts = named["experts"].cast<const NativeLayer&>().layer();
  const ExpertShape& experts = layer.experts->shape();
  if (experts.hidden != hidden || stack.top_k > experts.num_experts) {
    throw BindError{"invalid_value", "layers[" + std::to_string(index) + "].experts has " +
                                         std::to_string(experts.num_experts) + " experts of hidden size " +
                                         std::to_string(experts.hidden) + "; expected at least " +
                                         std::to_string(stack.top_k) + " of " + std::to_string(hidden)};
  }
  const int64_t num_experts = stack.layers.empty() ? experts.num_experts : stack.layers[0].gate.shape[0];
  if (experts.num_experts != num_experts) {  // all layers share one buffer of router logits
    throw BindError{"invalid_value", "layers[" + std::to_string(index) + "].experts has " +
                                         std::to_string(experts.num_experts) + " experts; expected " +
                                         std::to_string(num_experts) + ", as layers[0]"};
  }
  layer.input_norm = tensor("input_norm", {hidden});
  layer.qkv = tensor("qkv", {stack.qkv_cols(), hidden});
  layer.qkv_bias = tensor.optional("qkv_bias", {stack.qkv_cols()});
  layer.query_norm = tensor("query_norm", {size});
  layer.key_norm = tensor("key_norm", {size});
  layer.keys = tensor("keys", {stack.layers.empty() ? -1 : stack.num_slots(), stack.key_heads, size}, true);
  layer.values = tensor("values", {layer.keys.shape[0], stack.key_heads, size}, true);
  layer.out = tensor("out", {hidden, stack.heads * size});
  layer.out_bias = tensor.optional("out_bias", {hidden});
  layer.post_norm = tensor("post_norm", {hidden});
  layer.gate = tensor("gate", {num_experts, hidden});
  layer.lora = lora_of(stack, experts, named["lora"], "layers[" + std::to_string(index) + "].lora.");
  return layer;
}

void check_sizes(const Stack& stack) {
  const auto fail = [](const std::string& what) { throw BindError{"invalid_value", what}; };
  if (stack.heads < 1 || stack.key_heads < 1 || stack.heads % stack.key_heads != 0) {
    fail("heads is " + std::to_string(stack.heads) + "; must be a multiple of key_heads, " +
         std::to_string(stack.key_heads));
  }
  if (stack.head_size < 2 || stack.head_size % 2 != 0)
    fail("head_size is " + std::to_string(stack.head_size) + "; must be even");
  if (stack.top_k < 1) fail("top_k is " + std::to_string(stack.top_k) + "; must be at least 1");
  if (stack.lora_slots < 0 || stack.lora_rank < 0 || (stack.lora_slots > 0) != (stack.lora_rank > 0)) {
    fail("lora_slots is " + std::to_string(stack.lora_slots) + " and lora_rank " + std::to_string(stack.lora_rank) +
         "; both are 0, or both are at least 1");
  }
}

// Of `rows` (first, rows, slot, rank, scaling) and `experts` (slot, rank, scaling).
using GivenRows = std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, float>>;
using GivenExperts = std::vector<std::tuple<int64_t, int64_t, float>>;

StepAdapters adapters_of(const GivenRows& rows, const GivenExperts& experts, const py::handle& token_slots,
                         int64_t tokens) {
  StepAdapters adapters;
  for (const auto& [first, count, slot, rank, scaling] : rows)
    adapters.rows.push_back({.first = first, .rows = count, .slot = slot, .rank = rank, .scaling = scaling});
  for (const auto& [slot, rank, scaling] : experts)
    adapters.experts.push_back({.slot = slot, .rank = rank, .scaling = scaling});
  if (!token_slots.is_none())
    adapters.token_slots = view_of(token_slots, {.name = "token_slots", .dtypes = {DType::kI32}, .shape = {tokens}});
  return adapters;
}

class NativeStep {
 public:
  NativeStep(const std::string& isa, int num_threads, const py::dict& table)
      : table_(table), program_(stack_of(table), tiles_of(isa), num_threads) {}

  std::vector<int64_t> run(py::handle ids, py::handle positions, py::handle slots, py::handle sequences,
                           py::handle table, const GivenRows& adapter_rows, const GivenExperts& expert_adapters,
                           py::handle token_slots, py::handle out) {
    const auto integers = [](const py::handle& tensor, const char* name, int64_t count) {
      return view_of(tensor, {.name = name, .dtypes = {DType::kI64}, .shape = {count}});
    };
    StepBatch batch;
    batch.ids = integers(ids, "ids", -1);
    const int64_t tokens = batch.ids.shape[0];
    batch.positions = integers(positions, "positions", tokens);
    batch.slots = integers(slots, "slots", tokens);
    batch.sequences = sequences_of(sequences, table);
    batch.adapters = adapters_of(adapter_rows, expert_adapters, token_slots, tokens);
    const TensorView result = view_of(
        out, {.name = "out", .dtypes = {program_.dtype()}, .shape = {tokens, program_.hidden()}, .written = true});
    std::vector<int64_t> refused;
    Status status;
    {
      const py::gil_scoped_release release;
      const std::lock_guard lock(in_use_);
      status = program_.run(batch, result, &refused);
    }
    check(status);
    return refused;
  }

  int64_t scratch_bytes() {
    const std::lock_guard lock(in_use_);
    return program_.scratch_bytes();
  }
  // Unless a batch is running.
  void free_scratch() {
    const std::unique_lock lock(in_use_, std::try_to_lock);
    if (lock) program_.free_scratch();
  }

 private:
  static const Tiles& tiles_of(const std::string& isa) {
    const Tiles* tiles = nullptr;
    check(find_tiles(isa, &tiles));
    return *tiles;
  }

  static Stack stack_of(const py::dict& table) {
    Stack stack{.heads = table["heads"].cast<int64_t>(),
                .key_heads = table["key_heads"].cast<int64_t>(),
                .head_size = table["head_size"].cast<int64_t>(),
                .top_k = table["top_k"].cast<int64_t>(),
                .normalises = table["normalises"].cast<bool>(),
                .epsilon = table["epsilon"].cast<float>(),
                .scaling = table["scaling"].cast<float>(),
                .lora_slots = table["lora_slots"].cast<int64_t>(),
                .lora_rank = table["lora_rank"].cast<int64_t>(),
                .embedding = view_of(table["embedding"],
                                     {.name = "embedding", .dtypes = {DType::kF32, DType::kBf16}, .shape = {-1, -1}}),
                .angles = {},
                .final_norm = {},
                .layers = {}};
    check_sizes(stack);
    const Tensors tensor(table, "", stack.dtype());
    stack.angles = tensor("angles", {-1, stack.head_size});
    stack.final_norm = tensor("final_norm", {stack.hidden()});
    int64_t index = 0;
    for (const py::handle layer : table["layers"])
      stack.layers.push_back(layer_of(stack, py::reinterpret_borrow<py::dict>(layer), index++));
    if (stack.layers.empty()) throw BindError{"invalid_value", "layers is empty"};
    return stack;
  }

  py::dict table_;  // owns the capsules, which keep the tensors alive
  Program program_;
  std::mutex in_use_;
};

}  // namespace

void bind_step(py::module_& module) {
  py::class_<NativeStep>(module, "Step")
      .def(py::init<const std::string&, int, const py::dict&>())
      .def("run", &NativeStep::run)
      .def("free_scratch", &NativeStep::free_scratch)
      .def_property_readonly("scratch_bytes", &NativeStep::scratch_bytes);
}

}  // namespace kt
