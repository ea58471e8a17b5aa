// Scaled dot-product attention over keys and values that lie in SGLang's KV pool, read in place through slot indices.
//
//   score(key) = scaling * <q, k[key]>, or cap * tanh(score / cap) where cap > 0
//   out        = sum over the visible keys of softmax(score)[key] * v[key]
//
// Query t of a sequence sees the keys 0 to prefix + t, with a sliding window only the last `window` of these. N query
// heads share K key heads, G = N / K to each. Absorbed MLA is K = 1 with values that are the first columns of the keys'
// rows. All arithmetic is float32; a result is rounded once.
//
// A head may have a sink (gpt-oss): a score without a key or a value, which takes part in the softmax alone. It is
// added to the sums of all chunks, last.
//
// A query's result depends on its q, its keys and values in order, scaling, cap, dtypes and the instruction set only.
// The order of every sum:
//
//   score   one chain over the columns in ascending order: fma(q, k, sum); portable: product and sum rounded. AVX-512,
//           q and k bf16: vdpbf16ps for two adjacent columns. AMX, both bf16: TDPBF16PS for 32 adjacent columns
//   chunk   kChunkKeys keys at fixed places from key 0. A chunk's weights are 2^(score * log2(e) - the largest of the
//           chunk); with L lanes, lane l adds those of the keys l, l + L, ... of the chunk, then halves are added
//   output  of a chunk: one chain over its keys in ascending order: fma(weight, v, sum). AMX, all bf16:
//           kernels/amx/rows/attention.cpp
//   chunks  in ascending order, each scaled to the larger of both maxima and added
//
// Hidden keys enter no sum and no hidden value is read. So neither the other queries, the cut of a prompt into chunks
// of tokens, the places of the slots, threads, nor decode, extend or training change a bit. NaN and Inf in q reach that
// query alone; in a key or value the queries that see it.
//
// Kernels allocate nothing and start no threads.
#pragma once

#include <cstdint>

#include "kernels/tiles.h"

namespace kt {

// [rows][heads][columns] of float32 or bf16; columns adjacent, strides in elements.
struct HeadRows {
  void* data = nullptr;
  int64_t row_stride = 0, head_stride = 0;
  bool bf16 = false;

  template <class T>
  T* at(int64_t row, int64_t head) const {
    return static_cast<T*>(data) + row * row_stride + head * head_stride;
  }
};

// Queries of one sequence, and where its keys lie: key p in row slots[p] of the pool, or, without slots, in row
// first_key + p. There are prefix + queries keys.
struct KvSequence {
  int64_t first_query = 0, queries = 0;  // rows of q and out
  int64_t prefix = 0;                    // keys before the first query's own
  const int32_t* slots = nullptr;
  int64_t first_key = 0;

  int64_t keys() const { return prefix + queries; }
  int64_t row_of(int64_t key) const { return slots ? slots[key] : first_key + key; }
};

constexpr int64_t kChunkKeys = 512;

// The tensors of a call, and what it computes.
struct AttentionTensors {
  HeadRows q, keys, values, out;  // keys and values have one dtype
  float* log_sums = nullptr;      // [rows][heads] or null: log of the sum over the visible keys of exp(score)
  int64_t heads, key_heads;
  int64_t key_size, value_size;
  float scaling, logit_cap;
  const float* sinks = nullptr;  // [heads] or null: a score of each head that has no value
  int64_t window = 0;            // keys that a query sees at most, its own included; 0: all

  int64_t group() const { return heads / key_heads; }
};

// Some queries of a sequence with some of the query heads of one key head: a row for each (query, head).
struct AttentionBlock {
  KvSequence sequence;
  int64_t key_head;
  int64_t first_query, queries;  // of the sequence
  int64_t first_head, heads;     // of the key head's group

  int64_t rows() const { return queries * heads; }
  int64_t keys() const { return sequence.prefix + first_query + queries; }  // visible to the last query
  int64_t chunks() const { return (keys() + kChunkKeys - 1) / kChunkKeys; }
  // The first chunk that a query sees keys of.
  int64_t first_chunk(int64_t window) const {
    const int64_t first = sequence.prefix + first_query + 1 - window;
    return window == 0 || first < 0 ? 0 : first / kChunkKeys;
  }
};

// What an instruction set provides.
struct Attention {
  // Memory that the others need, aligned to a cache line, for a block of so many rows.
  int64_t (*workspace_bytes)(const AttentionTensors&, int64_t rows);
  // The results of a block, written to `out` and `log_sums`.
  void (*attend)(const AttentionTensors&, const AttentionBlock&, void* workspace);
  // The same in two steps: the chunks [first, first + count), each to `parts` + chunk * part_floats(); then the results
  // from all chunks' parts, which are overwritten. Chunks before the block's first one have no parts.
  int64_t (*part_floats)(const AttentionTensors&, int64_t rows);
  void (*attend_part)(const AttentionTensors&, const AttentionBlock&, int64_t first, int64_t count, float* parts,
                      void* workspace);
  void (*merge)(const AttentionTensors&, const AttentionBlock&, float* parts);
};

namespace portable {
extern const Attention kAttention;
}
namespace avx2 {
extern const Attention kAttention;
}
namespace avx512_base {
extern const Attention kAttention;
}
namespace avx512 {
extern const Attention kAttention;
}

}  // namespace kt
