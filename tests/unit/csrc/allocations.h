// How often this program has called the global operator new.
#pragma once

#include <cstdint>

namespace kt_test {

int64_t count_allocations();

}  // namespace kt_test
