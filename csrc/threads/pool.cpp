#include "threads/pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/scratch.h"
#include "threads/topology.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kt {
namespace {

constexpr int kSpins = 400;  // about 10 to 20 microseconds

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Returns when `value` is `wanted`: spins, then sleeps. A thread that changes `value` must notify. Sequentially
// consistent: a job closes with a store to `open` and then waits for `active`; a worker does the same in the other
// order.
template <class T>
void wait_for(const std::atomic<T>& value, T wanted) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load() == wanted) return;
    relax();
  }
  for (T seen = value.load(); seen != wanted; seen = value.load()) value.wait(seen);
}

int current_node() {
#if defined(__linux__)
  if (topology().nodes.size() > 1) return topology().node_of(sched_getcpu());
#endif
  return 0;
}

void pin_to(int processor) {
#if defined(__linux__)
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(processor, &mask);
  (void)sched_setaffinity(0, sizeof mask, &mask);  // if refused, the kernel's scheduler places the thread
#else
  (void)processor;
#endif
}

// Restricts this thread to the processors of a node during the object's lifetime.
class OnNode {
 public:
#if defined(__linux__)
  explicit OnNode(int node) {
    const auto& nodes = topology().nodes;
    if (nodes.size() < 2 || static_cast<size_t>(node) >= nodes.size()) return;
    if (sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    cpu_set_t mask;
    CPU_ZERO(&mask);
    for (const int processor : nodes[static_cast<size_t>(node)].processors) CPU_SET(processor, &mask);
    moved_ = sched_setaffinity(0, sizeof mask, &mask) == 0;
  }
  ~OnNode() {
    if (moved_) (void)sched_setaffinity(0, sizeof before_, &before_);
  }
#else
  explicit OnNode(int) {}
#endif
  OnNode(const OnNode&) = delete;
  OnNode& operator=(const OnNode&) = delete;

 private:
#if defined(__linux__)
  cpu_set_t before_;
  bool moved_ = false;
#endif
};

}  // namespace

int default_num_threads() { return threads_for(topology(), read_cpu_quota("")); }

// Never destroyed: workers may still sleep on it while the process exits.
struct ThreadPool::Shared {
  std::mutex one_job;  // held by the caller whose job runs
  const pid_t process = getpid();
  int num_workers = 0;  // under one_job

  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  struct alignas(64) Counter32 {
    std::atomic<int32_t> value{0};  // 32 bits: a futex without a proxy
  };

  // Written by the caller while no worker is active and the job is closed.
  const Phase* phases = nullptr;
  int num_phases = 0;
  int num_helpers = 0;
  bool has_threads[kMaxNodes] = {};  // nodes of the caller and its helpers
  Counter next[kMaxPhases][kMaxNodes];
  Counter left[kMaxPhases];    // tasks that have not ended
  Counter32 over[kMaxPhases];  // 1 when none is left

  std::atomic<bool> open{false};
  alignas(64) std::atomic<int32_t> active{0};  // workers that may touch the job
  alignas(64) std::atomic<int32_t> jobs{0};    // workers sleep until it changes
  alignas(64) std::atomic<int32_t> awake{0};   // objects of ThreadPool::Awake

  std::atomic<void (*)()> wake_hook{nullptr};

  std::atomic<bool> failed{false};
  std::mutex error_mutex;
  std::exception_ptr error;
};

ThreadPool::Shared& ThreadPool::shared() {
  static Shared* shared = new Shared;
  return *shared;
}

ThreadPool& ThreadPool::instance() {
  static ThreadPool pool;
  return pool;
}

int64_t ThreadPool::take_queue(int p, int queue) {
  Shared& s = shared();
  const Phase& phase = s.phases[p];
  int64_t ended = 0;
  for (;;) {
    const int64_t task = s.next[p][queue].value.fetch_add(1, std::memory_order_relaxed);
    if (task >= phase.num_tasks[queue]) return ended;
    ++ended;
    if (s.failed.load(std::memory_order_relaxed)) continue;
    try {
      phase.task(phase.self, queue, task);
    } catch (...) {
      std::lock_guard lock(s.error_mutex);
      if (!s.error) s.error = std::current_exception();
      s.failed.store(true, std::memory_order_relaxed);
    }
  }
}

void ThreadPool::take_tasks(int node) {
  Shared& s = shared();
  for (int p = 0; p < s.num_phases; ++p) {
    const Phase& phase = s.phases[p];
    int64_t ended = 0;
    for (int step = 0; step < phase.num_queues; ++step) {
      const int queue = (node + step) % phase.num_queues;
      if (!phase.bound) {
        ended += take_queue(p, queue);
      } else if (queue == node || !s.has_threads[queue]) {
        const OnNode there(queue);
        ended += take_queue(p, queue);
      }
    }
    if (ended && s.left[p].value.fetch_sub(ended, std::memory_order_acq_rel) == ended) {
      s.over[p].value.store(1, std::memory_order_release);
      s.over[p].value.notify_all();
    } else {
      wait_for(s.over[p].value, int32_t{1});
    }
  }
}

// Returns when the number of jobs is not `seen`.
void ThreadPool::wait_for_job(int32_t seen) {
  Shared& s = shared();
  const auto has_begun = [&] { return s.jobs.load(std::memory_order_acquire) != seen; };
  while (!has_begun()) {
    if (s.awake.load(std::memory_order_relaxed) == 0) {
      s.jobs.wait(seen, std::memory_order_acquire);
      continue;
    }
    for (int i = 0; i < kSpins && !has_begun(); ++i) relax();
    if (!has_begun()) std::this_thread::yield();  // the caller may wait for this processor
  }
}

ThreadPool::Awake::Awake() { shared().awake.fetch_add(1, std::memory_order_relaxed); }
ThreadPool::Awake::~Awake() { shared().awake.fetch_sub(1, std::memory_order_relaxed); }

void ThreadPool::work(int index) {
  Shared& s = shared();
  uint64_t seated = 0;
  Seat seat{};
  int32_t seen = 0;
  for (;;) {
    wait_for_job(seen);
    seen = s.jobs.load(std::memory_order_acquire);
    s.active.fetch_add(1);
    if (const auto hook = s.wake_hook.load(std::memory_order_relaxed)) hook();
    // Either the caller sees this worker as active before it changes the job, or this worker sees the job closed.
    if (s.open.load() && index <= s.num_helpers) {
      if (seated != topology_version()) {
        seated = topology_version();
        seat = seat_of(topology(), index);
        pin_to(seat.processor);
      }
      const ScratchUse use;
      take_tasks(seat.node);
    }
    if (s.active.fetch_sub(1) == 1) s.active.notify_all();
  }
}

void ThreadPool::set_wake_hook(void (*hook)()) { shared().wake_hook.store(hook); }

void ThreadPool::add_workers(int wanted) {
  Shared& s = shared();
  while (s.num_workers < wanted) {
    try {
      std::thread([this, index = s.num_workers + 1] { work(index); }).detach();
    } catch (const std::system_error&) {
      return;  // no more threads are available: the job runs on the existing ones
    }
    ++s.num_workers;
  }
}

void ThreadPool::run_phases(const Phase* phases, int num_phases, int num_threads) {
  Shared& s = shared();
  int64_t most_tasks = 0;
  for (int p = 0; p < num_phases; ++p) most_tasks = std::max(most_tasks, phases[p].all_tasks());
  std::unique_lock job(s.one_job, std::defer_lock);
  const int helpers = static_cast<int>(std::min<int64_t>(num_threads, most_tasks)) - 1;
  if (helpers <= 0 || s.process != getpid() || !job.try_lock()) {
    for (int p = 0; p < num_phases; ++p) {
      for (int queue = 0; queue < phases[p].num_queues; ++queue) {
        const OnNode there(phases[p].bound ? queue : kMaxNodes);
        for (int64_t task = 0; task < phases[p].num_tasks[queue]; ++task) phases[p].task(phases[p].self, queue, task);
      }
    }
    return;
  }
  add_workers(helpers);
  const int own_node = current_node();
  wait_for(s.active, int32_t{0});  // a worker may have woken late for the previous job
  s.phases = phases;
  s.num_phases = num_phases;
  s.num_helpers = std::min(helpers, s.num_workers);
  std::fill(std::begin(s.has_threads), std::end(s.has_threads), false);
  const auto has_thread = [&](int node) {
    if (node < kMaxNodes) s.has_threads[node] = true;
  };
  has_thread(own_node);
  for (int index = 1; index <= s.num_helpers; ++index) has_thread(seat_of(topology(), index).node);
  for (int p = 0; p < num_phases; ++p) {
    for (int queue = 0; queue < phases[p].num_queues; ++queue) s.next[p][queue].value.store(0);
    s.left[p].value.store(phases[p].all_tasks());
    s.over[p].value.store(phases[p].all_tasks() == 0 ? 1 : 0);
  }
  s.failed.store(false);
  s.error = nullptr;
  s.open.store(true);
  s.jobs.fetch_add(1);
  s.jobs.notify_all();
  take_tasks(own_node);
  s.open.store(false);
  wait_for(s.active, int32_t{0});
  if (s.error) std::rethrow_exception(s.error);
}

}  // namespace kt
