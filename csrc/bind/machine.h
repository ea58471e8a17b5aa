// What `kt-runtime bench` needs to know of the machine: its limits, measured.
#pragma once

#include <pybind11/pybind11.h>

namespace kt {

// Adds measure_peak and measure_read to the module.
void bind_machine(pybind11::module_& module);

}  // namespace kt
