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
  // The same on a memory node, where the system grants it (mbind, preferred); its number is the operating system's.
  AlignedBuffer(size_t bytes, int node);
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

  // At least `count` elements of T; what was there before is lost when the buffer has to grow.
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

}  // namespace kt
