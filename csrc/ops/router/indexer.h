// The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1), for serving and training
// alike: it chooses the keys that a query sees.
//
//   score(query, key) = sum over heads of weight[head] * max(<q[head], k>, 0)
//
// Of its visible keys a query sees the `top_k` with the largest scores, of equal scores the first. A query with at most
// `top_k` visible keys sees them all, and its scores are not computed. Attention takes the chosen keys in the order of
// their positions: where all are chosen, its result has the bits of dense attention.
//
// The published program rotates q and k by a Hadamard matrix, which is orthogonal and so changes no score, and rounds
// both to fp8. Neither is done here, as in Hugging Face's module.
//
// All arithmetic is float32. A score is one chain of additions over the columns, then one over the heads, both
// ascending. It depends on its query, its key and the instruction set only. A score that is NaN counts as the smallest.
#pragma once

#include <vector>

#include "base/views.h"
#include "kernels/attention.h"
#include "ops/dense/dense.h"

namespace kt {

// T tokens, N heads of D elements, of which the first R are rotated, P positions.
struct IndexRows {
  TensorView q;                       // [T, N, D], changed in place: rotated
  TensorView k;                       // [T, D], changed in place: LayerNorm (Ba et al. 2016) and rotated
  TensorView norm_weight, norm_bias;  // [D] float32, contiguous
  TensorView angles;                  // [P, R], contiguous: cosines, then sines of each position; q's dtype
  TensorView positions;               // [T] int64, each 0 to P - 1
  bool interleaved;                   // the rotation is of adjacent elements
};
void prepare_index_rows(const DenseEngine& engine, const IndexRows& rows);

// 1 / sqrt(N D): the scaling of `Selection` in all models that have an indexer.
float index_scaling(int64_t heads, int64_t size);

struct Selection {
  TensorView q;        // [T, N, D], float32 or bf16
  TensorView weights;  // [T, N] float32
  TensorView keys;     // [rows, D], q's dtype; the sequences' keys
  float scaling;       // of every weight
  const KvSequence* sequences;
  int64_t num_sequences;
  TensorView chosen;  // [T, top_k] int32, contiguous
};

// Whether a query of the sequences has more than `top_k` visible keys.
bool needs_selection(const std::vector<KvSequence>& sequences, int64_t top_k);

// Writes the rows of the chosen keys, by ascending position, for the queries with more than `top_k` visible keys; the
// other queries' rows of `chosen` are not written. The sequences have been checked.
void select_keys(const DenseEngine& engine, const Selection& selection);

// The batch as sequences of which each query sees the keys that it chose: of every sequence the queries that see all
// of their keys, and each further query alone, with its row of `chosen` [T, top_k], which may be written later.
void cut_at_chosen(const std::vector<KvSequence>& sequences, const int32_t* chosen, int64_t top_k,
                   std::vector<KvSequence>* parts);

}  // namespace kt
