// Attention over a KV pool, as Python calls it.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "kernels/attention.h"

namespace kt {

// rows [B, 4] int64: first query, queries, prefix, place; the place is a row of `slots` [R, L] int32 (of which the
// result keeps pointers), or, if that is None, the first key.
void read_sequences(const pybind11::handle& rows, const pybind11::handle& slots, std::vector<KvSequence>* sequences);

void bind_attention(pybind11::module_& module);
void bind_delta(pybind11::module_& module);  // delta.cpp

}  // namespace kt
