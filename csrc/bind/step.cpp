#include <pybind11/stl.h>

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bind/attention.h"
#include "bind/binders.h"
#include "bind/dlpack.h"
#include "bind/layer.h"
#include "bind/ranks.h"
#include "kernels/registry.h"
#include "ops/delta/delta_rows.h"
#include "step/program.h"

namespace py = pybind11;

namespace kt {
namespace {

// The tensors of a part of the table that Python hands over by name. All have the embedding's dtype.
class Tensors {
 public:
  Tensors(py::dict named, std::string prefix, DType dtype)
      : named_(std::move(named)), prefix_(std::move(prefix)), dtype_(dtype) {}

  bool has(const std::string& name) const { return named_.contains(name.c_str()) && !named_[name.c_str()].is_none(); }
  TensorView operator()(const std::string& name, const std::vector<int64_t>& shape, bool written = false) const {
    return read(name, shape, dtype_, written);
  }
  TensorView read(const std::string& name, const std::vector<int64_t>& shape, DType dtype, bool written = false) const {
    return read(name, shape, std::vector<DType>{dtype}, written);
  }
  TensorView read(const std::string& name, const std::vector<int64_t>& shape, const std::vector<DType>& dtypes,
                  bool written = false) const {
    const std::string full = prefix_ + name;
    return view_of(named_[name.c_str()],
                   {.name = full.c_str(), .dtypes = dtypes, .shape = shape, .contiguous = true, .written = written});
  }
  // A linear layer's matrix, also a packed one.
  void read_weight(const std::string& name, const std::vector<int64_t>& shape, StackLinear* layer) const {
    const py::object value = named_[name.c_str()];
    if (!py::isinstance<PackedMatrix>(value)) {
      layer->weight = (*this)(name, shape);
      return;
    }
    layer->packed = value.cast<std::shared_ptr<PackedMatrix>>();
    layer->weight.ndim = 2;
    layer->weight.shape[0] = layer->packed->rows(), layer->weight.shape[1] = layer->packed->cols();
    for (int dim = 0; dim < 2; ++dim) {
      if (shape[static_cast<size_t>(dim)] >= 0 && layer->weight.shape[dim] != shape[static_cast<size_t>(dim)])
        throw BindError{"invalid_value", prefix_ + name + " has shape " + shape_text(layer->weight) +
                                             "; expected size " + std::to_string(shape[static_cast<size_t>(dim)]) +
                                             " in dimension " + std::to_string(dim)};
    }
  }
  TensorView optional(const std::string& name, const std::vector<int64_t>& shape) const {
    return has(name) ? (*this)(name, shape) : TensorView{};
  }
  // A part of this part; without tensors if it is None.
  Tensors part(const std::string& name) const {
    return {has(name) ? named_[name.c_str()].cast<py::dict>() : py::dict(), prefix_ + name + ".", dtype_};
  }
  bool flag(const std::string& name, bool otherwise) const {
    return has(name) ? named_[name.c_str()].cast<bool>() : otherwise;
  }
  py::object value(const std::string& name) const { return named_[name.c_str()]; }
  const std::string& prefix() const { return prefix_; }

 private:
  py::dict named_;
  std::string prefix_;
  DType dtype_;
};

[[noreturn]] void fail(const std::string& what) { throw BindError{"invalid_value", what}; }

// The stack's dtype, or float32.
std::vector<DType> or_float32(const Stack& stack) {
  if (stack.dtype() == DType::kF32) return {DType::kF32};
  return {stack.dtype(), DType::kF32};
}

// The router's matrix is multiplied in float32 where experts are chosen in groups; SGLang keeps GLM's so.
std::vector<DType> gate_types(const Stack& stack) {
  return stack.groups ? or_float32(stack) : std::vector<DType>{stack.dtype()};
}

// A layer of the table.
class LayerReader {
 public:
  LayerReader(const Stack& stack, const py::dict& named, int64_t index)
      : stack_(stack),
        tensor_(named, "layers[" + std::to_string(index) + "].", stack.dtype()),
        lora_(tensor_.part("lora")) {}

  StackLayer layer() const {
    StackLayer layer;
    layer.input_norm = tensor_("input_norm", {stack_.hidden()});
    layer.post_norm = tensor_("post_norm", {stack_.hidden()});
    const Tensors attention = tensor_.part("attention");
    if (attention.has("by_key_head")) {  // no other kind has it
      layer.attention = gated_delta(attention);
    } else if (is_latent(attention)) {
      layer.attention = latent(attention);
    } else {
      layer.attention = grouped_query(attention);
    }
    if (tensor_.has("mlp")) layer.mlp = gated_mlp(tensor_.part("mlp"));
    if (tensor_.has("routed")) layer.routed = routed(tensor_.part("routed"));
    if (!layer.mlp.present() && !layer.routed.present()) fail(tensor_.prefix() + "mlp and routed are both missing");
    return layer;
  }

 private:
  bool is_latent(const Tensors& attention) const {
    const bool found = attention.has("latent_norm");
    const StackLayer* first = stack_.attending();
    if (first && found != std::holds_alternative<Latent>(first->attention)) {
      fail(attention.prefix() + "latent_norm: the attention is of another kind than that of layers[" +
           std::to_string(first - stack_.layers.data()) + "]");
    }
    return found;
  }

  // A size of the keys of the first layer that has some; -1, which is any, for that layer itself.
  int64_t key_size(int dim) const { return stack_.attending() ? stack_.keys().shape[dim] : -1; }

  GroupedQuery grouped_query(const Tensors& tensor) const {
    const int64_t rotated = stack_.angles.shape[1], hidden = stack_.hidden(), heads = stack_.heads;
    GroupedQuery attention;
    attention.keys = tensor("keys", {key_size(0), key_size(1), key_size(2)}, true);
    const int64_t key_heads = attention.keys.shape[1], size = attention.keys.shape[2];
    if (size < rotated) {
      fail(tensor.prefix() + "keys has heads of " + std::to_string(size) + " elements; the angles rotate " +
           std::to_string(rotated));
    }
    if (key_heads < 1 || heads % key_heads != 0) {
      fail("heads is " + std::to_string(heads) + "; must be a multiple of the key heads, " + std::to_string(key_heads));
    }
    attention.values = tensor("values", {attention.keys.shape[0], key_heads, size}, true);
    const int64_t queries = heads * size, keys = key_heads * size;
    attention.is_gated = tensor.flag("is_gated", false);
    attention.query_norm = norm(tensor, "query_norm", size, queries * stack_.ranks());
    attention.key_norm = norm(tensor, "key_norm", size, keys * stack_.ranks());
    const int64_t with_gates = queries * (attention.is_gated ? 2 : 1);
    attention.qkv = linear(tensor, "qkv", hidden, {with_gates, with_gates + keys, with_gates + 2 * keys});
    attention.out = linear(tensor, "out", queries * stack_.ranks(), {hidden / stack_.ranks()});
    if (tensor.has("sinks")) attention.sinks = tensor.read("sinks", {heads}, DType::kF32);
    attention.window = tensor.value("window").cast<int64_t>();
    if (attention.window < 0)
      fail(tensor.prefix() + "window is " + std::to_string(attention.window) + "; allowed: 0 or more");
    attention.rotates = tensor.flag("rotates", true);
    attention.norms_last = tensor.flag("norms_last", false);
    attention.is_chunked = tensor.flag("is_chunked", false);
    if (tensor.has("temperatures")) read_temperatures(tensor, &attention);
    check_gates(tensor.prefix(), attention);
    return attention;
  }

  // Gates lie between the queries of a token's heads.
  void check_gates(const std::string& prefix, const GroupedQuery& attention) const {
    if (!attention.is_gated) return;
    const TensorView& norm = attention.query_norm;
    if (norm.present() && norm.shape[0] != attention.keys.shape[2]) {
      fail(prefix + "query_norm has shape [" + std::to_string(norm.shape[0]) + "]; with gates expected [" +
           std::to_string(attention.keys.shape[2]) + "], the elements of a head");
    }
    if (attention.temperatures.present()) fail(prefix + "temperatures: a layer with gates has none");
  }

  // `kept_inputs` and `states` say the number of slots, the channels, and the sizes of heads.
  GatedDelta gated_delta(const Tensors& tensor) const {
    const GatedDelta* first = stack_.delta();
    GatedDelta delta;
    TensorView& states = delta.kept.states;
    const auto size = [&](int dim) { return first ? first->kept.states.shape[dim] : -1; };
    states = tensor.read("states", {size(0), size(1), size(2), size(3)}, DType::kF32, true);
    delta.shape = {.key_heads = tensor.value("key_heads").cast<int64_t>(),
                   .value_heads = states.shape[1],
                   .key_size = states.shape[2],
                   .value_size = states.shape[3]};
    if (delta.shape.key_heads < 1 || delta.shape.value_heads % delta.shape.key_heads != 0 ||
        (first && first->shape.key_heads != delta.shape.key_heads)) {
      fail(tensor.prefix() + "key_heads is " + std::to_string(delta.shape.key_heads) + "; states has " +
           std::to_string(delta.shape.value_heads) +
           " heads of values, which must be a multiple of it, the same one in all layers");
    }
    const int64_t channels = delta.shape.channels(), heads = delta.shape.value_heads, hidden = stack_.hidden();
    delta.filter = tensor("filter", {channels, -1});
    const int64_t taps = delta.filter.shape[1];
    if (taps < 1 || taps > kMostTaps) {
      fail(tensor.prefix() + "filter has " + std::to_string(taps) + " taps; allowed: 1 to " +
           std::to_string(kMostTaps));
    }
    delta.kept.inputs = tensor("kept_inputs", {states.shape[0], channels, taps - 1}, true);
    delta.log_rate = tensor.read("log_rate", {heads}, or_float32(stack_));
    delta.bias = tensor.read("bias", {heads}, or_float32(stack_));
    delta.norm = tensor("norm", {delta.shape.value_size});
    delta.by_key_head = tensor.value("by_key_head").cast<bool>();
    const int64_t all = channels + delta.results();
    delta.inputs =
        delta.by_key_head ? linear(tensor, "inputs", hidden, {all}) : linear(tensor, "inputs", hidden, {channels, all});
    delta.gates = delta.by_key_head ? linear(tensor, "gates", hidden, {2 * heads})
                                    : linear(tensor, "gates", hidden, {heads, 2 * heads});
    delta.out = linear(tensor, "out", delta.results() * stack_.ranks(), {hidden / stack_.ranks()});
    return delta;
  }

  // One for each position, at the least.
  void read_temperatures(const Tensors& tensor, GroupedQuery* attention) const {
    const int64_t every = tensor.value("temperature_every").cast<int64_t>();
    if (every < 1) fail(tensor.prefix() + "temperature_every is " + std::to_string(every) + "; must be at least 1");
    attention->temperature_every = every;
    attention->temperatures = tensor.read("temperatures", {stack_.angles.shape[0] / every + 1}, DType::kF32);
  }

  // Of each head, or of `all` elements together; absent if it is None.
  TensorView norm(const Tensors& tensor, const std::string& name, int64_t size, int64_t all) const {
    const TensorView weight = tensor.optional(name, {-1});
    if (weight.present() && weight.shape[0] != size && weight.shape[0] != all) {
      fail(tensor.prefix() + name + " has shape [" + std::to_string(weight.shape[0]) + "]; expected [" +
           std::to_string(size) + "] or [" + std::to_string(all) + "]");
    }
    return weight;
  }

  Latent latent(const Tensors& tensor) const {
    const int64_t rope = stack_.angles.shape[1], hidden = stack_.hidden(), heads = stack_.heads;
    Latent attention;
    attention.latent_norm = tensor("latent_norm", {stack_.attending() ? key_size(2) - rope : -1});
    const int64_t size = attention.latent();
    attention.top_k = tensor.value("top_k").cast<int64_t>();
    read_latent_keys(tensor, size + rope, &attention);
    attention.key_heads = tensor("key_heads", {heads, size, -1});
    attention.value_heads = tensor("value_heads", {heads, -1, size});
    attention.query_norm = tensor.optional("query_norm", {-1});
    const int64_t rank = attention.rank(), kept = rank + size + rope, nope = attention.nope();
    attention.compress =
        rank > 0 ? linear(tensor, "compress", hidden, {rank, kept}) : linear(tensor, "compress", hidden, {kept});
    attention.query = linear(tensor, "query", rank > 0 ? rank : hidden, {heads * (nope + rope)});
    attention.heads_lora = pool("kv_b", size, {heads * (nope + attention.value())});
    attention.out = linear(tensor, "out", heads * attention.value() * stack_.ranks(), {hidden / stack_.ranks()});
    if (tensor.has("indexer")) read_indexer(tensor.part("indexer"), &attention);
    return attention;
  }

  // The pool's rows: latents and rotary keys, then perhaps index keys, which `Indexer::keys` sees.
  void read_latent_keys(const Tensors& tensor, int64_t size, Latent* attention) const {
    const bool is_first = stack_.attending() == nullptr;
    if (attention->top_k < 0 || (!is_first && attention->top_k != stack_.top_keys()))
      fail(tensor.prefix() + "top_k is " + std::to_string(attention->top_k) +
           "; must be 0 or more, and the same in all layers");
    if (attention->top_k > 0 && is_first && !tensor.has("indexer"))
      fail(tensor.prefix() + "indexer is missing: the first layer with top_k has one");
    attention->keys = tensor("keys", {key_size(0), 1, attention->top_k > 0 ? -1 : size}, true);
    if (attention->keys.shape[2] < size)
      fail(tensor.prefix() + "keys has rows of " + std::to_string(attention->keys.shape[2]) +
           " elements; expected at least " + std::to_string(size));
    attention->indexer.keys = attention->keys;
    attention->keys.shape[2] = size;
  }

  void read_indexer(const Tensors& tensor, Latent* attention) const {
    Indexer& indexer = attention->indexer;
    const int64_t rope = stack_.angles.shape[1], first = attention->keys.shape[2];
    const int64_t size = indexer.keys.shape[2] - first;
    if (attention->top_k < 1 || attention->rank() < 1 || size < rope)
      fail(tensor.prefix() + "query: an indexer needs top_k, compressed queries, and at least " + std::to_string(rope) +
           " elements of each row of keys; there are " + std::to_string(size));
    indexer.key = tensor("key", {size, stack_.hidden()});
    indexer.weights = tensor.read("weights", {-1, stack_.hidden()}, DType::kF32);
    indexer.query = tensor("query", {indexer.heads() * size, attention->rank()});
    indexer.norm_weight = tensor.read("norm_weight", {size}, DType::kF32);
    indexer.norm_bias = tensor.read("norm_bias", {size}, DType::kF32);
    indexer.top_k = attention->top_k;
    indexer.interleaved = tensor.flag("interleaved", false);
    TensorView keys = indexer.keys;
    keys.data = keys.as<char>() + first * dtype_bytes(keys.dtype);
    keys.ndim = 2;
    keys.shape[1] = size;
    keys.strides[1] = 1;
    indexer.keys = keys;
  }

  GatedMlp gated_mlp(const Tensors& tensor) const {
    GatedMlp mlp;
    const int64_t rows = stack_.hidden() / stack_.ranks();
    tensor.read_weight("down", {rows, -1}, &mlp.down);
    const int64_t intermediate = mlp.down.weight.shape[1], own = intermediate / stack_.ranks();
    if (own * stack_.ranks() != intermediate) {
      fail(tensor.prefix() + "down has " + std::to_string(intermediate) + " columns; must be a multiple of the " +
           std::to_string(stack_.ranks()) + " ranks");
    }
    mlp.gate_up = linear(tensor, "gate_up", stack_.hidden(), {own, 2 * own}, "mlp_gate_up");
    mlp.down = linear(tensor, "down", intermediate, {rows}, "mlp_down");
    mlp.gate = tensor.optional("gate", {1, stack_.hidden()});
    return mlp;
  }

  RoutedExperts routed(const Tensors& tensor) const {
    const int64_t hidden = stack_.hidden(), rank = stack_.lora_rank;
    RoutedExperts routed;
    const py::object experts = tensor.value("experts");
    routed.layer = experts.cast<const NativeLayer&>().layer();
    const ExpertShape& shape = routed.layer->shape();
    const int64_t all = shape.num_experts * stack_.ranks();
    if (shape.hidden != hidden || stack_.top_k > all) {
      fail(tensor.prefix() + "experts has " + std::to_string(all) + " experts of hidden size " +
           std::to_string(shape.hidden) + "; expected at least " + std::to_string(stack_.top_k) + " of " +
           std::to_string(hidden));
    }
    if (stack_.groups) check_groups(tensor.prefix(), *stack_.groups, all);
    routed.gate = tensor.read("gate", {all, hidden}, gate_types(stack_));
    routed.gate_bias = tensor.optional("gate_bias", {all});
    if (routed.gate_bias.present() && stack_.groups) fail(tensor.prefix() + "gate_bias: experts are chosen in groups");
    if (tensor.has("bias")) routed.bias = tensor.read("bias", {all}, DType::kF32);
    std::tie(routed.gate_up_a, routed.gate_up_b) =
        pair("gate_up", {shape.num_experts, 2 * rank, hidden}, {shape.num_experts, 2 * shape.intermediate, rank});
    std::tie(routed.down_a, routed.down_b) =
        pair("down", {shape.num_experts, rank, shape.intermediate}, {shape.num_experts, hidden, rank});
    return routed;
  }

  void check_groups(const std::string& prefix, const GroupedRouting& routing, int64_t experts) const {
    if (routing.groups >= 1 && experts % routing.groups == 0 && routing.top_groups >= 1 &&
        routing.top_groups <= routing.groups && stack_.top_k <= routing.top_groups * (experts / routing.groups)) {
      return;
    }
    fail(prefix + "experts has " + std::to_string(experts) + " experts; " + std::to_string(stack_.top_k) +
         " of them can't be chosen from " + std::to_string(routing.top_groups) + " of " +
         std::to_string(routing.groups) + " groups");
  }

  // A linear layer with as many columns of its result as the last of `ends`, the ends of LoRA's parts.
  StackLinear linear(const Tensors& tensor, const std::string& name, int64_t in, std::initializer_list<int64_t> ends,
                     const char* lora_name = nullptr) const {
    const int64_t out = *(ends.end() - 1);
    StackLinear layer;
    tensor.read_weight(name, {out, in}, &layer);
    layer.bias = tensor.optional(name + "_bias", {out});
    layer.lora = pool(lora_name ? lora_name : name, in, ends);
    return layer;
  }

  LowRankPool pool(const std::string& name, int64_t in, std::initializer_list<int64_t> ends) const {
    LowRankPool pool;
    pool.parts = static_cast<int>(ends.size());
    std::copy(ends.begin(), ends.end(), pool.ends);
    std::tie(pool.a, pool.b) =
        pair(name, {pool.parts * stack_.lora_rank, in}, {pool.ends[pool.parts - 1], stack_.lora_rank});
    return pool;
  }

  // A and B in the LoRA pool, both or neither of them None. The shapes are those of a slot.
  std::pair<TensorView, TensorView> pair(const std::string& name, std::vector<int64_t> a_shape,
                                         std::vector<int64_t> b_shape) const {
    a_shape.insert(a_shape.begin(), stack_.lora_slots);
    b_shape.insert(b_shape.begin(), stack_.lora_slots);
    const TensorView a = lora_.optional(name + "_a", a_shape), b = lora_.optional(name + "_b", b_shape);
    if (a.present() != b.present())
      fail(lora_.prefix() + name + (a.present() ? "_b" : "_a") + " is missing: A and B come in pairs");
    return {a, b};
  }

  const Stack& stack_;
  const Tensors tensor_, lora_;
};

void check_sizes(const Stack& stack) {
  if (stack.heads < 1) fail("heads is " + std::to_string(stack.heads) + "; must be at least 1");
  if (stack.top_k < 1) fail("top_k is " + std::to_string(stack.top_k) + "; must be at least 1");
  if (stack.weighs_input && stack.top_k != 1)
    fail("top_k is " + std::to_string(stack.top_k) +
         "; with weighs_input it must be 1: an expert's input has one weight");
  if (stack.hidden() % stack.ranks() != 0) {
    fail("embedding has " + std::to_string(stack.hidden()) + " columns; must be a multiple of the " +
         std::to_string(stack.ranks()) + " ranks");
  }
  if (stack.chunk < 0) fail("chunk is " + std::to_string(stack.chunk) + "; must be at least 1, or 0 for none");
  const int64_t rotated = stack.angles.shape[1];
  if (rotated < 2 || rotated % 2 != 0) fail("angles has " + std::to_string(rotated) + " columns; must be even");
  if (stack.lora_slots < 0 || stack.lora_rank < 0 || (stack.lora_slots > 0) != (stack.lora_rank > 0)) {
    fail("lora_slots is " + std::to_string(stack.lora_slots) + " and lora_rank " + std::to_string(stack.lora_rank) +
         "; both are 0, or both are at least 1");
  }
}

// Which token ids the ranks have.
void read_ids(const py::dict& table, Stack* stack) {
  if (!stack->exchange) return;
  const int64_t rows = stack->embedding.shape[0], rank = stack->exchange->rank();
  stack->vocabulary = table["vocabulary"].cast<int64_t>();
  stack->ids_per_rank = table["ids_per_rank"].cast<int64_t>();
  const int64_t own = std::min(stack->ids_per_rank, stack->vocabulary - rank * stack->ids_per_rank);
  if (rows < own || stack->vocabulary < 1 || stack->vocabulary > stack->ranks() * stack->ids_per_rank) {
    fail("embedding has " + std::to_string(rows) + " rows; vocabulary is " + std::to_string(stack->vocabulary) +
         ", ids_per_rank " + std::to_string(stack->ids_per_rank) + ", and this is rank " + std::to_string(rank) +
         " of " + std::to_string(stack->ranks()));
  }
}

// Of (groups, top_groups, is_sigmoid, scaling), or None.
std::optional<GroupedRouting> groups_of(const py::object& given, bool normalises) {
  if (given.is_none()) return {};
  const auto [groups, top_groups, is_sigmoid, scaling] = given.cast<std::tuple<int64_t, int64_t, bool, float>>();
  return GroupedRouting{.score = is_sigmoid ? RouterScore::kSigmoid : RouterScore::kSoftmax,
                        .groups = groups,
                        .top_groups = top_groups,
                        .normalises = normalises,
                        .scaling = scaling};
}

// Of `rows` (first, rows, slot, rank, scaling) and `experts` (slot, rank, scaling).
void read_adapters(const py::iterable& rows, const py::iterable& experts, const py::handle& token_slots, int64_t tokens,
                   StepAdapters* adapters) {
  adapters->rows.clear();
  adapters->experts.clear();
  for (const py::handle row : rows) {
    const auto [first, count, slot, rank, scaling] = row.cast<std::tuple<int64_t, int64_t, int64_t, int64_t, float>>();
    adapters->rows.push_back({.first = first, .rows = count, .slot = slot, .rank = rank, .scaling = scaling});
  }
  for (const py::handle expert : experts) {
    const auto [slot, rank, scaling] = expert.cast<std::tuple<int64_t, int64_t, float>>();
    adapters->experts.push_back({.slot = slot, .rank = rank, .scaling = scaling});
  }
  adapters->token_slots = {};
  if (!token_slots.is_none())
    adapters->token_slots = view_of(token_slots, {.name = "token_slots", .dtypes = {DType::kI32}, .shape = {tokens}});
}

class NativeStep {
 public:
  NativeStep(const std::string& isa, int num_threads, const py::dict& table)
      : table_(table), program_(stack_of(table), tiles_of(isa), num_threads) {}

  std::vector<int64_t> run(py::handle ids, py::handle positions, py::handle slots, py::handle sequences,
                           py::handle table, py::handle states, const py::iterable& adapter_rows,
                           const py::iterable& expert_adapters, py::handle token_slots, py::handle out,
                           py::handle routes) {
    const auto integers = [](const py::handle& tensor, const char* name, int64_t count) {
      return view_of(tensor, {.name = name, .dtypes = {DType::kI64}, .shape = {count}});
    };
    static thread_local StepBatch batch;  // keeps its memory
    batch.ids = integers(ids, "ids", -1);
    const int64_t tokens = batch.ids.shape[0];
    batch.positions = integers(positions, "positions", tokens);
    batch.slots = integers(slots, "slots", tokens);
    read_sequences(sequences, table, &batch.sequences);
    batch.states = states.is_none() ? TensorView{} : integers(states, "states", -1);
    read_adapters(adapter_rows, expert_adapters, token_slots, tokens, &batch.adapters);
    const TensorView result = view_of(
        out, {.name = "out", .dtypes = {program_.dtype()}, .shape = {tokens, program_.hidden()}, .written = true});
    batch.routes = {};
    if (!routes.is_none()) {
      batch.routes = view_of(routes, {.name = "routes",
                                      .dtypes = {DType::kI32},
                                      .shape = {program_.routed_layers(), tokens, program_.top_k()},
                                      .contiguous = true,
                                      .written = true});
    }
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
    const bool normalises = table["normalises"].cast<bool>();
    Stack stack{.heads = table["heads"].cast<int64_t>(),
                .top_k = table["top_k"].cast<int64_t>(),
                .normalises = normalises,
                .groups = groups_of(table["groups"], normalises),
                .epsilon = table["epsilon"].cast<float>(),
                .scaling = table["scaling"].cast<float>(),
                .offset_norms = table["offset_norms"].cast<bool>(),
                .interleaved = table["interleaved"].cast<bool>(),
                .weighs_input = table["weighs_input"].cast<bool>(),
                .chunk = table["chunk"].cast<int64_t>(),
                .lora_slots = table["lora_slots"].cast<int64_t>(),
                .lora_rank = table["lora_rank"].cast<int64_t>(),
                .embedding = view_of(table["embedding"],
                                     {.name = "embedding", .dtypes = {DType::kF32, DType::kBf16}, .shape = {-1, -1}}),
                .angles = {},
                .final_norm = {},
                .layers = {},
                .exchange = exchange_of(table["exchange"])};
    const Tensors tensor(table, "", stack.dtype());
    read_ids(table, &stack);
    stack.angles = tensor("angles", {-1, -1});
    stack.final_norm = tensor("final_norm", {stack.hidden()});
    check_sizes(stack);
    int64_t index = 0, routed = 0;
    for (const py::handle layer : table["layers"]) {
      const LayerReader reader(stack, py::reinterpret_borrow<py::dict>(layer), index++);
      stack.layers.push_back(reader.layer());
      if (stack.layers.back().routed.present()) stack.layers.back().routed.place = routed++;
    }
    if (stack.layers.empty()) fail("layers is empty");
    if (!stack.attending()) fail("layers: none has keys; expected attention in one at least");
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
      .def("run", &NativeStep::run, py::kw_only(), py::arg("ids"), py::arg("positions"), py::arg("slots"),
           py::arg("sequences"), py::arg("table"), py::arg("states"), py::arg("adapter_rows"),
           py::arg("expert_adapters"), py::arg("token_slots"), py::arg("out"), py::arg("routes"))
      .def("free_scratch", &NativeStep::free_scratch)
      .def_property_readonly("scratch_bytes", &NativeStep::scratch_bytes);
}

}  // namespace kt
