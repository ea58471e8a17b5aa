// What the ranks of a model send each other, as Python makes it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "ranks/exchange.h"

namespace kt {

// Of a Python object of the class Exchange, or None.
std::shared_ptr<Exchange> exchange_of(const pybind11::handle& object);

}  // namespace kt
