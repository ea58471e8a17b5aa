// Memory for weights and scratch: aligned to a cache line, to a huge page when it is large.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace kt {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  // Contents are undefined. Throws std::bad_alloc.
  explicit AlignedBuffer(size_t bytes);
  ~AlignedBuffer();
  AlignedBuffer(AlignedBuffer&& other) noexcept { swap(other); }
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;

  size_t bytes() const { return bytes_; }
  void* data() const { return data_; }

  // Room for at least `count` elements of T. The contents are lost when the buffer has to grow.
  template <class T>
  T* reserve(int64_t count) {
    const size_t wanted = static_cast<size_t>(count) * sizeof(T);
    if (wanted > bytes_) {
      *this = AlignedBuffer();  // free first: peak is the larger of both, not the sum
      *this = AlignedBuffer(wanted);
    }
    return static_cast<T*>(data_);
  }

 private:
  void swap(AlignedBuffer& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// Pages that no thread has touched. The first write places a page on the requested node (mbind, preferred: the system
// takes another node when the requested one is full). If the system refused the request, the page lies on the node of
// the thread that writes first.
class Pages {
 public:
  // `node`: the operating system's number; -1: no request. Throws std::bad_alloc.
  Pages(size_t bytes, int node);
  ~Pages();
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    swap(other);
    return *this;
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  void* data() const { return data_; }  // at a huge page's boundary

 private:
  void swap(Pages& other) {
    std::swap(data_, other.data_);
    std::swap(mapped_, other.mapped_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
  }

  void* data_ = nullptr;
  void* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
};

// Outcomes of the requests for a memory node since the process began.
struct PlacementCounts {
  int64_t granted = 0, refused = 0;
  int last_error = 0;  // errno of the last refusal
};
PlacementCounts placement_counts();

// Requests a node for a range of pages; returns 0 or errno. For tests: `ask` replaces the system call; null restores
// it.
using PlacementCall = int (*)(void* data, size_t bytes, int node);
void set_placement_call(PlacementCall ask);

}  // namespace kt
