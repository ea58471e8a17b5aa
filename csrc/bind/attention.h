// Attention over a KV pool, as Python calls it.
#pragma once

#include <pybind11/pybind11.h>

namespace kt {

void bind_attention(pybind11::module_& module);

}  // namespace kt
