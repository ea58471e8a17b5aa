// The device's memory: one reservation of two halves. Tensors hold addresses of the first half, which nobody may touch:
// a host that reads or writes it gets a segmentation fault, always. Kernels work in the second half, at a fixed
// distance.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "queue.h"

namespace late {

// Bytes FF 7F: NaN in every floating-point type, and an index far outside of any tensor.
void poison(void* place, size_t num_bytes);

class Memory {
 public:
  static Memory& get();

  // On a stream, in its order: the block holds poison when the stream gets there. Blocks that were freed on the stream
  // are reused at once. Returns nullptr if no room is left after a synchronization.
  void* allocate(size_t num_bytes, int64_t stream);
  // In the order of the block's stream it holds poison from now on.
  void free(void* place);
  // Whether blocks of the default stream keep their values until they are allocated again.
  void set_default_stream_keeps(bool keeps);
  // The block is not reused before what `stream` has queued when the block is freed.
  void used_on(void* place, int64_t stream);
  // Frees what a graph's capture allocated.
  void release(const Program* graph);

  bool holds(const void* place) const;
  void* for_kernels(const void* place) const;
  size_t total_bytes() const { return total_bytes_; }
  size_t used_bytes() const { return used_bytes_; }

 private:
  struct Owner {  // whose order a block's reuse follows
    int64_t stream = -1;
    const Program* graph = nullptr;
    auto operator<=>(const Owner&) const = default;
  };
  struct Block {
    size_t num_bytes = 0;
    Owner owner;
    std::vector<int64_t> other_streams;
  };
  struct Free {
    size_t num_bytes = 0;
    std::optional<Owner> owner;  // none: fresh memory, or memory that no queued work uses
    std::vector<Mark> after;
    bool keeps_values = false;  // until it is allocated again
  };
  using FreeBlocks = std::map<uintptr_t, Free>;  // by address, so that neighbours can be joined

  Memory();
  // The smallest that is large enough and that no marked work uses.
  FreeBlocks::iterator find(size_t num_bytes, const std::optional<Owner>& owner);
  // Adds a free block, which becomes one with neighbours like it.
  void put(uintptr_t place, Free block);
  Free take(FreeBlocks::iterator block);
  template <typename F>
  void change_all(F&& change);
  void give_up_owners();
  void queue_poison(uintptr_t place, size_t num_bytes, int64_t stream, bool beside);

  uintptr_t begin_ = 0;
  size_t total_bytes_ = 0;
  size_t used_bytes_ = 0;
  bool default_stream_keeps_ = false;
  std::unordered_map<uintptr_t, Block> blocks_;
  FreeBlocks free_;
  std::map<std::optional<Owner>, std::set<std::pair<size_t, uintptr_t>>> by_size_;  // the same blocks
};

}  // namespace late
