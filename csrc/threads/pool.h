// The process's one pool of worker threads, each pinned to a processor of its own.
//
// A job is a sequence of phases. A phase is a set of tasks in one queue per memory node. A thread takes tasks of its
// own node first, then tasks of other nodes. A phase begins when the last task of the previous phase has ended. Workers
// sleep between jobs, or spin while an `Awake` exists. Within a job, a thread that waits for the end of a phase spins
// for some microseconds, then sleeps. The calling thread works too, and never waits for a worker that is still asleep:
// a job that ends before a worker wakes has no extra cost. Two kinds of callers run their job alone: a caller that
// finds the pool busy, and a forked child (which has no workers).
//
// A phase is bound where the choice of thread affects more than speed (first touch places memory): each task then runs
// on a processor of its queue's node.
#pragma once

#include <cstdint>
#include <type_traits>

namespace kt {

// threads_for (topology.h) with this machine and the CPU quota of this process's cgroups.
int default_num_threads();

inline constexpr int kMaxNodes = 8;
inline constexpr int kMaxPhases = 64;

struct Phase {
  int num_queues = 0;
  int64_t num_tasks[kMaxNodes] = {};
  void (*task)(void* self, int queue, int64_t task) = nullptr;
  void* self = nullptr;
  bool bound = false;

  int64_t all_tasks() const {
    int64_t count = 0;
    for (int queue = 0; queue < num_queues; ++queue) count += num_tasks[queue];
    return count;
  }
};

// A phase of one queue that calls body(task). `body` must outlive the job.
template <class Body>
Phase phase_of(int64_t num_tasks, Body& body) {
  return {1,
          {num_tasks},
          [](void* self, int, int64_t task) { (*static_cast<Body*>(self))(task); },
          const_cast<void*>(static_cast<const void*>(&body)),
          false};
}

// A phase with one queue per node that calls body(node, task).
template <class Body>
Phase phase_by_node(int num_nodes, const int64_t* num_tasks, Body& body) {
  Phase phase{num_nodes,
              {},
              [](void* self, int node, int64_t task) { (*static_cast<Body*>(self))(node, task); },
              const_cast<void*>(static_cast<const void*>(&body)),
              false};
  for (int node = 0; node < num_nodes; ++node) phase.num_tasks[node] = num_tasks[node];
  return phase;
}

class ThreadPool {
 public:
  static ThreadPool& instance();

  // Runs the phases on at most `num_threads` threads and returns when all are done. Rethrows the first exception of a
  // task; tasks that have not begun by then are skipped.
  void run_phases(const Phase* phases, int num_phases, int num_threads);

  // While an object lives, workers between jobs spin instead of sleeping: for a caller with many short jobs. A sleeping
  // worker takes tens of microseconds to wake.
  class Awake {
   public:
    Awake();
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;
  };

  // For tests: a worker calls `hook` after it wakes for a job and before it reads the job; null removes the hook.
  void set_wake_hook(void (*hook)());

  // One phase: body(task) once for each task in [0, num_tasks).
  template <class Body>
  void run(int64_t num_tasks, int num_threads, Body&& body) {
    const Phase phase = phase_of(num_tasks, body);
    run_phases(&phase, 1, num_threads);
  }

 private:
  ThreadPool() = default;
  void add_workers(int wanted);
  void work(int index);
  void wait_for_job(int32_t seen);
  void take_tasks(int node);
  int64_t take_queue(int phase, int queue);

  struct Shared;
  static Shared& shared();
};

// body(first, count) for consecutive ranges that cover [0, total): `at_once` each, the last one may be shorter. A
// single range runs on the calling thread, without waking others.
template <class Body>
void run_ranges(int64_t total, int64_t at_once, int num_threads, Body&& body) {
  ThreadPool::instance().run((total + at_once - 1) / at_once, num_threads, [&](int64_t task) {
    const int64_t first = task * at_once;
    body(first, total - first < at_once ? total - first : at_once);
  });
}

}  // namespace kt
