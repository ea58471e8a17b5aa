// Activations that a forward call keeps, so that its backward call need not recompute them.
#pragma once

#include <vector>

#include "base/rows.h"
#include "base/scratch.h"
#include "ops/pairs/routing.h"

namespace kt {

// One run of tokens of a call. Per pair: gate (where the experts have one) and up before the activation function, with
// biases and adapters [pairs, ld], and scaling * A x of
// each projection [pairs, rank] (rank: the largest of all slots and projections).
struct RetainedChunk {
  Routing routing;
  AlignedBuffer gate, up, low[kNumProjections];
  int64_t ld = 0, rank = 0;

  int64_t bytes() const;
  void reserve(const ExpertLayer& layer, const RoutedCall& call);
  Rows<float> gate_rows() const { return {static_cast<float*>(gate.data()), ld}; }
  Rows<float> up_rows() const { return {static_cast<float*>(up.data()), ld}; }
  Rows<float> low_rows(Projection part) const { return {static_cast<float*>(low[part].data()), rank}; }
};

// The arguments that determine sizes and contents of a call's retained activations, without the routing (which the
// chunks hold) and without the values of x and of the adapters.
struct CallFacts {
  struct Slot {
    int64_t ranks[kNumProjections];
    float scaling, dropout;
    uint64_t seed;
    int64_t first_expert;
    std::vector<int64_t> tokens;  // with dropout, whose mask depends on them
  };
  uint64_t layer = 0;  // ExpertLayer::id; 0: no forward call has finished
  int64_t tokens = 0, top_k = 0;
  DType x_dtype = DType::kOther;
  std::vector<Slot> slots;
  std::vector<int64_t> token_slots;  // of each token, -1: base
};

CallFacts facts_of(const ExpertLayer& layer, const RoutedCall& call);

// Later calls reuse the memory, because the system takes as long to clear fresh pages as a third of a forward pass.
// Memory is freed when recent calls (scratch.h) needed fewer or smaller chunks, and by `free_spare`.
struct Retained {
  Retained() = default;
  ~Retained();
  Retained(const Retained&) = delete;
  Retained& operator=(const Retained&) = delete;

  static void free_spare();
  static int64_t spare_bytes();
  RetainedChunk& add_chunk();
  void clear();
  int64_t bytes() const;

  CallFacts call;  // filled when the forward call has finished
  std::vector<RetainedChunk> chunks;
};

// The scope of one forward or backward call: counts calls, and frees memory at the end of a window (scratch.h).
class CallScope {
 public:
  CallScope() = default;
  ~CallScope();

 private:
  const OperationScope scope_{kOperationsOfExperts};
};

// Fails, and names the first difference, unless `retained` comes from a forward call with this layer, shape and dtype
// of x, routing (ids and weights), and slots (ranks, scaling, what the dropout mask depends on, and which token has
// which). `call` must have passed check_call, so that ids and slots are in range.
Status check_retained(const ExpertLayer& layer, const RoutedCall& call, const Retained& retained);

}  // namespace kt
