// The memory that operations keep between calls (base/scratch.h).
#pragma once

#include "base/scratch.h"
#include "checks.h"

namespace kt_test {

// The memory of a large call is given back when many small ones, on the calling thread, have followed it.
template <class Call>
void test_scratch(const std::string& what, Call&& small, Call&& large, Report& report) {
  kt::free_scratch();
  small();
  const int64_t needed = kt::scratch_bytes();
  large();
  report.equal(what + ": a large call needs no memory", kt::scratch_bytes() > 4 * needed + 1000);
  // Windows: the rest of the large call's, the one that remembers it, and one more.
  for (int64_t i = 0; i < 3 * kt::kOperationsInWindow; ++i) small();
  report.equal(what + ": memory of a large call is kept", kt::scratch_bytes() <= 2 * needed);
}

}  // namespace kt_test
