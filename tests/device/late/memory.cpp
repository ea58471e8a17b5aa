#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>
#include <new>
#include <string>

namespace late {

namespace {
constexpr size_t kAlignment = 512;
constexpr size_t kDefaultBytes = size_t{4} << 30;

size_t configured_bytes() {
  const char* given = std::getenv("LATE_MEMORY_BYTES");
  const size_t bytes = given == nullptr ? kDefaultBytes : std::stoull(given);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}
}  // namespace

void poison(void* place, size_t num_bytes) {
  constexpr uint64_t pattern = 0x7FFF7FFF7FFF7FFF;
  auto* bytes = static_cast<unsigned char*>(place);
  size_t i = 0;
  for (; i + sizeof pattern <= num_bytes; i += sizeof pattern) std::memcpy(bytes + i, &pattern, sizeof pattern);
  std::memcpy(bytes + i, &pattern, num_bytes - i);
}

Memory& Memory::get() {
  static Memory* memory = new Memory;  // never destroyed: tensors outlive static destructors
  return *memory;
}

Memory::Memory() : total_bytes_(configured_bytes()) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* place = mmap(nullptr, 2 * total_bytes_, PROT_NONE, flags, -1, 0);
  if (place == MAP_FAILED) throw std::bad_alloc();
  begin_ = reinterpret_cast<uintptr_t>(place);
  if (mprotect(for_kernels(place), total_bytes_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
  free_[begin_] = Free{total_bytes_, std::nullopt, {}};
}

bool Memory::holds(const void* place) const {
  const auto address = reinterpret_cast<uintptr_t>(place);
  return address >= begin_ && address < begin_ + total_bytes_;
}

void* Memory::for_kernels(const void* place) const {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(place) + total_bytes_);
}

std::map<uintptr_t, Memory::Free>::iterator Memory::find(size_t num_bytes, const std::optional<Owner>& owner) {
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const Free& block = it->second;
    const bool is_free = std::all_of(block.after.begin(), block.after.end(),
                                     [](const Mark& mark) { return Device::get().is_done(mark); });
    if (block.owner != owner || block.num_bytes < num_bytes || !is_free) continue;
    if (best == free_.end() || block.num_bytes < best->second.num_bytes) best = it;
  }
  return best;
}

void Memory::queue_poison(uintptr_t place, size_t num_bytes, int64_t stream, bool beside) {
  void* kernels = for_kernels(reinterpret_cast<void*>(place));
  Task task{"poison of memory", [kernels, num_bytes] { poison(kernels, num_bytes); }, {}, {}};
  beside ? Device::get().queue_beside(stream, std::move(task)) : Device::get().queue(stream, std::move(task));
}

void* Memory::allocate(size_t num_bytes, int64_t stream) {
  if (num_bytes == 0) return nullptr;
  std::lock_guard lock(Device::get().mutex);
  const size_t rounded = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const Program* graph = Device::get().captured_program(stream);
  const Owner owner{graph == nullptr ? stream : -1, graph};
  auto found = find(rounded, owner);
  if (found == free_.end()) found = find(rounded, std::nullopt);
  if (found == free_.end() && graph == nullptr) {
    give_up_owners();
    found = find(rounded, std::nullopt);
  }
  if (found == free_.end()) return nullptr;
  const uintptr_t place = found->first;
  Free rest = found->second;
  free_.erase(found);
  const bool is_poisoned = rest.owner.has_value() && rest.after.empty();
  if (rest.num_bytes > rounded) {
    rest.num_bytes -= rounded;
    free_[place + rounded] = rest;
  }
  blocks_[place] = Block{rounded, owner, {}};
  used_bytes_ += rounded;
  if (!is_poisoned) queue_poison(place, rounded, stream, false);
  // Nothing is there before the first replay. No queued work has memory that nobody owned.
  if (!is_poisoned && graph != nullptr) poison(for_kernels(reinterpret_cast<void*>(place)), rounded);
  return reinterpret_cast<void*>(place);
}

void Memory::free(void* place) {
  if (place == nullptr) return;
  std::lock_guard lock(Device::get().mutex);
  const auto address = reinterpret_cast<uintptr_t>(place);
  const Block block = std::move(blocks_.at(address));
  blocks_.erase(address);
  used_bytes_ -= block.num_bytes;
  Free freed{block.num_bytes, block.owner, {}};
  for (const int64_t stream : block.other_streams) freed.after.push_back(Device::get().mark(stream));
  if (block.owner.stream == 0 && default_stream_keeps_) freed.after.push_back(Mark{});  // long passed
  const bool is_of_graph = block.owner.graph != nullptr;                                // whose replays go on using it
  if (!is_of_graph && freed.after.empty()) queue_poison(address, block.num_bytes, block.owner.stream, true);
  join_neighbours(free_.insert_or_assign(address, std::move(freed)).first);
}

void Memory::set_default_stream_keeps(bool keeps) {
  std::lock_guard lock(Device::get().mutex);
  default_stream_keeps_ = keeps;
}

std::map<uintptr_t, Memory::Free>::iterator Memory::join_neighbours(std::map<uintptr_t, Free>::iterator middle) {
  const auto fits = [](const auto& left, const auto& right) {
    return left->first + left->second.num_bytes == right->first && left->second.owner == right->second.owner &&
           left->second.after.empty() && right->second.after.empty();
  };
  const auto next = std::next(middle);
  if (next != free_.end() && fits(middle, next)) {
    middle->second.num_bytes += next->second.num_bytes;
    free_.erase(next);
  }
  if (middle == free_.begin() || !fits(std::prev(middle), middle)) return middle;
  const auto last = std::prev(middle);
  last->second.num_bytes += middle->second.num_bytes;
  free_.erase(middle);
  return last;
}

void Memory::used_on(void* place, int64_t stream) {
  std::lock_guard lock(Device::get().mutex);
  const auto found = blocks_.find(reinterpret_cast<uintptr_t>(place));
  if (found == blocks_.end() || found->second.owner.stream == stream) return;
  std::vector<int64_t>& others = found->second.other_streams;
  if (std::find(others.begin(), others.end(), stream) == others.end()) others.push_back(stream);
}

void Memory::release(const Program* graph) {
  std::lock_guard lock(Device::get().mutex);
  for (auto& [place, block] : blocks_) {
    if (block.owner.graph == graph) block.owner = Owner{0, nullptr};
  }
  for (auto& [place, block] : free_) {
    if (block.owner && block.owner->graph == graph) block.owner = std::nullopt;
  }
}

// As a caching allocator that found no memory: everything is awaited, then any stream may have any free block.
void Memory::give_up_owners() {
  Device::get().await_all();
  for (auto& [place, block] : free_) {
    if (!block.owner || block.owner->graph == nullptr) block = Free{block.num_bytes, std::nullopt, {}};
  }
  for (auto it = free_.begin(); it != free_.end(); ++it) it = join_neighbours(it);
}

}  // namespace late
