#include "bind/loading.h"

#include <algorithm>
#include <memory>
#include <string>

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

// Memory nodes that have processors for this process.
int default_num_nodes() {
  return static_cast<int>(std::min<size_t>(topology().nodes.size(), static_cast<size_t>(kMaxNodes)));
}

// `format` "": as the checkpoint stores it. `num_nodes` 0: those of this machine.
NativeLayer load(const Checkpoint& checkpoint, const std::string& prefix, int64_t num_experts, int64_t hidden,
                 int64_t intermediate, const std::string& isa, int num_threads, const std::string& format,
                 int num_nodes) {
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
  std::shared_ptr<ExpertLayer> layer;
  Status status;
  {
    py::gil_scoped_release release;
    status =
        load_layer(checkpoint, prefix, {num_experts, hidden, intermediate}, {num_threads, num_nodes, format}, &layer);
  }
  check(status);
  return {std::move(layer), tiles, num_threads};
}

}  // namespace

void bind_loading(py::module_& module) {
  py::class_<Checkpoint, std::shared_ptr<Checkpoint>>(module, "Checkpoint");
  module.def("open_checkpoint", &open_checkpoint, py::arg("directory"));
  module.def("load_layer", &load);
}

}  // namespace kt
