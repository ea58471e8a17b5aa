// DeepSeek's routers (DeepSeek-V2, arXiv:2405.04434, section 2.2; DeepSeek-V3, arXiv:2412.19437, section 2.1.2), for
// serving and training alike: experts lie in groups, and only the experts of the best groups can be chosen.
//
// A token's result depends on its own logits alone, and has the same bits on every instruction set.
#pragma once

#include "ops/dense/dense.h"

namespace kt {

enum class RouterScore { kSigmoid, kSoftmax };

// Of a row of logits, E experts in G groups of adjacent ones:
//
//   score[e]   = sigmoid(logits[e]), or the softmax of the row
//   rank[e]    = score[e] + bias[e]; without a bias score[e], or, of sigmoids, the logit, which ranks alike
//   of a group = the sum of its two largest ranks with a bias, else its largest rank
//
// The `top_groups` largest groups are open. Of their experts the `top_k` with the largest rank are chosen, larger ones
// first; of equal ones the first, for groups too. weights[k] = score of the k-th, divided by (the sum of the chosen
// ones, in their order, + 1e-20) if `normalises`, times `scaling`.
//
// NaN or Inf among the logits gives weights that are not finite, or experts whose scores are 0 or 1; ids are valid.
struct GroupedRouting {
  RouterScore score;
  int64_t groups, top_groups;  // the experts of `top_groups` groups are at least top_k
  bool normalises;
  float scaling;
};

// logits [T, E] float32 with contiguous rows, bias [E] float32 or absent, weights [T, top_k] float32 and ids [T, top_k]
// int32, both contiguous.
void choose_from_groups(const DenseEngine& engine, const GroupedRouting& routing, const TensorView& logits,
                        const TensorView& bias, const TensorView& weights, const TensorView& ids);

// The weights of the experts `ids`, which are read, of any groups: each in [0, E). The bias has no part in them. Where
// they are those that `choose_from_groups` chooses, in its order, the weights have its bits.
void weigh_from_groups(const DenseEngine& engine, const GroupedRouting& routing, const TensorView& logits,
                       const TensorView& ids, const TensorView& weights);

}  // namespace kt
