#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
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
  put(begin_, Free{total_bytes_, std::nullopt, {}});
}

bool Memory::holds(const void* place) const {
  const auto address = reinterpret_cast<uintptr_t>(place);
  return address >= begin_ && address < begin_ + total_bytes_;
}

void* Memory::for_kernels(const void* place) const {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(place) + total_bytes_);
}

Memory::FreeBlocks::iterator Memory::find(size_t num_bytes, const std::optional<Owner>& owner) {
  const auto& sizes = by_size_[owner];
  for (auto it = sizes.lower_bound({num_bytes, 0}); it != sizes.end(); ++it) {
    const auto block = free_.find(it->second);
    const std::vector<Mark>& after = block->second.after;
    if (std::all_of(after.begin(), after.end(), [](const Mark& mark) { return Device::get().is_done(mark); })) {
      return block;
    }
  }
  return free_.end();
}

void Memory::put(uintptr_t place, Free block) {
  const auto is_like = [&block](const Free& other) {
    return other.owner == block.owner && other.keeps_values == block.keeps_values && other.after.empty() &&
           block.after.empty();
  };
  const auto next = free_.find(place + block.num_bytes);
  if (next != free_.end() && is_like(next->second)) block.num_bytes += take(next).num_bytes;
  auto last = free_.lower_bound(place);
  if (last != free_.begin() && (--last)->first + last->second.num_bytes == place && is_like(last->second)) {
    place = last->first;
    block.num_bytes += take(last).num_bytes;
  }
  by_size_[block.owner].insert({block.num_bytes, place});
  free_.emplace(place, std::move(block));
}

Memory::Free Memory::take(FreeBlocks::iterator block) {
  Free taken = std::move(block->second);
  by_size_[taken.owner].erase({taken.num_bytes, block->first});
  free_.erase(block);
  return taken;
}

template <typename F>
void Memory::change_all(F&& change) {
  FreeBlocks all;
  all.swap(free_);
  by_size_.clear();
  for (auto& [place, block] : all) {
    change(block);
    put(place, std::move(block));
  }
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
  Free rest = take(found);
  const bool is_poisoned = rest.owner.has_value() && rest.after.empty() && !rest.keeps_values;
  if (rest.num_bytes > rounded) {
    rest.num_bytes -= rounded;
    put(place + rounded, std::move(rest));
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
  freed.keeps_values = block.owner.stream == 0 && default_stream_keeps_;
  const bool is_of_graph = block.owner.graph != nullptr;  // whose replays go on using it
  if (!is_of_graph && freed.after.empty() && !freed.keeps_values) {
    queue_poison(address, block.num_bytes, block.owner.stream, true);
  }
  put(address, std::move(freed));
}

void Memory::set_default_stream_keeps(bool keeps) {
  std::lock_guard lock(Device::get().mutex);
  default_stream_keeps_ = keeps;
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
  change_all([graph](Free& block) {
    if (block.owner && block.owner->graph == graph) block.owner = std::nullopt;
  });
}

// As a caching allocator that found no memory: everything is awaited, then any stream may have any free block.
void Memory::give_up_owners() {
  Device::get().await_all();
  change_all([](Free& block) {
    if (!block.owner || block.owner->graph == nullptr) block = Free{block.num_bytes, std::nullopt, {}};
  });
}

}  // namespace late
