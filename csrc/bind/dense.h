// Linear layers and RMSNorm with one instruction set and number of threads, as Python calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace kt {

void bind_dense(pybind11::module_& module);

}  // namespace kt
