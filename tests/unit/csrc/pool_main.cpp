// The thread pool's tests alone, for ThreadSanitizer: without kernels, so that they compile in seconds.
#include <cstdio>

#include "checks.h"

int main() {
  kt_test::Report report;
  kt_test::test_threads(report);
  std::printf("threads: %ld checks, %ld failures\n", report.checks(), report.failures());
  return report.failures() == 0 && report.checks() > 0 ? 0 : 1;
}
