// The pool: phases in order, every task once, queues of several memory nodes, errors, callers side by side, a fork.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "checks.h"
#include "threads/pool.h"
#include "threads/topology.h"

namespace kt_test {
namespace {

void test_phases(Report& report) {
  constexpr int64_t kTasks = 37, kRounds = 300;
  for (int64_t round = 0; round < kRounds; ++round) {
    std::atomic<int> first[kTasks] = {}, second[2][kTasks] = {}, too_early{0}, done{0};
    const auto one = [&](int64_t task) {
      ++first[task];
      ++done;
    };
    const auto two = [&](int node, int64_t task) {
      too_early += done.load() != kTasks;
      ++second[node][task];
    };
    const int64_t by_node[] = {kTasks, 5};
    const kt::Phase phases[] = {kt::phase_of(kTasks, one), kt::phase_of(0, one), kt::phase_by_node(2, by_node, two)};
    kt::ThreadPool::instance().run_phases(phases, 3, 4);
    report.equal("a phase began before the last one had ended", too_early == 0);
    for (int64_t task = 0; task < kTasks; ++task)
      report.equal("each task runs once", first[task] == 1 && second[0][task] == 1 && second[1][task] == (task < 5));
  }
}

void test_error(Report& report) {
  std::atomic<int> later{0};
  bool thrown = false;
  const auto fail = [](int64_t task) {
    if (task == 3) throw std::runtime_error("three");
  };
  const auto next = [&](int64_t) { ++later; };
  const kt::Phase phases[] = {kt::phase_of(10, fail), kt::phase_of(10, next)};
  try {
    kt::ThreadPool::instance().run_phases(phases, 2, 3);
  } catch (const std::runtime_error& error) {
    thrown = std::string(error.what()) == "three";
  }
  report.equal("a task's exception reaches the caller", thrown);
  report.equal("phases after a failure are left out", later == 0);
  kt::ThreadPool::instance().run(10, 3, next);
  report.equal("the pool works on after a failure", later == 10);
}

void test_callers(Report& report) {
  std::atomic<int64_t> sum{0};
  const auto call = [&] {
    for (int i = 0; i < 200; ++i) kt::ThreadPool::instance().run(16, 3, [&](int64_t task) { sum += task; });
  };
  std::thread other(call);
  call();
  other.join();
  report.equal("two callers at once both get their work done", sum == 2 * 200 * 120);
}

void test_fork(Report& report) {
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> count{0};
    kt::ThreadPool::instance().run(8, 4, [&](int64_t) { ++count; });
    _exit(count == 8 ? 0 : 1);
  }
  int status = -1;
  report.equal("a forked child does its work alone",
               child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

void test_threads(Report& report) {
  report.equal("processor lists", kt::parse_processor_list("0-2,7,9-10\n") == std::vector<int>{0, 1, 2, 7, 9, 10} &&
                                      kt::parse_processor_list("").empty() &&
                                      kt::parse_processor_list("3-x") == std::vector<int>{});
  const kt::Topology& topology = kt::topology();
  report.equal("every node has processors", !topology.nodes.empty() && !topology.nodes[0].processors.empty());
  report.equal("as many threads as processors", kt::default_num_threads() == topology.num_processors());
  test_phases(report);
  test_error(report);
  test_callers(report);
  test_fork(report);
}

}  // namespace kt_test
