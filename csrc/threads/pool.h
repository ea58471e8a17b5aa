// The process's one pool of worker threads.
//
// Workers sleep between jobs; none spins. The caller works too, and never waits for a worker that has not yet woken:
// a job that is over before a worker wakes costs nothing more. A second caller that comes while the pool is busy, and
// a forked child (which has no workers), do their job alone.
#pragma once

#include <cstdint>
#include <type_traits>

namespace kt {

// Processors that this process may run on (its affinity mask).
int default_num_threads();

class ThreadPool {
 public:
  static ThreadPool& instance();

  // Calls body(task) once for each task in [0, num_tasks), on at most `num_threads` threads, and returns when all are
  // done. The first exception that a task throws is rethrown here.
  template <class Body>
  void run(int64_t num_tasks, int num_threads, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_erased(
        num_tasks, num_threads, [](void* self, int64_t task) { (*static_cast<Plain*>(self))(task); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using Task = void (*)(void*, int64_t);
  ThreadPool() = default;
  void run_erased(int64_t num_tasks, int num_threads, Task task, void* self);
  void add_workers(int wanted);
  void work();
  void take_tasks();

  struct Shared;
  static Shared& shared();
};

}  // namespace kt
