#include "base/memory.h"

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

// Before the pages are first touched. Preferred, not bound: a node that is full gives way to another.
void prefer_node(void* data, size_t bytes, int node) {
#if defined(__linux__) && defined(SYS_mbind)
  constexpr int kPreferred = 1;  // MPOL_PREFERRED, linux/mempolicy.h
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long mask[16] = {};
  if (node < 0 || node >= 16 * kBits) return;
  mask[node / kBits] = 1ul << (node % kBits);
  (void)syscall(SYS_mbind, data, bytes, kPreferred, mask, 16ul * kBits, 0u);  // a refusal changes nothing but speed
#else
  (void)data, (void)bytes, (void)node;
#endif
}

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

AlignedBuffer::AlignedBuffer(size_t bytes, int node) : AlignedBuffer(bytes) {
  if (bytes >= 4 * kHugePage) prefer_node(data_, bytes, node);
}

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

}  // namespace kt
