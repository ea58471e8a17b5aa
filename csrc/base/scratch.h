// Memory that a thread keeps from call to call, as the system clears fresh pages slowly; given back when it is much
// larger than what recent calls needed.
//
// Time is counted in calls. A window is kCallsInWindow of them; at its end, memory of more than twice the most that was
// reserved in this window and the one before is freed, of every thread that is not in a call.
#pragma once

#include <cstdint>

#include "base/memory.h"

namespace kt {

inline constexpr int64_t kCallsInWindow = 1024;

// The most that was asked for in this window and the one before.
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

// While it lives, no other thread frees this one's scratch. One at a time for each thread.
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
// All that no thread uses at the moment.
void free_scratch();

}  // namespace kt
