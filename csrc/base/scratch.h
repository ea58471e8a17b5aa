// Memory that a thread keeps between calls, because the system clears fresh pages slowly. Memory is freed when it is
// much larger than recent calls needed.
//
// Time is counted in operations (a product, an attention, ...; the experts of a layer count as several), whichever
// thread calls them. The end of a window of kOperationsInWindow frees every buffer that is larger than twice the
// largest reservation of this window and the previous one, for all threads that are not in an operation. A thread's
// vectors (ScratchObject) are freed in the same way.
#pragma once

#include <cstdint>

#include "base/memory.h"

namespace kt {

inline constexpr int64_t kOperationsInWindow = 8192, kOperationsOfExperts = 8;
// The same for memory that a step or a call on experts keeps: counted in these.
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

// Memory of the thread that makes the object: only as a thread_local object or a member of one.
class ThreadMemory {
 public:
  ThreadMemory(const ThreadMemory&) = delete;
  ThreadMemory& operator=(const ThreadMemory&) = delete;

 protected:
  ThreadMemory();
  virtual ~ThreadMemory() = default;
  // To be called first by a destructor: from then on no other thread frees the memory.
  void leave();
  // So many bytes are held now, of which the present operation needs some.
  void note(size_t held_bytes, size_t needed_bytes) {
    need_.add(needed_bytes);
    if (held_bytes != held_bytes_) hold(held_bytes);
  }

 private:
  friend void end_scratch_window();
  friend void free_scratch();
  virtual void free_memory() = 0;
  void hold(size_t bytes);
  void free();

  size_t held_bytes_ = 0;
  RecentNeed need_;
};

class Scratch final : public ThreadMemory {
 public:
  Scratch() = default;
  ~Scratch() override { leave(); }

  // At least `count` elements of T until the next `reserve`, or until this thread's operation ends; contents undefined.
  template <class T>
  T* reserve(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    T* const data = buffer_.reserve<T>(count);
    note(buffer_.bytes(), bytes);
    return data;
  }

 private:
  void free_memory() override { buffer_ = AlignedBuffer(); }

  AlignedBuffer buffer_;
};

// An object with vectors, which keep their memory from operation to operation. T has held_bytes() and needed_bytes():
// what its vectors have room for, and what they contain.
template <class T>
class ScratchObject final : public ThreadMemory {
 public:
  ScratchObject() = default;
  ~ScratchObject() override { leave(); }

  T& get() { return object_; }
  // To be called when the vectors have grown.
  void note_size() { note(object_.held_bytes(), object_.needed_bytes()); }

 private:
  void free_memory() override { object_ = T(); }

  T object_;
};

template <class... Vectors>
size_t held_bytes_of(const Vectors&... vectors) {
  return (... + (vectors.capacity() * sizeof(vectors[0])));
}
template <class... Vectors>
size_t needed_bytes_of(const Vectors&... vectors) {
  return (... + (vectors.size() * sizeof(vectors[0])));
}

// During the object's lifetime no other thread frees this thread's scratch. At most one per thread at a time.
class ScratchUse {
 public:
  ScratchUse();
  ~ScratchUse();
  ScratchUse(const ScratchUse&) = delete;
  ScratchUse& operator=(const ScratchUse&) = delete;
};

// The scope of an operation on the thread that calls it: a ScratchUse, at whose end a window may end.
class OperationScope {
 public:
  explicit OperationScope(int64_t operations = 1);
  ~OperationScope();
  OperationScope(const OperationScope&) = delete;
  OperationScope& operator=(const OperationScope&) = delete;

 private:
  const int64_t operations_;
};

// Of all threads.
int64_t scratch_bytes();
void end_scratch_window();
// Frees the scratch of every thread that is not in a call.
void free_scratch();

}  // namespace kt
