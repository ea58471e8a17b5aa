#include "base/memory.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kt {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;

int ask_system(void* data, size_t bytes, int node) {
#if defined(__linux__) && defined(SYS_mbind)
  constexpr int kPreferred = 1;  // MPOL_PREFERRED, linux/mempolicy.h
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long mask[16] = {};
  if (node < 0 || node >= 16 * kBits) return EINVAL;
  mask[node / kBits] = 1ul << (node % kBits);
  return syscall(SYS_mbind, data, bytes, kPreferred, mask, 16ul * kBits, 0u) == 0 ? 0 : errno;
#else
  (void)data, (void)bytes, (void)node;
  return ENOSYS;
#endif
}

std::atomic<PlacementCall> placement_call{ask_system};
std::atomic<int64_t> granted{0}, refused{0};
std::atomic<int> last_error{0};

}  // namespace

AlignedBuffer::AlignedBuffer(size_t bytes) {
  if (bytes == 0) return;
  const bool large = bytes >= 4 * kHugePage;
  const size_t alignment = large ? kHugePage : kCacheLine;
  data_ = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (data_ == nullptr) throw std::bad_alloc();
  bytes_ = bytes;
#if defined(__linux__)
  // Fewer TLB misses while streaming weights; a refusal changes nothing but speed.
  if (large) (void)madvise(data_, bytes, MADV_HUGEPAGE);
#endif
}

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

Pages::Pages(size_t bytes, int node) {
  if (bytes == 0) return;
#if defined(__linux__)
  // mmap, because memory that the C library reuses has been touched already.
  mapped_bytes_ = bytes + kHugePage;
  mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped_ == MAP_FAILED) {
    mapped_ = nullptr;
    throw std::bad_alloc();
  }
  const auto at = (reinterpret_cast<uintptr_t>(mapped_) + kHugePage - 1) / kHugePage * kHugePage;
  data_ = reinterpret_cast<void*>(at);
  (void)madvise(data_, bytes, MADV_HUGEPAGE);  // fewer TLB misses; a refusal changes nothing but speed
#else
  mapped_bytes_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  mapped_ = data_ = std::aligned_alloc(kHugePage, mapped_bytes_);
  if (data_ == nullptr) throw std::bad_alloc();
#endif
  if (node < 0) return;
  const int error = placement_call.load()(data_, bytes, node);
  if (error == 0) {
    granted.fetch_add(1);
  } else {
    last_error.store(error);
    refused.fetch_add(1);
  }
}

Pages::~Pages() {
#if defined(__linux__)
  if (mapped_) (void)munmap(mapped_, mapped_bytes_);
#else
  std::free(mapped_);
#endif
}

PlacementCounts placement_counts() { return {granted.load(), refused.load(), last_error.load()}; }

void set_placement_call(PlacementCall ask) { placement_call.store(ask ? ask : ask_system); }

}  // namespace kt
