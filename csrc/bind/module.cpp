// kt_runtime._experts: the private native half of kt_runtime.experts. Tensors arrive as DLPack capsules; all errors
// leave as NativeError(kind, message), which the Python layer turns into the classes of kt_runtime.errors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <new>
#include <string>
#include <vector>

#include "bind/layer.h"
#include "bind/loading.h"
#include "bind/machine.h"
#include "kernels/registry.h"
#include "ops/retained.h"
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
  // Processors of each memory node that this process may use.
  module.def("memory_nodes", [] {
    std::vector<std::vector<int>> nodes;
    for (const auto& node : kt::topology().nodes) nodes.push_back(node.processors);
    return nodes;
  });
  module.def("free_spare_memory", &kt::Retained::free_spare);
  kt::bind_layer(module);
  kt::bind_loading(module);
  kt::bind_machine(module);
}
