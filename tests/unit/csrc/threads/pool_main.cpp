// For ThreadSanitizer: the thread pool's tests, and the native step, whose operations all run on the pool. With
// portable kernels alone, so that they compile in a minute. Each format of experts with one dtype of two: what threads
// share does not depend on it.
#include <cstdio>

#include "checks.h"
#include "kernels/registry.h"

int main() {
  kt_test::Report report(2);
  kt_test::test_threads(report);
  std::printf("threads: %ld checks, %ld failures\n", report.checks(), report.failures());
  kt_test::test_step(*kt::available_tiles().back(), report);
  kt_test::test_contract(*kt::available_tiles().back(), report);
  std::printf("with the step: %ld checks, %ld failures\n", report.checks(), report.failures());
  return report.failures() == 0 && report.checks() > 0 ? 0 : 1;
}
