#include "bind/attention.h"

#include <string>
#include <utility>
#include <vector>

#include "bind/dlpack.h"
#include "bind/layer.h"
#include "kernels/registry.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_backward.h"
#include "ops/router/indexer.h"

namespace py = pybind11;

namespace kt {
namespace {

const std::vector<DType> kFloats = {DType::kF32, DType::kBf16};

}  // namespace

void read_sequences(const py::handle& given_rows, const py::handle& given_slots, std::vector<KvSequence>* sequences) {
  sequences->clear();
  const TensorView rows =
      view_of(given_rows, {.name = "sequences", .dtypes = {DType::kI64}, .shape = {-1, 4}, .contiguous = true});
  TensorView slots;
  if (!given_slots.is_none())
    slots = view_of(given_slots, {.name = "slots", .dtypes = {DType::kI32}, .shape = {-1, -1}});
  for (int64_t i = 0; i < rows.shape[0]; ++i) {
    const int64_t* row = rows.as<const int64_t>() + 4 * i;
    KvSequence sequence{.first_query = row[0], .queries = row[1], .prefix = row[2], .slots = nullptr, .first_key = 0};
    if (slots.present()) {
      const auto fail = [i](const std::string& what) {
        throw BindError{"invalid_value", "sequence " + std::to_string(i) + what};
      };
      if (row[3] < 0 || row[3] >= slots.shape[0])
        fail(" has row " + std::to_string(row[3]) + " of slots; allowed: 0 to " + std::to_string(slots.shape[0] - 1));
      if (row[1] > slots.shape[1] || row[2] > slots.shape[1] - row[1])
        fail(" has " + std::to_string(row[2]) + " + " + std::to_string(row[1]) + " keys; a row of slots has " +
             std::to_string(slots.shape[1]));
      sequence.slots = slots.as<const int32_t>() + row[3] * slots.strides[0];
    } else {
      sequence.first_key = row[3];
    }
    sequences->push_back(sequence);
  }
}

namespace {

AttentionCall call_of(py::handle q, py::handle keys, py::handle values) {
  AttentionCall call{};
  call.q = view_of(q, {.name = "q", .dtypes = kFloats, .shape = {-1, -1, -1}});
  call.keys = view_of(keys, {.name = "keys", .dtypes = kFloats, .shape = {-1, -1, call.q.shape[2]}});
  const int64_t heads = call.q.shape[1], key_rows = call.keys.shape[0], key_heads = call.keys.shape[1];
  if (key_heads == 0 || heads % key_heads != 0)
    throw BindError{"invalid_value", "q has " + std::to_string(heads) + " heads, which is no multiple of the keys' " +
                                         std::to_string(key_heads)};
  call.values = view_of(values, {.name = "values", .dtypes = {call.keys.dtype}, .shape = {key_rows, key_heads, -1}});
  return call;
}

// [T, top_k], or absent if it is None.
TensorView chosen_rows(const py::handle& chosen, int64_t tokens) {
  if (chosen.is_none()) return {};
  const TensorView rows =
      view_of(chosen, {.name = "chosen", .dtypes = {DType::kI32}, .shape = {tokens, -1}, .contiguous = true});
  if (rows.shape[1] < 1) throw BindError{"invalid_value", "chosen has no columns; a query sees one key at least"};
  return rows;
}

// Keys that a query sees at most; 0: all.
int64_t checked_window(int64_t window) {
  if (window < 0) throw BindError{"invalid_value", "window is " + std::to_string(window) + "; allowed: 0 or more"};
  return window;
}

void attend_batch(const std::string& isa, int num_threads, py::handle q, py::handle keys, py::handle values,
                  py::handle out, py::handle log_sums, py::handle sequences, py::handle slots, float scaling,
                  float logit_cap, py::handle sinks, int64_t window, py::handle chosen) {
  const Tiles* tiles = nullptr;
  check(find_tiles(isa, &tiles));
  AttentionCall call = call_of(q, keys, values);
  const int64_t tokens = call.q.shape[0], heads = call.q.shape[1], key_rows = call.keys.shape[0];
  call.out =
      view_of(out, {.name = "out", .dtypes = kFloats, .shape = {tokens, heads, call.values.shape[2]}, .written = true});
  if (!log_sums.is_none()) {
    call.log_sums = view_of(
        log_sums,
        {.name = "log_sums", .dtypes = {DType::kF32}, .shape = {tokens, heads}, .contiguous = true, .written = true});
  }
  check_disjoint({{"out", call.out}, {"log_sums", call.log_sums}},
                 {{"q", call.q}, {"keys", call.keys}, {"values", call.values}});
  std::vector<KvSequence> batch;
  read_sequences(sequences, slots, &batch);
  if (const TensorView rows = chosen_rows(chosen, tokens); rows.present()) {
    check(check_sequences(batch.data(), static_cast<int64_t>(batch.size()), tokens, key_rows));
    const std::vector<KvSequence> whole = std::move(batch);
    cut_at_chosen(whole, rows.as<const int32_t>(), rows.shape[1], &batch);
  }
  call.sequences = batch.data();
  call.num_sequences = static_cast<int64_t>(batch.size());
  call.scaling = scaling;
  call.logit_cap = logit_cap;
  call.window = checked_window(window);
  if (!sinks.is_none())
    call.sinks = view_of(sinks, {.name = "sinks", .dtypes = {DType::kF32}, .shape = {heads}, .contiguous = true});
  const py::gil_scoped_release release;
  check(check_sequences(call.sequences, call.num_sequences, tokens, key_rows));
  attend({*tiles->attention, num_threads}, call);
}

// Gradients are written by sequence: each row of the queries and of the keys must lie in exactly one. `check_sequences`
// leaves the keys of a sequence without queries unchecked, for attention does not read them.
void check_covers(const std::vector<KvSequence>& sequences, int64_t tokens, int64_t key_rows) {
  int64_t queries = 0, keys = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const KvSequence& s = sequences[i];
    if (s.first_query != queries || s.first_key != keys || s.keys() > key_rows - keys) {
      throw BindError{"invalid_value",
                      "sequence " + std::to_string(i) + " has queries from row " + std::to_string(s.first_query) +
                          " on and " + std::to_string(s.keys()) + " keys from row " + std::to_string(s.first_key) +
                          " on; with gradients sequences adjoin: expected rows " + std::to_string(queries) + " and " +
                          std::to_string(keys) + ", and at most " + std::to_string(key_rows - keys) + " keys"};
    }
    queries += s.queries;
    keys += s.keys();
  }
  if (queries == tokens && keys == key_rows) return;
  throw BindError{"invalid_value", "the sequences have " + std::to_string(queries) + " queries and " +
                                       std::to_string(keys) + " keys; with gradients they cover all, " +
                                       std::to_string(tokens) + " and " + std::to_string(key_rows)};
}

void attend_batch_backward(const std::string& isa, int num_threads, py::handle by_out, py::handle q, py::handle keys,
                           py::handle values, py::handle out, py::handle log_sums, py::handle sequences, float scaling,
                           int64_t window, py::handle by_q, py::handle by_keys, py::handle by_values,
                           py::handle chosen) {
  const Tiles* tiles = nullptr;
  check(find_tiles(isa, &tiles));
  AttentionGradients g{};
  AttentionCall& call = g.call = call_of(q, keys, values);
  const int64_t tokens = call.q.shape[0], heads = call.q.shape[1], key_size = call.q.shape[2];
  const int64_t key_rows = call.keys.shape[0], key_heads = call.keys.shape[1];
  const std::vector<int64_t> result = {tokens, heads, call.values.shape[2]};
  call.out = view_of(out, {.name = "out", .dtypes = {DType::kF32}, .shape = result});
  call.log_sums =
      view_of(log_sums, {.name = "log_sums", .dtypes = {DType::kF32}, .shape = {tokens, heads}, .contiguous = true});
  call.scaling = scaling;
  call.window = checked_window(window);
  call.chosen = chosen_rows(chosen, tokens);
  g.by_out = view_of(by_out, {.name = "by_out", .dtypes = kFloats, .shape = result});
  g.by_q =
      view_of(by_q, {.name = "by_q", .dtypes = {call.q.dtype}, .shape = {tokens, heads, key_size}, .written = true});
  g.by_keys = view_of(
      by_keys,
      {.name = "by_keys", .dtypes = {call.keys.dtype}, .shape = {key_rows, key_heads, key_size}, .written = true});
  g.by_values = view_of(by_values, {.name = "by_values",
                                    .dtypes = {call.keys.dtype},
                                    .shape = {key_rows, key_heads, call.values.shape[2]},
                                    .written = true});
  check_disjoint({{"by_q", g.by_q}, {"by_keys", g.by_keys}, {"by_values", g.by_values}}, {{"q", call.q},
                                                                                          {"keys", call.keys},
                                                                                          {"values", call.values},
                                                                                          {"out", call.out},
                                                                                          {"log_sums", call.log_sums},
                                                                                          {"by_out", g.by_out}});
  std::vector<KvSequence> batch;
  read_sequences(sequences, py::none(), &batch);
  call.sequences = batch.data();
  call.num_sequences = static_cast<int64_t>(batch.size());
  const py::gil_scoped_release release;
  check(check_sequences(call.sequences, call.num_sequences, tokens, key_rows));
  check_covers(batch, tokens, key_rows);
  attend_backward(*tiles, num_threads, g);
}

void prepare_rows(const std::string& isa, int num_threads, py::handle q, py::handle k, py::handle norm_weight,
                  py::handle norm_bias, py::handle angles, py::handle positions, bool interleaved) {
  const Tiles* tiles = nullptr;
  check(find_tiles(isa, &tiles));
  IndexRows rows{};
  rows.q = view_of(q, {.name = "q", .dtypes = kFloats, .shape = {-1, -1, -1}, .written = true});
  const int64_t tokens = rows.q.shape[0], size = rows.q.shape[2];
  rows.k = view_of(k, {.name = "k", .dtypes = {rows.q.dtype}, .shape = {tokens, size}, .written = true});
  const auto norm = [size](py::handle tensor, const char* name) {
    return view_of(tensor, {.name = name, .dtypes = {DType::kF32}, .shape = {size}, .contiguous = true});
  };
  rows.norm_weight = norm(norm_weight, "norm_weight");
  rows.norm_bias = norm(norm_bias, "norm_bias");
  rows.angles = view_of(angles, {.name = "angles", .dtypes = {rows.q.dtype}, .shape = {-1, -1}, .contiguous = true});
  rows.positions = view_of(positions, {.name = "positions", .dtypes = {DType::kI64}, .shape = {tokens}});
  rows.interleaved = interleaved;
  const int64_t rotated = rows.angles.shape[1];
  if (rotated % 2 != 0 || rotated > size)
    throw BindError{"invalid_value", "angles has " + std::to_string(rotated) +
                                         " columns; allowed: an even number, up to " + std::to_string(size)};
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t position = rows.positions.as<const int64_t>()[t * rows.positions.strides[0]];
    if (position < 0 || position >= rows.angles.shape[0])
      throw BindError{"invalid_value", "positions[" + std::to_string(t) + "] is " + std::to_string(position) +
                                           "; allowed: 0 to " + std::to_string(rows.angles.shape[0] - 1)};
  }
  check_disjoint({{"q", rows.q}, {"k", rows.k}},
                 {{"norm_weight", rows.norm_weight}, {"norm_bias", rows.norm_bias}, {"angles", rows.angles}});
  const py::gil_scoped_release release;
  prepare_index_rows({*tiles, num_threads}, rows);
}

void select_batch(const std::string& isa, int num_threads, py::handle q, py::handle weights, py::handle keys,
                  py::handle sequences, py::handle slots, py::handle chosen) {
  const Tiles* tiles = nullptr;
  check(find_tiles(isa, &tiles));
  Selection selection{};
  selection.q = view_of(q, {.name = "q", .dtypes = kFloats, .shape = {-1, -1, -1}});
  const int64_t tokens = selection.q.shape[0];
  selection.weights =
      view_of(weights, {.name = "weights", .dtypes = {DType::kF32}, .shape = {tokens, selection.q.shape[1]}});
  selection.keys = view_of(keys, {.name = "keys", .dtypes = {selection.q.dtype}, .shape = {-1, selection.q.shape[2]}});
  selection.scaling = index_scaling(selection.q.shape[1], selection.q.shape[2]);
  selection.chosen = view_of(
      chosen, {.name = "chosen", .dtypes = {DType::kI32}, .shape = {tokens, -1}, .contiguous = true, .written = true});
  if (selection.chosen.shape[1] < 1) throw BindError{"invalid_value", "chosen has no columns"};
  std::vector<KvSequence> batch;
  read_sequences(sequences, slots, &batch);
  selection.sequences = batch.data();
  selection.num_sequences = static_cast<int64_t>(batch.size());
  const py::gil_scoped_release release;
  check(check_sequences(selection.sequences, selection.num_sequences, tokens, selection.keys.shape[0]));
  select_keys({*tiles, num_threads}, selection);
}

}  // namespace

void bind_attention(py::module_& module) {
  module.def("prepare_index_rows", &prepare_rows);
  module.def("select_keys", &select_batch);
  module.def("attend", &attend_batch, py::kw_only(), py::arg("isa"), py::arg("num_threads"), py::arg("q"),
             py::arg("keys"), py::arg("values"), py::arg("out"), py::arg("log_sums"), py::arg("sequences"),
             py::arg("slots"), py::arg("scaling"), py::arg("logit_cap"), py::arg("sinks"), py::arg("window"),
             py::arg("chosen"));
  module.def("attend_backward", &attend_batch_backward, py::kw_only(), py::arg("isa"), py::arg("num_threads"),
             py::arg("by_out"), py::arg("q"), py::arg("keys"), py::arg("values"), py::arg("out"), py::arg("log_sums"),
             py::arg("sequences"), py::arg("scaling"), py::arg("window"), py::arg("by_q"), py::arg("by_keys"),
             py::arg("by_values"), py::arg("chosen"));
}

}  // namespace kt
