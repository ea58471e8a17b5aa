#include "base/scratch.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <vector>

namespace kt {
namespace {

struct ThreadScratch;

void keep_own_thread();

// Never destroyed: threads may end after static objects are gone.
struct Threads {
  std::mutex mutex;
  std::vector<ThreadScratch*> all;
  std::atomic<int64_t> bytes{0};
  static Threads& instance() {
    static Threads* const threads = made();
    return *threads;
  }

 private:
  static Threads* made() {
    (void)pthread_atfork(nullptr, nullptr, keep_own_thread);
    return new Threads;
  }
};

struct ThreadScratch {
  std::mutex in_use;
  std::vector<ThreadMemory*> objects;

  ThreadScratch() {
    std::lock_guard lock(Threads::instance().mutex);
    Threads::instance().all.push_back(this);
  }
  ~ThreadScratch() {
    std::lock_guard lock(Threads::instance().mutex);
    std::erase(Threads::instance().all, this);
  }
  static ThreadScratch& own() {
    static thread_local ThreadScratch scratch;
    return scratch;
  }
};

// In a forked child, which has one thread. Other threads' objects lie in memory that its new threads get.
void keep_own_thread() {
  Threads& threads = Threads::instance();
  new (&threads.mutex) std::mutex;
  threads.all.clear();
  ThreadScratch& own = ThreadScratch::own();
  if (threads.all.empty()) threads.all.push_back(&own);
}

// Calls body(object) for every ThreadMemory of the threads that are not in an operation.
template <class Body>
void for_each_idle(Body&& body) {
  std::lock_guard lock(Threads::instance().mutex);
  for (ThreadScratch* thread : Threads::instance().all) {
    std::unique_lock use(thread->in_use, std::try_to_lock);
    if (!use) continue;
    for (ThreadMemory* object : thread->objects) body(*object);
  }
}

}  // namespace

// The list of objects changes only under the mutex, so that no other thread reads it meanwhile.
ThreadMemory::ThreadMemory() {
  ThreadScratch& own = ThreadScratch::own();
  std::lock_guard lock(Threads::instance().mutex);
  own.objects.push_back(this);
}

void ThreadMemory::leave() {
  std::lock_guard lock(Threads::instance().mutex);
  std::erase(ThreadScratch::own().objects, this);
  hold(0);
}

void ThreadMemory::hold(size_t bytes) {
  Threads::instance().bytes.fetch_add(static_cast<int64_t>(bytes) - static_cast<int64_t>(held_bytes_));
  held_bytes_ = bytes;
}

void ThreadMemory::free() {
  free_memory();
  hold(0);
}

ScratchUse::ScratchUse() { ThreadScratch::own().in_use.lock(); }
ScratchUse::~ScratchUse() { ThreadScratch::own().in_use.unlock(); }

OperationScope::OperationScope(int64_t operations) : operations_(operations) { ThreadScratch::own().in_use.lock(); }

OperationScope::~OperationScope() {
  static std::atomic<int64_t> counted{0};
  ThreadScratch::own().in_use.unlock();
  const int64_t before = counted.fetch_add(operations_, std::memory_order_relaxed);
  if (before / kOperationsInWindow != (before + operations_) / kOperationsInWindow) end_scratch_window();
}

int64_t scratch_bytes() { return Threads::instance().bytes.load(); }

void end_scratch_window() {
  for_each_idle([](ThreadMemory& memory) {
    if (memory.held_bytes_ > 2 * memory.need_.most()) memory.free();
    memory.need_.end_window();
  });
}

void free_scratch() {
  for_each_idle([](ThreadMemory& memory) { memory.free(); });
}

}  // namespace kt
