// Checks the kernels of every instruction set of this machine against double precision.
//
//   kt_kernel_tests             all that are available, and amx-model: AMX's kernels on a software model of its tiles
//   kt_kernel_tests --isa NAME  that one; fails where it can't run, so that a lane meant for it never passes on another
//   kt_kernel_tests --isa NAME --quick
//                               the same without the tests of whole layers and of the step, which take most of the
//                               time and call no kernel that the others don't: for emulators
//   kt_kernel_tests --isa NAME --part N
//                               one of N combinations of sizes where a test repeats its checks over many: for
//                               sanitizers, which look at memory and not at numbers
//   kt_kernel_tests --list      prints the names of both, one a line
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include "checks.h"
#include "kernels/registry.h"

namespace kt {
namespace amx::inline model {
extern const Tiles kTiles;
}
}  // namespace kt

namespace {

struct Test {
  const char* name;
  void (*run)(const kt::Tiles&, kt_test::Report&);
};
constexpr Test kTests[] = {
    {"float", kt_test::test_float},   {"integer", kt_test::test_integer},   {"transposed", kt_test::test_transposed},
    {"rows", kt_test::test_rows},     {"layer", kt_test::test_layer},       {"amx", kt_test::test_amx},
    {"packed", kt_test::test_packed}, {"decoder", kt_test::test_decoder},   {"step", kt_test::test_step},
    {"unpack", kt_test::test_unpack}, {"contract", kt_test::test_contract},
};
// On up to 40 threads, which the pool keeps: they come after the tests of all instruction sets on a few threads. Each
// batch of the step would keep them awake.
constexpr Test kOnManyThreads[] = {{"dense", kt_test::test_dense}, {"attention", kt_test::test_attention}};

bool is_long(const char* test) {
  constexpr std::string_view kLong[] = {"layer", "step", "contract"};
  return std::find(std::begin(kLong), std::end(kLong), test) != std::end(kLong);
}

struct Counts {
  long checks = 0, failures = 0;
};

void run(const Test& test, const kt::Tiles& tiles, int part, Counts* counts) {
  kt_test::Report report(part);
  const std::clock_t begun = std::clock();
  test.run(tiles, report);
  std::printf("%s %s: %ld checks, %ld failures, %.1f s of processor time\n", tiles.name, test.name, report.checks(),
              report.failures(), static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC);
  for (const kt_test::Report::Gate& gate : report.gates()) {
    std::printf("%s gate %.*s:%u within %.3g: errors up to %.3f of what is allowed\n", tiles.name,
                static_cast<int>(gate.file().size()), gate.file().data(), gate.line, gate.tolerance, gate.used);
  }
  std::fflush(stdout);
  counts->checks += report.checks();
  counts->failures += report.failures();
}

// On each of these instruction sets.
bool run_all(const std::vector<const kt::Tiles*>& wanted, bool quick, int part) {
  std::vector<Counts> counts(wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    for (const Test& test : kTests) {
      if (!quick || !is_long(test.name)) run(test, *wanted[i], part, &counts[i]);
    }
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    for (const Test& test : kOnManyThreads) run(test, *wanted[i], part, &counts[i]);
  }
  bool passed = !wanted.empty();
  for (size_t i = 0; i < wanted.size(); ++i) {
    std::printf("isa %s: %ld checks, %ld failures\n", wanted[i]->name, counts[i].checks, counts[i].failures);
    passed &= counts[i].failures == 0 && counts[i].checks > 0;
  }
  return passed;
}

// What needs no instruction set.
bool run_engine() {
  constexpr struct {
    const char* name;
    void (*run)(kt_test::Report&);
  } kEngineTests[] = {{"topology", kt_test::test_topology},
                      {"threads", kt_test::test_threads},
                      {"plan", kt_test::test_plan},
                      {"finite", kt_test::test_finite},
                      {"fp16", kt_test::test_fp16}};
  bool passed = true;
  for (const auto& test : kEngineTests) {
    kt_test::Report report;
    test.run(report);
    std::printf("%s: %ld checks, %ld failures\n", test.name, report.checks(), report.failures());
    passed &= report.failures() == 0 && report.checks() > 0;
  }
  return passed;
}

std::vector<const kt::Tiles*> all_tiles() {
  std::vector<const kt::Tiles*> all = kt::available_tiles();
  all.push_back(&kt::amx::model::kTiles);
  return all;
}

// Only the one called `name`; empty, and said why, where it cannot run.
std::vector<const kt::Tiles*> named_tiles(const char* name) {
  for (const kt::Tiles* tiles : all_tiles()) {
    if (std::strcmp(tiles->name, name) == 0) return {tiles};
  }
  const kt::Tiles* none = nullptr;
  std::printf("FAIL %s\n", kt::find_tiles(name, &none).message().c_str());
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  const std::string option = argc > 1 ? argv[1] : "";
  if (argc == 2 && option == "--list") {
    for (const kt::Tiles* tiles : all_tiles()) std::printf("%s\n", tiles->name);
    return 0;
  }
  const bool one = argc >= 3 && option == "--isa", quick = argc == 4 && std::strcmp(argv[3], "--quick") == 0;
  const bool in_part = argc == 5 && std::strcmp(argv[3], "--part") == 0;
  const int part = in_part ? std::atoi(argv[4]) : 1;
  if ((argc != 1 && !(one && (argc == 3 || quick || in_part))) || part < 1) {
    std::printf("usage: %s [--isa NAME [--quick | --part N] | --list]\n", argv[0]);
    return 2;
  }
  const std::vector<const kt::Tiles*> wanted = one ? named_tiles(argv[2]) : all_tiles();
  bool passed = run_all(wanted, quick, part);
  if (!wanted.empty()) passed &= run_engine();
  std::printf(passed ? "passed\n" : "failed\n");
  return passed ? 0 : 1;
}
