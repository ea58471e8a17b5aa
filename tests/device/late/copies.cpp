// Copies between host and device. Pinned memory: the copy is queued, its source must stay as it is and its destination
// is poison until it ran. Pageable memory: a source is snapshot, a destination is waited for, as CUDA does.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <list>

#include "boundary.h"
#include "guarded.h"

namespace late {

namespace {

struct HostRead {  // by a queued copy to the device
  const std::byte* begin;
  const std::byte* end;
  Mark mark;
};

std::list<HostRead>& host_reads() {
  static auto* reads = new std::list<HostRead>;
  return *reads;
}

// A queued copy into memory that earlier copies still read is legal: these run first, so that poison harms none.
void run_reads_of(const std::byte* begin, const std::byte* end) {
  std::lock_guard lock(Device::get().mutex);
  std::vector<Mark> needed;
  std::erase_if(host_reads(), [](const HostRead& read) { return Device::get().is_done(read.mark); });
  for (const HostRead& read : host_reads()) {
    if (read.begin < end && begin < read.end) needed.push_back(read.mark);
  }
  for (const Mark& mark : needed) Device::get().await(mark);
}

uint64_t checksum(const std::byte* bytes, size_t num_bytes) {  // FNV-1a of words
  uint64_t sum = 0xCBF29CE484222325;
  for (size_t i = 0; i < num_bytes; i += sizeof sum) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min(sizeof word, num_bytes - i));
    sum = (sum ^ word) * 0x100000001B3;
  }
  return sum;
}

std::string described(const at::Tensor& tensor) { return c10::str(tensor.scalar_type(), " ", tensor.sizes()); }

std::pair<const std::byte*, const std::byte*> bytes_of(const at::Tensor& contiguous) {
  const auto* begin = static_cast<const std::byte*>(contiguous.const_data_ptr());
  return {begin, begin + contiguous.nbytes()};
}

void queue_from_pinned(const at::Tensor& from, const at::Tensor& to) {
  const auto [begin, end] = bytes_of(from);
  auto sums = std::make_shared<std::deque<uint64_t>>();  // one for each time that a graph with this copy was replayed
  auto when_queued = [begin, end, sums](Mark mark) {
    sums->push_back(checksum(begin, end - begin));
    host_reads().push_back(HostRead{begin, end, mark});
  };
  auto run = [from, to = for_kernels(to), sums] {
    const auto [begin, end] = bytes_of(from);
    const uint64_t sum = sums->front();
    sums->pop_front();
    TORCH_CHECK(checksum(begin, end - begin) == sum, "the pinned source changed after the copy was queued");
    to.copy_(from);
  };
  std::string name = "copy of pinned " + described(from) + " to the device";
  Device::get().queue(current_stream(), Task{std::move(name), guarded(std::move(run)), std::move(when_queued), {}});
}

void queue_to_pinned(const at::Tensor& from, const at::Tensor& to) {
  auto when_queued = [to](Mark) {
    run_reads_of(bytes_of(to).first, bytes_of(to).second);
    poison(to.mutable_data_ptr(), to.nbytes());
  };
  auto run = [from = for_kernels(from), to] { to.copy_(from); };
  std::string name = "copy of " + described(from) + " to pinned memory";
  Device::get().queue(current_stream(), Task{std::move(name), guarded(std::move(run)), std::move(when_queued), {}});
}

bool is_plain(const at::Tensor& from, const at::Tensor& to) {
  const bool has_same_bits = !from.is_conj() && !to.is_conj() && !from.is_neg() && !to.is_neg();
  return has_same_bits && from.sizes() == to.sizes();
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool is_as_it_lies = is_plain(from, to) && from.is_contiguous() && from.scalar_type() == to.scalar_type();
  if (is_as_it_lies && non_blocking && is_pinned(from.const_data_ptr())) {
    queue_from_pinned(from, to);
    return;
  }
  at::Tensor snapshot = without_autograd([&] { return from.clone(); });
  auto run = [snapshot, to = for_kernels(to)] { to.copy_(snapshot); };
  Device::get().queue(current_stream(),
                      Task{"copy of " + described(from) + " to the device", guarded(std::move(run)), {}, {}});
  if (!non_blocking) Device::get().await_hidden(current_stream(), "copy to the device");
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (non_blocking && to.is_contiguous() && is_plain(from, to) && is_pinned(to.const_data_ptr())) {
    queue_to_pinned(from, to);
    return;
  }
  Device::get().await_hidden(current_stream(), "copy to the host");
  without_autograd([&] { return to.copy_(for_kernels(from)); });
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  auto run = [from = for_kernels(from), to = for_kernels(to)] { to.copy_(from); };
  Device::get().queue(current_stream(), Task{"copy of " + described(from), guarded(std::move(run)), {}, {}});
}

}  // namespace

at::Tensor copy_between(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (from.device().type() != c10::kPrivateUse1) {
    copy_to_device(from, to, non_blocking);
  } else if (to.device().type() != c10::kPrivateUse1) {
    copy_to_host(from, to, non_blocking);
  } else {
    copy_on_device(from, to);
  }
  return to;
}

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr grown = allocator()->allocate(num_bytes);
  const size_t kept = std::min(num_bytes, impl->nbytes());
  if (kept > 0) {
    void* from = Memory::get().for_kernels(storage.data());
    void* to = Memory::get().for_kernels(grown.get());
    auto run = [from, to, kept] { std::memcpy(to, from, kept); };
    Device::get().queue(current_stream(), Task{"copy of a storage that grows", run, {}, {}});
  }
  impl->set_data_ptr_noswap(std::move(grown));
  impl->set_nbytes(num_bytes);
}

}  // namespace late
