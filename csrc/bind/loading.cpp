#include "bind/loading.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bind/dlpack.h"
#include "bind/layer.h"
#include "kernels/registry.h"
#include "threads/pool.h"
#include "threads/topology.h"
#include "weights/loader.h"

namespace py = pybind11;

namespace kt {
namespace {

void check_range(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return;
  throw BindError{"invalid_value",
                  std::string(name) + " is " + std::to_string(value) + "; allowed: 1 to " + std::to_string(most)};
}

// Converts a value that Python's json has read.
Setting setting_of(py::handle value) {
  Setting made;
  if (py::isinstance<py::bool_>(value)) {
    made.kind = Setting::Kind::kBool;
    made.boolean = value.cast<bool>();
  } else if (py::isinstance<py::int_>(value) || py::isinstance<py::float_>(value)) {
    made.kind = Setting::Kind::kNumber;
    made.text = py::str(value).cast<std::string>();
    int overflow = 0;
    if (py::isinstance<py::int_>(value)) made.integer = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    made.integral = py::isinstance<py::int_>(value) && overflow == 0 && made.integer >= 0;
  } else if (py::isinstance<py::str>(value)) {
    made.kind = Setting::Kind::kText;
    made.text = value.cast<std::string>();
  } else if (py::isinstance<py::list>(value)) {
    made.kind = Setting::Kind::kList;
    for (const py::handle item : value) made.list.push_back(setting_of(item));
  } else if (py::isinstance<py::dict>(value)) {
    made.kind = Setting::Kind::kObject;
    for (const auto& [name, member] : py::reinterpret_borrow<py::dict>(value))
      made.members.emplace_back(name.cast<std::string>(), setting_of(member));
    std::sort(made.members.begin(), made.members.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  }
  return made;
}

// `tensors`: name -> (dtype, shape, first byte in the file, byte after the last).
void add_file(Checkpoint& checkpoint, const std::string& path, int descriptor, const py::dict& tensors) {
  std::map<std::string, TensorEntry> entries;
  for (const auto& [name, fields] : tensors) {
    const auto entry = py::reinterpret_borrow<py::tuple>(fields);
    const auto start = entry[2].cast<int64_t>();
    entries[name.cast<std::string>()] = {entry[0].cast<std::string>(), entry[1].cast<std::vector<int64_t>>(), start,
                                         entry[3].cast<int64_t>() - start};
  }
  std::shared_ptr<const TensorFile> file;
  check(TensorFile::open(path, descriptor, std::move(entries), &file));
  checkpoint.add_file(std::move(file));
}

// Memory nodes that have processors for this process.
int default_num_nodes() {
  return static_cast<int>(std::min<size_t>(topology().nodes.size(), static_cast<size_t>(kMaxNodes)));
}

// What an expert computes, and where fused tensors hold it: (activation, limit, alpha, bias, interleaved, transposed).
ExpertTable table_of(ExpertShape shape, const py::tuple& fields) {
  ExpertTable table{.shape = shape};
  check(parse_activation(fields[0].cast<std::string>(), fields[1].cast<float>(), fields[2].cast<float>(),
                         &table.mlp.activation));
  table.mlp.has_bias = fields[3].cast<bool>();
  table.layout = {.interleaved = fields[4].cast<bool>(), .transposed = fields[5].cast<bool>()};
  return table;
}

// `format` "": the checkpoint's format. `num_nodes` 0: the nodes of this machine.
NativeLayer load(const Checkpoint& checkpoint, const std::string& prefix, int64_t num_experts, int64_t hidden,
                 int64_t intermediate, const py::tuple& fields, const std::string& isa, int num_threads,
                 const std::string& format, int num_nodes) {
  constexpr int64_t kMostSize = int64_t{1} << 24;
  constexpr int kMostThreads = 1 << 16;
  check_range("num_experts", num_experts, kMostSize);
  check_range("hidden", hidden, kMostSize);
  check_range("intermediate", intermediate, kMostSize);
  check_range("num_threads", num_threads, kMostThreads);
  if (num_nodes == 0) num_nodes = default_num_nodes();
  check_range("num_nodes", num_nodes, kMaxNodes);
  const Tiles* tiles = nullptr;
  check(find_tiles(isa, &tiles));
  const ExpertTable table = table_of({num_experts, hidden, intermediate}, fields);
  std::shared_ptr<ExpertLayer> layer;
  Status status;
  {
    py::gil_scoped_release release;
    status = load_layer(checkpoint, prefix, table, {num_threads, num_nodes, format}, &layer);
  }
  check(status);
  return {std::move(layer), tiles, num_threads};
}

}  // namespace

void bind_loading(py::module_& module) {
  py::class_<Checkpoint, std::shared_ptr<Checkpoint>>(module, "Checkpoint")
      .def(py::init([](const std::string& directory, py::handle quantization) {
        return std::make_shared<Checkpoint>(directory, setting_of(quantization));
      }))
      .def("add_file", &add_file);
  module.def("load_layer", &load);
}

}  // namespace kt
