// Memory that a thread keeps between calls, because the system clears fresh pages slowly. Memory is freed when it is
// much larger than recent calls needed.
//
// Time is counted in calls. A window is kCallsInWindow calls. The end of a window frees every buffer that is larger
// than twice the largest reservation of this window and the previous one, for all threads that are not in a call.
#pragma once

#include <cstdint>

#include "base/memory.h"

namespace kt {

inline constexpr int64_t kCallsInWindow = 1024;

// The largest request of this window and the previous one.
class RecentNeed {
 public:
  void add(size_t bytes) { now_ = bytes > now_ ? bytes : now_; }
  size_t most() const { return now_ > before_ ? now_ : before_; }
  void end_window() {
    before_ = now_;
    now_ = 0;
  }

 private:
  size_t now_ = 0, before_ = 0;
};

// A buffer of the thread that makes it: only as a thread_local object or a member of one.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `count` elements of T until the next `reserve`, or until this thread's ScratchUse ends; contents
  // undefined.
  template <class T>
  T* reserve(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    need_.add(bytes);
    if (bytes > buffer_.bytes()) grow(bytes);
    return static_cast<T*>(buffer_.data());
  }

 private:
  friend void end_scratch_window();
  friend void free_scratch();
  void grow(size_t bytes);
  void free();

  AlignedBuffer buffer_;
  RecentNeed need_;
};

// During the object's lifetime no other thread frees this thread's scratch. At most one per thread at a time.
class ScratchUse {
 public:
  ScratchUse();
  ~ScratchUse();
  ScratchUse(const ScratchUse&) = delete;
  ScratchUse& operator=(const ScratchUse&) = delete;
};

// Of all threads.
int64_t scratch_bytes();
void end_scratch_window();
// Frees the scratch of every thread that is not in a call.
void free_scratch();

}  // namespace kt
