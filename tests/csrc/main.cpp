// Checks the kernels of every instruction set of this machine against double precision.
//
//   kt_kernel_tests             all that are available
//   kt_kernel_tests --isa NAME  that one; fails where it can't run, so that a lane meant for it never passes on another
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "checks.h"
#include "kernels/registry.h"

namespace {

bool run(const kt::Tiles& tiles) {
  kt_test::Report report;
  kt_test::test_tiles(tiles, report);
  kt_test::test_layer(tiles, report);
  std::printf("isa %s: %ld checks, %ld failures, worst error %.2e of the sum of magnitudes\n", tiles.name,
              report.checks(), report.failures(), report.worst());
  return report.failures() == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 1 && !(argc == 3 && std::strcmp(argv[1], "--isa") == 0)) {
    std::printf("usage: %s [--isa NAME]\n", argv[0]);
    return 2;
  }
  std::vector<const kt::Tiles*> wanted = kt::available_tiles();
  if (argc == 3) {
    const kt::Tiles* tiles = nullptr;
    const kt::Status status = kt::find_tiles(argv[2], &tiles);
    if (!status.ok() || std::strcmp(tiles->name, argv[2]) != 0) {
      std::printf("FAIL %s\n", status.ok() ? "another instruction set was chosen" : status.message().c_str());
      return 1;
    }
    wanted = {tiles};
  }
  bool passed = true;
  for (const kt::Tiles* tiles : wanted) passed &= run(*tiles);
  std::printf(passed ? "passed\n" : "failed\n");
  return passed ? 0 : 1;
}
