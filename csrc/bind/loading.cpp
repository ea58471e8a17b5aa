#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/binders.h"
#include "bind/dlpack.h"
#include "bind/layer.h"
#include "kernels/registry.h"
#include "threads/pool.h"
#include "threads/topology.h"
#include "weights/gguf_layer.h"
#include "weights/loader.h"
#include "weights/packed.h"

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

// `format` "": the checkpoint's format. `num_nodes` 0: the nodes of this machine. `share`: the first expert and the
// number of those that are loaded.
NativeLayer load(const Checkpoint& checkpoint, const std::string& prefix, int64_t num_experts, int64_t hidden,
                 int64_t intermediate, const py::tuple& fields, const std::string& isa, int num_threads,
                 const std::string& format, int num_nodes, const std::pair<int64_t, int64_t>& share) {
  constexpr int64_t kMostSize = int64_t{1} << 24;
  constexpr int kMostThreads = 1 << 16;
  check_range("num_experts", num_experts, kMostSize);
  check_range("hidden", hidden, kMostSize);
  check_range("intermediate", intermediate, kMostSize);
  check_range("num_threads", num_threads, kMostThreads);
  check_range("number of experts of a share", share.second, num_experts);
  if (num_nodes == 0) num_nodes = default_num_nodes();
  check_range("num_nodes", num_nodes, kMaxNodes);
  const Tiles* tiles = nullptr;
  check(find_tiles(isa, &tiles));
  const ExpertTable table = table_of({num_experts, hidden, intermediate}, fields);
  std::shared_ptr<ExpertLayer> layer;
  Status status;
  {
    py::gil_scoped_release release;
    const bool is_whole = share.first == 0 && share.second == num_experts;
    const int64_t part = is_whole ? 0 : share.second;
    status = load_layer(checkpoint, prefix, table, {num_threads, num_nodes, format, share.first, part}, &layer);
  }
  check(status);
  return {std::move(layer), tiles, num_threads};
}

// A matrix that `fill` writes, of parts (GGUF type, rows) below each other.
std::shared_ptr<PackedMatrix> packed_matrix(const std::vector<std::pair<std::string, int64_t>>& parts, int64_t cols) {
  check_range("parts", static_cast<int64_t>(parts.size()), PackedMatrix::kMostParts);
  std::vector<PackedShape> shapes;
  for (const auto& [name, rows] : parts) {
    const GgufType* type = find_gguf_type(name);
    if (type == nullptr || !type->format.integer())
      throw BindError{"invalid_value", "no packed matrix of type " + name + "; known: " + known_gguf_types()};
    check_range("rows", rows, int64_t{1} << 24);
    check_range("cols", cols, int64_t{1} << 24);
    if (cols % std::max(type->columns, kColumnUnit) != 0)
      throw BindError{"invalid_value", "cols is " + std::to_string(cols) + "; allowed: multiples of " +
                                           std::to_string(std::max(type->columns, kColumnUnit)) + " for " + name};
    shapes.push_back({rows, cols, type->format});
  }
  return std::make_shared<PackedMatrix>(shapes);
}

// Packs rows of a part, from its row `first_row` (a multiple of 16) on. Index of the first block with a bad scale, or
// -1.
int64_t fill(PackedMatrix& matrix, int64_t part, const std::string& name, int64_t first_row, const py::buffer& bytes) {
  const py::buffer_info rows = bytes.request();
  check_range("part + 1", part + 1, static_cast<int64_t>(matrix.parts().size()));
  const PackedShape& shape = matrix.parts()[static_cast<size_t>(part)].shape();
  const GgufType* type = find_gguf_type(name);
  if (type == nullptr || !(type->format == shape.format))
    throw BindError{"invalid_value", "part " + std::to_string(part) + " is not of type " + name};
  const int64_t row_bytes = shape.cols / type->columns * type->bytes, size = rows.size * rows.itemsize;
  const int64_t count = size / row_bytes;
  if (first_row < 0 || first_row % kBlockRows != 0 || size % row_bytes != 0 || first_row + count > shape.rows ||
      (count % kBlockRows != 0 && first_row + count < shape.rows))
    throw BindError{"invalid_value", "rows " + std::to_string(first_row) + " and on in " + std::to_string(size) +
                                         " bytes are no blocks of 16 rows of a part of " + std::to_string(shape.rows)};
  uint8_t* packed = matrix.part_data(static_cast<size_t>(part)) + first_row / kBlockRows * shape.block_bytes();
  const auto* from = static_cast<const uint8_t*>(rows.ptr);
  constexpr int64_t kTaskRows = 256;
  std::atomic<int64_t> bad{-1};
  const py::gil_scoped_release release;
  run_ranges(count, kTaskRows, default_num_threads(), [&](int64_t first, int64_t some) {
    const int64_t found = GgufPacker(*type, shape.cols)
                              .pack(from + first * row_bytes, some, packed + first / kBlockRows * shape.block_bytes());
    if (found >= 0) bad = first * (shape.cols / type->columns) + found;
  });
  return bad;
}

std::shared_ptr<PackedMatrix> slice(const PackedMatrix& matrix, int64_t first, int64_t count) {
  const auto parts = static_cast<int64_t>(matrix.parts().size());
  check_range("first + 1", first + 1, parts);
  check_range("count", count, parts - first);
  return std::make_shared<PackedMatrix>(matrix.slice(static_cast<size_t>(first), static_cast<size_t>(count)));
}

}  // namespace

void bind_loading(py::module_& module) {
  py::class_<Checkpoint, std::shared_ptr<Checkpoint>>(module, "Checkpoint")
      .def(py::init([](const std::string& directory, py::handle quantization) {
        return std::make_shared<Checkpoint>(directory, setting_of(quantization));
      }))
      .def("add_file", &add_file);
  module.def("load_layer", &load, py::kw_only(), py::arg("checkpoint"), py::arg("prefix"), py::arg("num_experts"),
             py::arg("hidden"), py::arg("intermediate"), py::arg("mlp"), py::arg("isa"), py::arg("num_threads"),
             py::arg("expert_format"), py::arg("num_nodes"), py::arg("share"));
  py::class_<PackedMatrix, std::shared_ptr<PackedMatrix>>(module, "PackedMatrix", py::buffer_protocol())
      .def(py::init(&packed_matrix))
      .def("fill", &fill)
      .def("slice", &slice)
      .def_property_readonly("rows", &PackedMatrix::rows)
      .def_property_readonly("cols", &PackedMatrix::cols)
      .def_property_readonly("ends",  // of the parts: the row after the last of each
                             [](const PackedMatrix& matrix) {
                               std::vector<int64_t> ends;
                               for (const auto& part : matrix.parts())
                                 ends.push_back(part.first_row + part.shape().rows);
                               return ends;
                             })
      .def_property_readonly("formats",
                             [](const PackedMatrix& matrix) {
                               std::vector<std::string> names;
                               for (const auto& part : matrix.parts())
                                 names.push_back(format_name(part.shape().format));
                               return names;
                             })
      .def_buffer([](PackedMatrix& matrix) {
        return py::buffer_info(const_cast<uint8_t*>(matrix.data()), 1, "B", 1, {matrix.bytes()}, {1});
      });
}

}  // namespace kt
