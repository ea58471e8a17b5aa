#include <set>
#include <string>
#include <vector>

#include "bind/attention.h"
#include "bind/dlpack.h"
#include "bind/layer.h"
#include "kernels/registry.h"
#include "ops/delta/delta_rows.h"
#include "ops/delta/gated_delta.h"

namespace py = pybind11;

namespace kt {
namespace {

const std::vector<DType> kFloats = {DType::kF32, DType::kBf16};

[[noreturn]] void fail(const std::string& what) { throw BindError{"invalid_value", what}; }

// `heads`: int64 [4]: key heads, value heads, elements of a key, of a value.
struct ReadCall {
  ReadCall(py::handle x, py::handle a, py::handle b, py::handle filter, py::handle log_rate, py::handle bias,
           py::handle heads, py::handle rows) {
    const TensorView sizes =
        view_of(heads, {.name = "heads", .dtypes = {DType::kI64}, .shape = {4}, .contiguous = true});
    const int64_t* s = sizes.as<const int64_t>();
    call.shape = {.key_heads = s[0], .value_heads = s[1], .key_size = s[2], .value_size = s[3]};
    if (s[0] < 1 || s[1] < 1 || s[2] < 1 || s[3] < 1 || s[1] % s[0] != 0)
      fail("heads are " + std::to_string(s[0]) + " of keys and " + std::to_string(s[1]) + " of values, of " +
           std::to_string(s[2]) + " and " + std::to_string(s[3]) +
           " elements; allowed: 1 or more, and the values' heads a multiple of the keys'");
    const int64_t channels = call.shape.channels(), value_heads = call.shape.value_heads;
    call.x = view_of(x, {.name = "x", .dtypes = kFloats, .shape = {-1, channels}});
    const std::vector<DType> same = {call.x.dtype};
    const int64_t tokens = call.x.shape[0];
    call.a = view_of(a, {.name = "a", .dtypes = same, .shape = {tokens, value_heads}});
    call.b = view_of(b, {.name = "b", .dtypes = same, .shape = {tokens, value_heads}});
    call.filter = view_of(filter, {.name = "filter", .dtypes = same, .shape = {channels, -1}});
    const int64_t taps = call.filter.shape[1];
    if (taps < 1 || taps > kMostTaps)
      fail("filter has " + std::to_string(taps) + " taps; allowed: 1 to " + std::to_string(kMostTaps));
    call.log_rate = view_of(log_rate, {.name = "log_rate", .dtypes = kFloats, .shape = {value_heads}});
    call.bias = view_of(bias, {.name = "bias", .dtypes = kFloats, .shape = {value_heads}});
    read_rows(rows, tokens);
    call.sequences = sequences.data();
    call.num_sequences = static_cast<int64_t>(sequences.size());
  }

  void read_rows(py::handle given, int64_t tokens) {
    const TensorView rows =
        view_of(given, {.name = "sequences", .dtypes = {DType::kI64}, .shape = {-1, 4}, .contiguous = true});
    int64_t end = 0;
    for (int64_t i = 0; i < rows.shape[0]; ++i) {
      const int64_t* row = rows.as<const int64_t>() + 4 * i;
      if (row[0] < end || row[1] < 0 || row[1] > tokens - row[0])
        fail("sequence " + std::to_string(i) + " has " + std::to_string(row[1]) + " tokens from row " +
             std::to_string(row[0]) + " on; allowed: rows " + std::to_string(end) + " to " +
             std::to_string(tokens - 1) + ", each in one sequence");
      end = row[0] + row[1];
      sequences.push_back({.first = row[0], .tokens = row[1], .slot = row[2], .continues = row[3] != 0});
    }
  }

  DeltaCall call{};
  std::vector<DeltaSequence> sequences;
};

void check_slots(const std::vector<DeltaSequence>& sequences, int64_t slots) {
  std::set<int64_t> seen;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int64_t slot = sequences[i].slot;
    if (slot < 0 || slot >= slots)
      fail("sequence " + std::to_string(i) + " has slot " + std::to_string(slot) + "; allowed: 0 to " +
           std::to_string(slots - 1));
    if (!seen.insert(slot).second) fail("slot " + std::to_string(slot) + " is of two sequences of a call");
  }
}

void run_delta(const std::string& isa, int num_threads, py::handle x, py::handle a, py::handle b, py::handle filter,
               py::handle log_rate, py::handle bias, py::handle heads, py::handle rows, py::handle inputs,
               py::handle states, py::handle out) {
  const Tiles* tiles = nullptr;
  check(find_tiles(isa, &tiles));
  const ReadCall read(x, a, b, filter, log_rate, bias, heads, rows);
  const DeltaCall& call = read.call;
  const DeltaShape& shape = call.shape;
  DeltaStates kept;
  if (!states.is_none()) {
    kept.states = view_of(states, {.name = "states",
                                   .dtypes = {DType::kF32},
                                   .shape = {-1, shape.value_heads, shape.key_size, shape.value_size},
                                   .written = true});
    if (kept.states.strides[2] != shape.value_size) fail("states: the rows of a head's state do not adjoin");
    kept.inputs = view_of(inputs, {.name = "inputs",
                                   .dtypes = {call.x.dtype},
                                   .shape = {kept.states.shape[0], shape.channels(), call.filter.shape[1] - 1},
                                   .written = true});
    check_slots(read.sequences, kept.states.shape[0]);
  } else {
    for (const DeltaSequence& sequence : read.sequences) {
      if (sequence.continues) fail("a sequence continues, and there are no states");
    }
  }
  const TensorView result = view_of(out, {.name = "out",
                                          .dtypes = {call.x.dtype},
                                          .shape = {call.x.shape[0], shape.value_heads * shape.value_size},
                                          .written = true});
  check_disjoint({{"out", result}, {"states", kept.states}, {"inputs", kept.inputs}},
                 {{"x", call.x}, {"a", call.a}, {"b", call.b}, {"filter", call.filter}});
  const py::gil_scoped_release release;
  kt::gated_delta(*tiles, num_threads, call, kept, result);
}

void run_delta_backward(const std::string& isa, int num_threads, py::handle by_out, py::handle x, py::handle a,
                        py::handle b, py::handle filter, py::handle log_rate, py::handle bias, py::handle heads,
                        py::handle rows, py::handle by_x, py::handle by_a, py::handle by_b) {
  const Tiles* tiles = nullptr;
  check(find_tiles(isa, &tiles));
  const ReadCall read(x, a, b, filter, log_rate, bias, heads, rows);
  const DeltaCall& call = read.call;
  for (const DeltaSequence& sequence : read.sequences) {
    if (sequence.continues) fail("a sequence continues: gradients are of sequences from their first token on");
  }
  const std::vector<DType> same = {call.x.dtype};
  const int64_t tokens = call.x.shape[0], value_heads = call.shape.value_heads;
  DeltaGradients g;
  g.by_out =
      view_of(by_out, {.name = "by_out", .dtypes = same, .shape = {tokens, value_heads * call.shape.value_size}});
  g.by_x = view_of(by_x, {.name = "by_x", .dtypes = same, .shape = {tokens, call.shape.channels()}, .written = true});
  g.by_a = view_of(by_a, {.name = "by_a", .dtypes = same, .shape = {tokens, value_heads}, .written = true});
  g.by_b = view_of(by_b, {.name = "by_b", .dtypes = same, .shape = {tokens, value_heads}, .written = true});
  check_disjoint({{"by_x", g.by_x}, {"by_a", g.by_a}, {"by_b", g.by_b}},
                 {{"by_out", g.by_out}, {"x", call.x}, {"a", call.a}, {"b", call.b}, {"filter", call.filter}});
  const py::gil_scoped_release release;
  kt::gated_delta_backward(*tiles, num_threads, call, g);
}

}  // namespace

void bind_delta(py::module_& module) {
  module.def("gated_delta", &run_delta, py::kw_only(), py::arg("isa"), py::arg("num_threads"), py::arg("x"),
             py::arg("a"), py::arg("b"), py::arg("filter"), py::arg("log_rate"), py::arg("bias"), py::arg("heads"),
             py::arg("sequences"), py::arg("inputs"), py::arg("states"), py::arg("out"));
  module.def("gated_delta_backward", &run_delta_backward, py::kw_only(), py::arg("isa"), py::arg("num_threads"),
             py::arg("by_out"), py::arg("x"), py::arg("a"), py::arg("b"), py::arg("filter"), py::arg("log_rate"),
             py::arg("bias"), py::arg("heads"), py::arg("sequences"), py::arg("by_x"), py::arg("by_a"),
             py::arg("by_b"));
}

}  // namespace kt
