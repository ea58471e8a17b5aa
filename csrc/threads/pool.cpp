#include "threads/pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace kt {

int default_num_threads() {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// Never destroyed: workers may still sleep on it while the process exits.
struct ThreadPool::Shared {
  std::mutex one_job;  // held by the caller whose job runs
  const pid_t process = getpid();
  int num_workers = 0;  // under one_job

  std::mutex mutex;  // guards all below but the counter
  std::condition_variable wake, idle;
  int wanted = 0;  // workers that may still join the present job
  int active = 0;
  Task task = nullptr;
  void* self = nullptr;
  int64_t num_tasks = 0;
  std::exception_ptr error;
  std::atomic<int64_t> next{0};
};

ThreadPool::Shared& ThreadPool::shared() {
  static Shared* shared = new Shared;
  return *shared;
}

ThreadPool& ThreadPool::instance() {
  static ThreadPool pool;
  return pool;
}

void ThreadPool::take_tasks() {
  Shared& s = shared();
  for (;;) {
    const int64_t task = s.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= s.num_tasks) return;
    try {
      s.task(s.self, task);
    } catch (...) {
      std::lock_guard lock(s.mutex);
      if (!s.error) s.error = std::current_exception();
      s.next.store(s.num_tasks, std::memory_order_relaxed);
    }
  }
}

void ThreadPool::work() {
  Shared& s = shared();
  std::unique_lock lock(s.mutex);
  for (;;) {
    s.wake.wait(lock, [&] { return s.wanted > 0; });
    --s.wanted;
    ++s.active;
    lock.unlock();
    take_tasks();
    lock.lock();
    if (--s.active == 0) s.idle.notify_one();
  }
}

void ThreadPool::add_workers(int wanted) {
  Shared& s = shared();
  while (s.num_workers < wanted) {
    try {
      std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      return;  // no more threads to be had: the job runs on those there are
    }
    ++s.num_workers;
  }
}

void ThreadPool::run_erased(int64_t num_tasks, int num_threads, Task task, void* self) {
  Shared& s = shared();
  std::unique_lock job(s.one_job, std::defer_lock);
  const int helpers = static_cast<int>(std::min<int64_t>(num_threads, num_tasks)) - 1;
  if (helpers <= 0 || s.process != getpid() || !job.try_lock()) {
    for (int64_t i = 0; i < num_tasks; ++i) task(self, i);
    return;
  }
  add_workers(helpers);
  {
    std::lock_guard lock(s.mutex);
    s.task = task;
    s.self = self;
    s.num_tasks = num_tasks;
    s.error = nullptr;
    s.next.store(0, std::memory_order_relaxed);
    s.wanted = helpers;
  }
  for (int i = 0; i < helpers; ++i) s.wake.notify_one();
  take_tasks();
  std::unique_lock lock(s.mutex);
  s.wanted = 0;
  s.idle.wait(lock, [&] { return s.active == 0; });
  if (s.error) std::rethrow_exception(s.error);
}

}  // namespace kt
