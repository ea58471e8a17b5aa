// The parts of the compiled module that module.cpp puts together.
#pragma once

#include <pybind11/pybind11.h>

namespace kt {

void bind_dense(pybind11::module_& module);    // linear layers and RMSNorm with one instruction set
void bind_loading(pybind11::module_& module);  // Checkpoint, load_layer and PackedMatrix
void bind_machine(pybind11::module_& module);  // measure_peak and measure_read, for `kt-runtime bench`
void bind_ranks(pybind11::module_& module);    // Exchange
void bind_step(pybind11::module_& module);     // Step

}  // namespace kt
