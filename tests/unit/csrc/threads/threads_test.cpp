// The pool: phases in order, every task once, queues of several memory nodes, errors, callers side by side, a fork.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
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

// Nodes that share this machine's processors, each of one of them.
kt::Topology simulated(int num_nodes) {
  std::vector<int> processors;
  for (const kt::Topology::Node& node : kt::topology().nodes)
    processors.insert(processors.end(), node.processors.begin(), node.processors.end());
  kt::Topology made;
  for (int node = 0; node < num_nodes; ++node)
    made.nodes.push_back({node, {processors[static_cast<size_t>(node) % processors.size()]}, 1});
  return made;
}

cpu_set_t affinity() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  sched_getaffinity(0, sizeof mask, &mask);
  return mask;
}

bool only_on(const cpu_set_t& mask, const std::vector<int>& processors) {
  int allowed = 0;
  for (const int processor : processors) allowed += CPU_ISSET(processor, &mask) ? 1 : 0;
  return allowed > 0 && allowed == CPU_COUNT(&mask);
}

// The caller on node 0 and one worker, who sits on node 1: each begins with a task of its own node.
void test_own_node(Report& report) {
  const kt::Topology two = simulated(2);
  const kt::SimulatedTopology now(two);
  const cpu_set_t before = affinity();
  cpu_set_t first;
  CPU_ZERO(&first);
  CPU_SET(two.nodes[0].processors[0], &first);
  sched_setaffinity(0, sizeof first, &first);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> begun{0}, callers_first{-1}, workers_first{-1}, elsewhere{0};
    const std::thread::id caller = std::this_thread::get_id();
    const auto task = [&](int queue, int64_t) {
      const bool is_caller = std::this_thread::get_id() == caller;
      elsewhere += !is_caller && !only_on(affinity(), two.nodes[1].processors);
      int none = -1;
      if ((is_caller ? callers_first : workers_first).compare_exchange_strong(none, queue)) ++begun;
      while (begun.load() < 2) std::this_thread::yield();  // until both have begun
    };
    const int64_t tasks[] = {2, 2};
    const kt::Phase phase = kt::phase_by_node(2, tasks, task);
    kt::ThreadPool::instance().run_phases(&phase, 1, 2);
    report.equal("a thread begins with its own node's tasks", callers_first == 0 && workers_first == 1);
    report.equal("a worker is pinned to its seat, also when the seats change", elsewhere == 0);
  }
  sched_setaffinity(0, sizeof before, &before);
}

void test_bound(int num_nodes, Report& report) {
  const kt::Topology topology = simulated(num_nodes);
  const kt::SimulatedTopology now(topology);
  const cpu_set_t before = affinity();
  for (const int num_threads : {1, 2, num_nodes + 2}) {
    std::atomic<int> done{0}, elsewhere{0};
    const auto task = [&](int queue, int64_t) {
      ++done;
      elsewhere += !only_on(affinity(), topology.nodes[static_cast<size_t>(queue)].processors);
    };
    const int64_t tasks[] = {9, 9, 9, 9};
    kt::Phase phase = kt::phase_by_node(num_nodes, tasks, task);
    phase.bound = true;
    kt::ThreadPool::instance().run_phases(&phase, 1, num_threads);
    report.equal("bound tasks run", done == 9 * num_nodes);
    report.equal("a bound task runs on its node", elsewhere == 0);
    const cpu_set_t after = affinity();
    report.equal("the caller may run where it might before", CPU_EQUAL(&before, &after));
  }
}

std::atomic<bool> worker_is_awake{false}, tasks_are_over{false}, job_has_ended{false};
std::atomic<bool> ended_before_the_worker{false}, waited_in_vain{false};

// Whether `flag` was set in time.
bool wait_until(const std::atomic<bool>& flag, std::chrono::milliseconds at_most) {
  const auto end = std::chrono::steady_clock::now() + at_most;
  while (!flag.load() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  return flag.load();
}

void wait_until(const std::atomic<bool>& flag) {
  if (!wait_until(flag, std::chrono::seconds(60))) waited_in_vain = true;
}

// A worker that looks at a job when its last task is over: the job's memory must still be there.
void test_late_worker(Report& report) {
  kt::ThreadPool::instance().set_wake_hook([] {
    worker_is_awake = true;
    wait_until(tasks_are_over);
    // A caller that does not wait for this worker is gone by then.
    if (wait_until(job_has_ended, std::chrono::milliseconds(100))) ended_before_the_worker = true;
  });
  std::atomic<int> done{0};
  kt::ThreadPool::instance().run(2, 2, [&](int64_t) {  // both by the caller, while the worker is held up
    wait_until(worker_is_awake);
    if (++done == 2) tasks_are_over = true;
  });
  job_has_ended = true;
  kt::ThreadPool::instance().set_wake_hook(nullptr);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // a worker that was not waited for says so
  report.equal("the worker was there, and the tasks ended", worker_is_awake && !waited_in_vain);
  report.equal("a job ends when no worker looks at it any more", !ended_before_the_worker.load());
}

}  // namespace

void test_threads(Report& report) {
  const kt::Topology& topology = kt::topology();
  report.equal("every node has processors", !topology.nodes.empty() && !topology.nodes[0].processors.empty());
  report.equal("as many threads as cores at most",
               kt::default_num_threads() >= 1 && kt::default_num_threads() <= topology.num_cores());
  test_phases(report);
  {
    const kt::ThreadPool::Awake awake;  // workers spin between the jobs
    test_phases(report);
    test_callers(report);
  }
  test_error(report);
  test_callers(report);
  test_own_node(report);
  test_late_worker(report);
  for (const int num_nodes : {2, 4}) test_bound(num_nodes, report);
  test_fork(report);
}

}  // namespace kt_test
