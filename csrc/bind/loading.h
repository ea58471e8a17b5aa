// Checkpoint, load_layer and PackedMatrix of the compiled module.
#pragma once

#include <pybind11/pybind11.h>

namespace kt {

void bind_loading(pybind11::module_& module);

}  // namespace kt
