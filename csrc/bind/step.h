// Step of the compiled module.
#pragma once

#include <pybind11/pybind11.h>

namespace kt {

void bind_step(pybind11::module_& module);

}  // namespace kt
