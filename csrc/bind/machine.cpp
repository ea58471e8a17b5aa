// The loops of kernels/peaks.h on several threads at once. The thread pool is not used: every thread must run its own
// equal part at the same time, while the pool gives a late worker's part to a free one.
#include "bind/machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "bind/dlpack.h"
#include "kernels/peaks.h"
#include "kernels/registry.h"

namespace py = pybind11;

namespace kt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxThreads = 1024;
constexpr int64_t kPage = 4096;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// Runs part(0), part(1) ... on a thread each, all starting together; seconds from the first start to the last end.
double run_together(int num_threads, const std::function<void(int)>& part) {
  std::atomic<int> ready{0};
  std::vector<Clock::time_point> starts(num_threads), ends(num_threads);
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] {
      ready.fetch_add(1);
      while (ready.load() < num_threads) std::this_thread::yield();
      starts[i] = Clock::now();
      part(i);
      ends[i] = Clock::now();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return seconds_between(*std::min_element(starts.begin(), starts.end()), *std::max_element(ends.begin(), ends.end()));
}

// Rounds that take about `seconds` on one thread.
int64_t rounds_for(int64_t (*loop)(int64_t), double seconds) {
  for (int64_t rounds = 1;; rounds *= 4) {
    const auto start = Clock::now();
    loop(rounds);
    const double took = seconds_between(start, Clock::now());
    if (took > seconds / 8) return std::max<int64_t>(1, static_cast<int64_t>(rounds * seconds / took));
  }
}

double best_rate(int64_t (*loop)(int64_t), int num_threads, int passes) {
  constexpr double kPassSeconds = 0.005;  // short: on a busy machine some passes run undisturbed
  const int64_t rounds = rounds_for(loop, kPassSeconds);
  double best = 0;
  for (int pass = 0; pass < passes; ++pass) {
    std::atomic<int64_t> operations{0};
    const double took = run_together(num_threads, [&](int) { operations.fetch_add(loop(rounds)); });
    best = std::max(best, static_cast<double>(operations.load()) / took);
  }
  return best;
}

// Each pass reads an eighth of the buffer, so that the caches hold nothing of that eighth when it is read again.
double best_read_rate(const Peaks& peaks, int num_threads, int64_t bytes, int passes) {
  constexpr int64_t kParts = 8;
  const int64_t part = bytes / (kParts * num_threads) / kPage * kPage, own = kParts * part;
  AlignedBuffer buffer(static_cast<size_t>(own) * num_threads);
  auto* data = static_cast<uint8_t*>(buffer.data());
  // First touch by the thread that will read: the memory then lies on that thread's node.
  run_together(num_threads, [&](int i) { std::fill_n(data + i * own, own, static_cast<uint8_t>(i + 1)); });
  double best = 0;
  for (const int streams : {1, 2, 4}) {
    for (int pass = 0; pass < passes; ++pass) {
      const int64_t from = pass % kParts * part;
      const double took = run_together(num_threads, [&](int i) { peaks.read(data + i * own + from, part, streams); });
      best = std::max(best, static_cast<double>(part) * num_threads / took);
    }
  }
  return best;
}

const Peaks& find_peaks(const std::string& isa) {
  const Tiles* tiles = nullptr;
  const Status status = find_tiles(isa, &tiles);
  if (!status.ok()) throw BindError{"unknown_name", status.message()};
  return peaks_of(*tiles);
}

void check_positive(const char* name, int64_t value, int64_t limit) {
  if (value >= 1 && value <= limit) return;
  throw BindError{"invalid_value",
                  std::string(name) + " is " + std::to_string(value) + "; allowed: 1 to " + std::to_string(limit)};
}

double measure_peak(const std::string& isa, const std::string& operation, int num_threads, int passes) {
  const Peaks& peaks = find_peaks(isa);
  check_positive("num_threads", num_threads, kMaxThreads);
  check_positive("passes", passes, 1 << 20);
  if (operation != "bf16" && operation != "int8")
    throw BindError{"invalid_value", "operation is '" + operation + "'; allowed: bf16, int8"};
  const py::gil_scoped_release release;
  return best_rate(operation == "bf16" ? peaks.bf16 : peaks.int8, num_threads, passes);
}

double measure_read(const std::string& isa, int num_threads, int64_t bytes, int passes) {
  const Peaks& peaks = find_peaks(isa);
  check_positive("num_threads", num_threads, kMaxThreads);
  check_positive("passes", passes, 1 << 20);
  check_positive("bytes", bytes, int64_t{1} << 40);
  const int64_t least = kPage * 8 * num_threads;
  if (bytes < least) {
    throw BindError{"invalid_value", "bytes is " + std::to_string(bytes) + "; allowed: " + std::to_string(least) +
                                         " or more on " + std::to_string(num_threads) + " threads"};
  }
  const py::gil_scoped_release release;
  return best_read_rate(peaks, num_threads, bytes, passes);
}

}  // namespace

void bind_machine(py::module_& module) {
  module.def("measure_peak", &measure_peak, py::arg("isa"), py::arg("operation"), py::arg("num_threads"),
             py::arg("passes") = 60);
  module.def("measure_read", &measure_read, py::arg("isa"), py::arg("num_threads"), py::arg("bytes"),
             py::arg("passes") = 24);
}

}  // namespace kt
