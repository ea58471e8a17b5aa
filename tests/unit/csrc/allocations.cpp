// The global operators new and delete, replaced: they count. All of them, so that none meets memory of the library's.
#include "allocations.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> allocations{0};

void* counted(size_t bytes, size_t alignment) noexcept {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (bytes == 0) bytes = 1;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void* counted_or_thrown(size_t bytes, size_t alignment) {
  void* made = counted(bytes, alignment);
  if (made == nullptr) throw std::bad_alloc();
  return made;
}

}  // namespace

namespace kt_test {
int64_t count_allocations() { return allocations.load(); }
}  // namespace kt_test

using std::align_val_t, std::nothrow_t, std::size_t;

void* operator new(size_t n) { return counted_or_thrown(n, 1); }
void* operator new[](size_t n) { return counted_or_thrown(n, 1); }
void* operator new(size_t n, align_val_t a) { return counted_or_thrown(n, static_cast<size_t>(a)); }
void* operator new[](size_t n, align_val_t a) { return counted_or_thrown(n, static_cast<size_t>(a)); }
void* operator new(size_t n, const nothrow_t&) noexcept { return counted(n, 1); }
void* operator new[](size_t n, const nothrow_t&) noexcept { return counted(n, 1); }
void* operator new(size_t n, align_val_t a, const nothrow_t&) noexcept { return counted(n, static_cast<size_t>(a)); }
void* operator new[](size_t n, align_val_t a, const nothrow_t&) noexcept { return counted(n, static_cast<size_t>(a)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, align_val_t) noexcept { std::free(p); }
void operator delete(void* p, const nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p, const nothrow_t&) noexcept { std::free(p); }
void operator delete(void* p, align_val_t, const nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p, align_val_t, const nothrow_t&) noexcept { std::free(p); }
