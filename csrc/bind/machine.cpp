// The loops of kernels/peaks.h on several threads at once. Arithmetic does not use the thread pool: every thread must
// run its own equal part at the same time, while the pool gives a late worker's part to a free one.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "bind/binders.h"
#include "bind/dlpack.h"
#include "kernels/peaks.h"
#include "kernels/registry.h"
#include "threads/pool.h"
#include "threads/topology.h"

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

// Reads memory that no cache holds, a quarter of a buffer at a time, on the pool's threads: as a call on experts reads
// its weights, from the memory of its own node first.
class MemoryReader {
 public:
  explicit MemoryReader(int64_t bytes) {
    const auto& nodes = topology().nodes;
    num_nodes_ = static_cast<int>(std::min<size_t>(nodes.size(), kMaxNodes));
    const int64_t of_node = bytes / num_nodes_ / kQuarters;
    task_bytes_ = std::min(kMostTaskBytes, of_node / kPage * kPage);
    for (int node = 0; node < num_nodes_; ++node) {
      num_tasks_[node] = of_node / task_bytes_;
      const auto own = static_cast<size_t>(num_tasks_[node] * kQuarters * task_bytes_);
      pages_.emplace_back(own, nodes[static_cast<size_t>(node)].id);
    }
    const auto touch = [](uint8_t* data, int64_t bytes) { std::fill_n(data, bytes, uint8_t{1}); };
    for (; quarter_ < kQuarters; ++quarter_) run(default_num_threads(), true, touch);
  }

  // Bytes per second of the next quarter. The first call for a number of threads finds the fastest number of streams.
  double rate(const Peaks& peaks, int num_threads) {
    const auto key = std::make_pair(std::string(peaks.isa), num_threads);
    if (!streams_.contains(key)) streams_[key] = fastest_streams(peaks, num_threads);
    return read(peaks, num_threads, streams_[key]);
  }

  int64_t bytes_at_once() const {
    int64_t tasks = 0;
    for (int node = 0; node < num_nodes_; ++node) tasks += num_tasks_[node];
    return tasks * task_bytes_;
  }

  static int64_t least_bytes() { return kQuarters * kPage * static_cast<int64_t>(topology().nodes.size()); }

 private:
  static constexpr int kQuarters = 4;
  static constexpr int64_t kMostTaskBytes = 1 << 20;

  template <class Part>
  double run(int num_threads, bool bound, Part part) {
    const auto body = [&](int node, int64_t task) {
      const int64_t first = quarter_ % kQuarters * num_tasks_[node] + task;
      part(static_cast<uint8_t*>(pages_[static_cast<size_t>(node)].data()) + first * task_bytes_, task_bytes_);
    };
    Phase phase = phase_by_node(num_nodes_, num_tasks_, body);
    phase.bound = bound;
    const auto start = Clock::now();
    ThreadPool::instance().run_phases(&phase, 1, num_threads);
    return static_cast<double>(bytes_at_once()) / seconds_between(start, Clock::now());
  }

  double read(const Peaks& peaks, int num_threads, int streams) {
    ++quarter_;
    return run(num_threads, false, [&](const uint8_t* data, int64_t bytes) { peaks.read(data, bytes, streams); });
  }

  int fastest_streams(const Peaks& peaks, int num_threads) {
    constexpr int kRounds = 2;
    double best = 0;
    int fastest = 1;
    for (int round = 0; round < kRounds; ++round) {
      for (const int streams : {1, 2, 4}) {
        const double found = read(peaks, num_threads, streams);
        if (found <= best) continue;
        best = found;
        fastest = streams;
      }
    }
    return fastest;
  }

  int num_nodes_ = 1;
  int64_t task_bytes_ = kPage, quarter_ = 0;
  int64_t num_tasks_[kMaxNodes] = {};  // of a quarter
  std::vector<Pages> pages_;           // of each node
  std::map<std::pair<std::string, int>, int> streams_;
};

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

std::unique_ptr<MemoryReader> memory_reader(int64_t bytes) {
  const int64_t least = MemoryReader::least_bytes(), most = int64_t{1} << 40;
  if (bytes < least || bytes > most) {
    throw BindError{"invalid_value", "bytes is " + std::to_string(bytes) + "; allowed: " + std::to_string(least) +
                                         " to " + std::to_string(most)};
  }
  const py::gil_scoped_release release;
  return std::make_unique<MemoryReader>(bytes);
}

double read_rate(MemoryReader& reader, const std::string& isa, int num_threads) {
  const Peaks& peaks = find_peaks(isa);
  check_positive("num_threads", num_threads, kMaxThreads);
  const py::gil_scoped_release release;
  return reader.rate(peaks, num_threads);
}

// `with`: the pool's workers spin between jobs (threads/pool.h).
struct WorkersAwake {
  std::optional<ThreadPool::Awake> awake;
};

}  // namespace

void bind_machine(py::module_& module) {
  module.def("measure_peak", &measure_peak, py::arg("isa"), py::arg("operation"), py::arg("num_threads"),
             py::arg("passes") = 60);
  py::class_<MemoryReader>(module, "MemoryReader")
      .def(py::init(&memory_reader), py::arg("bytes"))
      .def("rate", &read_rate, py::arg("isa"), py::arg("num_threads"))
      .def_property_readonly("bytes_at_once", &MemoryReader::bytes_at_once);
  py::class_<WorkersAwake>(module, "WorkersAwake")
      .def(py::init<>())
      .def("__enter__", [](WorkersAwake& self) { self.awake.emplace(); })
      .def("__exit__", [](WorkersAwake& self, const py::args&) { self.awake.reset(); });
}

}  // namespace kt
