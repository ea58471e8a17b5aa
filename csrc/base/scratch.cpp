#include "base/scratch.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace kt {
namespace {

struct ThreadScratch;

// Never destroyed: threads may end after static objects are gone.
struct Threads {
  std::mutex mutex;
  std::vector<ThreadScratch*> all;
  std::atomic<int64_t> bytes{0};
  static Threads& instance() {
    static Threads* const threads = new Threads;
    return *threads;
  }
};

struct ThreadScratch {
  std::mutex in_use;
  std::vector<Scratch*> buffers;

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

// Calls body(scratch) for every buffer of the threads that are not in a call.
template <class Body>
void for_each_idle(Body&& body) {
  std::lock_guard lock(Threads::instance().mutex);
  for (ThreadScratch* thread : Threads::instance().all) {
    std::unique_lock use(thread->in_use, std::try_to_lock);
    if (!use) continue;
    for (Scratch* scratch : thread->buffers) body(*scratch);
  }
}

}  // namespace

// The list of buffers changes only under the mutex, so that no other thread reads it meanwhile.
Scratch::Scratch() {
  ThreadScratch& own = ThreadScratch::own();
  std::lock_guard lock(Threads::instance().mutex);
  own.buffers.push_back(this);
}

Scratch::~Scratch() {
  std::lock_guard lock(Threads::instance().mutex);
  std::erase(ThreadScratch::own().buffers, this);
  free();
}

void Scratch::grow(size_t bytes) {
  free();  // first: the peak is the larger of both, not the sum
  buffer_ = AlignedBuffer(bytes);
  Threads::instance().bytes.fetch_add(static_cast<int64_t>(bytes));
}

void Scratch::free() {
  Threads::instance().bytes.fetch_sub(static_cast<int64_t>(buffer_.bytes()));
  buffer_ = AlignedBuffer();
}

ScratchUse::ScratchUse() { ThreadScratch::own().in_use.lock(); }
ScratchUse::~ScratchUse() { ThreadScratch::own().in_use.unlock(); }

int64_t scratch_bytes() { return Threads::instance().bytes.load(); }

void end_scratch_window() {
  for_each_idle([](Scratch& scratch) {
    if (scratch.buffer_.bytes() > 2 * scratch.need_.most()) scratch.free();
    scratch.need_.end_window();
  });
}

void free_scratch() {
  for_each_idle([](Scratch& scratch) { scratch.free(); });
}

}  // namespace kt
