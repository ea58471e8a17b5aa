// The parts of the compiled module: each adds its classes and functions, and has a source of its name.
#pragma once

#include <pybind11/pybind11.h>

namespace kt {

// Attention over a KV pool.
void bind_attention(pybind11::module_& module);
// Gated DeltaNet.
void bind_delta(pybind11::module_& module);
// Linear layers and RMSNorm with one instruction set and number of threads.
void bind_dense(pybind11::module_& module);
// ExpertLayer: forward and backward of routed experts.
void bind_layer(pybind11::module_& module);
// Checkpoint, load_layer and PackedMatrix.
void bind_loading(pybind11::module_& module);
// measure_peak and measure_read: this machine's limits, for `kt-runtime bench`.
void bind_machine(pybind11::module_& module);
// Step: a decoder stack as one call.
void bind_step(pybind11::module_& module);

}  // namespace kt
