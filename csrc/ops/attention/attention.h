// Attention of a whole batch (kernels/attention.h): decode and extend together, any prefixes, cut between the pool's
// threads. Serving reads SGLang's KV pool; training gives contiguous keys without slots.
#pragma once

#include <vector>

#include "base/scratch.h"
#include "base/status.h"
#include "base/views.h"
#include "kernels/attention.h"
#include "threads/plan.h"

namespace kt {

// With what a call computes.
struct AttentionEngine {
  const Attention& kernels;
  int num_threads;
};

// T rows of queries, N query heads, K key heads (N is a multiple of K). Last dimensions are contiguous, others may have
// any strides. Shapes fit (checked in bind).
struct AttentionCall {
  TensorView q;         // [T, N, D], float32 or bf16
  TensorView keys;      // [rows, K, D], float32 or bf16; SGLang's key buffer of a layer
  TensorView values;    // [rows, K, V], the keys' dtype; may share memory with the keys (absorbed MLA)
  TensorView out;       // [T, N, V], float32 or bf16. Rows of no sequence are not written
  TensorView log_sums;  // [T, N] float32, contiguous; or absent
  const KvSequence* sequences = nullptr;
  int64_t num_sequences = 0;
  float scaling = 1, logit_cap = 0;  // a cap of 0 or less: none
  TensorView sinks;                  // [N] float32, contiguous; or absent
  int64_t window = 0;                // keys that a query sees at most; 0: all
  TensorView chosen{};               // of gradients: [T, top_k] int32 as `select_keys` writes it; or absent
};

// An error that names the sequence and the value, if a sequence has queries outside of [0, tokens), queries of another
// sequence, or keys outside of [0, key_rows). Reads slots, but neither queries nor keys. One check serves all layers of
// a step.
Status check_sequences(const KvSequence* sequences, int64_t num_sequences, int64_t tokens, int64_t key_rows);

AttentionTensors tensors_of(const AttentionCall& call);

// A batch cut into tasks. The cut depends on the sequences, on the sizes of heads and on the number of threads: all
// layers of a step can share one, those with a sliding window too, whose tasks skip the chunks that nobody sees. Kept
// and prepared again for each batch, it allocates only while batches grow.
class AttentionWork {
 public:
  // `sequences` and their slots must stay valid until the last stage has ended.
  void prepare(const AttentionEngine& engine, const AttentionTensors& tensors, const KvSequence* sequences,
               int64_t num_sequences);

  // Floats of memory for partial results, aligned to a cache line, that all stages of a layer share; may be 0.
  int64_t parts_floats() const { return parts_floats_; }
  // For a plan of these stages alone: 1 where the work is too little for more.
  int num_threads() const { return num_threads_; }

  // Appends the stages of one layer to a plan, one or two: steps `first_step` and `first_step + 1`.
  void add_stages(Plan* plan, int first_step) const;
  // The body of these stages: `step` is 0 or 1, from first_step. `tensors`: of the layer, with the prepared sizes.
  void run(const AttentionTensors& tensors, float* parts, int step, const Range& range) const;

  size_t held_bytes() const { return held_bytes_of(blocks_, tasks_, cut_blocks_); }
  size_t needed_bytes() const { return needed_bytes_of(blocks_, tasks_, cut_blocks_); }

 private:
  // Chunks [first, first + count) of a block; count 0: the whole block, results included.
  struct Task {
    int64_t block, first, count;
  };
  struct Block {
    AttentionBlock queries;
    int64_t parts = -1;  // place of its partial results; -1: it has none
  };

  void add_blocks(const KvSequence& sequence, const AttentionTensors& tensors, int64_t most_rows);
  void add_tasks(const AttentionTensors& tensors, int64_t most_scores);

  const Attention* kernels_ = nullptr;
  int num_threads_ = 1;
  std::vector<Block> blocks_;
  std::vector<Task> tasks_;
  std::vector<int64_t> cut_blocks_;  // those with partial results
  int64_t workspace_bytes_ = 0, parts_floats_ = 0;
};

// One call, in a plan of its own. The sequences have been checked.
void attend(const AttentionEngine& engine, const AttentionCall& call);

}  // namespace kt
