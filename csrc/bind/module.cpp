// kt_runtime._experts: the private native half of kt_runtime.experts. Tensors arrive as DLPack capsules; all errors
// leave as NativeError(kind, message), which the Python layer turns into the classes of kt_runtime.errors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "base/scratch.h"
#include "bind/attention.h"
#include "bind/binders.h"
#include "bind/layer.h"
#include "kernels/registry.h"
#include "ops/experts/retained.h"
#include "threads/pool.h"
#include "threads/topology.h"

namespace py = pybind11;

namespace {

std::string resolve_isa(const std::string& name) {
  const kt::Tiles* tiles = nullptr;
  kt::check(kt::find_tiles(name, &tiles));
  return tiles->name;
}

}  // namespace

PYBIND11_MODULE(_experts, module) {
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
  module.def("resolve_isa", &resolve_isa, py::arg("name"));
  module.def("default_num_threads", &kt::default_num_threads);
  // (the system's number, processors that this process may use, how many of `num_threads` threads run there)
  module.def("memory_nodes", [](int num_threads) {
    const kt::Topology& topology = kt::topology();
    std::vector<std::tuple<int, std::vector<int>, int>> nodes;
    for (const auto& node : topology.nodes) nodes.emplace_back(node.id, node.processors, 0);
    for (int i = 0; i < num_threads; ++i) ++std::get<2>(nodes[static_cast<size_t>(kt::seat_of(topology, i).node)]);
    return nodes;
  });
  // 0, or errno of a request for one page on a node, by the system's number.
  module.def("probe_placement", [](int node) {
    const kt::PlacementCounts before = kt::placement_counts();
    const kt::Pages page(1, node);
    const kt::PlacementCounts after = kt::placement_counts();
    return after.refused > before.refused ? after.last_error : 0;
  });
  // Requests for a memory node that were granted and refused, and errno of the last refusal.
  module.def("placement_counts", [] {
    const kt::PlacementCounts counts = kt::placement_counts();
    return std::make_tuple(counts.granted, counts.refused, counts.last_error);
  });
  // Scratch of all threads, and retained activations' memory that awaits reuse.
  module.def("spare_memory_bytes", [] { return kt::scratch_bytes() + kt::Retained::spare_bytes(); });
  module.def("free_spare_memory", &kt::Retained::free_spare);
  kt::bind_attention(module);
  kt::bind_delta(module);
  kt::bind_dense(module);
  kt::bind_layer(module);
  kt::bind_loading(module);
  kt::bind_machine(module);
  kt::bind_ranks(module);
  kt::bind_step(module);
}
