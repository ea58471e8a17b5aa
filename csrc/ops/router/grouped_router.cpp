#include "ops/router/grouped_router.h"

#include <algorithm>

#include "base/largest.h"
#include "base/scratch.h"
#include "threads/pool.h"

namespace kt {
namespace {

constexpr int64_t kTaskLogits = 1 << 14;  // of a task, about: waking another thread takes as long
constexpr float kSumEpsilon = 1e-20f;     // as SGLang and Hugging Face add it

// The buffers of one token.
struct Token {
  float *scores, *ranks, *group_ranks, *best;
  int32_t *open, *ids;
};

void score(const Tiles& tiles, const GroupedRouting& routing, const float* logits, int64_t experts, float* scores) {
  if (routing.score == RouterScore::kSigmoid) return tiles.sigmoid(logits, experts, scores);
  tiles.exponential(logits, *std::max_element(logits, logits + experts), experts, scores);
  float sum = 0;
  for (int64_t e = 0; e < experts; ++e) sum += scores[e];
  for (int64_t e = 0; e < experts; ++e) scores[e] /= sum;
}

float rank_of_group(const float* ranks, int64_t size, bool sums_two) {
  float first = ranks[0], second = size > 1 ? ranks[1] : 0.0f;
  if (size > 1 && second > first) std::swap(first, second);
  for (int64_t i = 2; i < size; ++i) {
    if (ranks[i] > first) {
      second = first;
      first = ranks[i];
    } else if (ranks[i] > second) {
      second = ranks[i];
    }
  }
  return sums_two ? first + second : first;
}

void weigh(const GroupedRouting& routing, const float* scores, const int32_t* ids, int64_t top_k, float* weights) {
  float sum = 0;
  for (int64_t k = 0; k < top_k; ++k) {
    weights[k] = scores[ids[k]];
    sum += weights[k];
  }
  for (int64_t k = 0; k < top_k; ++k)
    weights[k] = (routing.normalises ? weights[k] / (sum + kSumEpsilon) : weights[k]) * routing.scaling;
}

void choose(const GroupedRouting& routing, int64_t experts, int64_t top_k, bool has_bias, const Token& t,
            float* weights) {
  const int64_t size = experts / routing.groups;
  for (int64_t g = 0; g < routing.groups; ++g)
    insert_by_size(rank_of_group(t.ranks + g * size, size, has_bias), static_cast<int32_t>(g), g, routing.top_groups,
                   t.group_ranks, t.open);
  std::sort(t.open, t.open + routing.top_groups);  // so that of equal ranks the first expert is chosen
  int64_t seen = 0;
  for (int64_t i = 0; i < routing.top_groups; ++i) {
    for (int64_t e = t.open[i] * size; e < (t.open[i] + 1) * size; ++e, ++seen)
      insert_by_size(t.ranks[e], static_cast<int32_t>(e), seen, top_k, t.best, t.ids);
  }
  weigh(routing, t.scores, t.ids, top_k, weights);
}

}  // namespace

void choose_from_groups(const DenseEngine& engine, const GroupedRouting& routing, const TensorView& logits,
                        const TensorView& bias, const TensorView& weights, const TensorView& ids) {
  const int64_t tokens = logits.shape[0], experts = logits.shape[1], top_k = weights.shape[1];
  if (tokens == 0 || top_k == 0) return;
  const OperationScope scope;
  const int64_t at_once = std::max<int64_t>(kTaskLogits / experts, 1);
  run_ranges(tokens, at_once, engine.num_threads, [&](int64_t first, int64_t count) {
    static thread_local Scratch floats, integers;
    Token token{};
    token.scores = floats.reserve<float>(2 * experts + routing.top_groups + top_k);
    token.ranks = token.scores + experts;
    token.group_ranks = token.ranks + experts;
    token.best = token.group_ranks + routing.top_groups;
    token.open = integers.reserve<int32_t>(routing.top_groups);
    for (int64_t t = first; t < first + count; ++t) {
      token.ids = ids.as<int32_t>() + t * top_k;
      const float* given = logits.as<const float>() + t * logits.strides[0];
      score(engine.tiles, routing, given, experts, token.scores);
      // Sigmoids of large logits are all 1: without a bias the logits themselves rank the experts.
      const float* unbiased = routing.score == RouterScore::kSigmoid ? given : token.scores;
      for (int64_t e = 0; e < experts; ++e)
        token.ranks[e] = bias.present() ? token.scores[e] + bias.as<const float>()[e] : unbiased[e];
      choose(routing, experts, top_k, bias.present(), token, weights.as<float>() + t * top_k);
    }
  });
}

void weigh_from_groups(const DenseEngine& engine, const GroupedRouting& routing, const TensorView& logits,
                       const TensorView& ids, const TensorView& weights) {
  const int64_t tokens = logits.shape[0], experts = logits.shape[1], top_k = weights.shape[1];
  if (tokens == 0 || top_k == 0) return;
  const OperationScope scope;
  run_ranges(tokens, std::max<int64_t>(kTaskLogits / experts, 1), engine.num_threads,
             [&](int64_t first, int64_t count) {
               static thread_local Scratch floats;
               float* scores = floats.reserve<float>(experts);
               for (int64_t t = first; t < first + count; ++t) {
                 score(engine.tiles, routing, logits.as<const float>() + t * logits.strides[0], experts, scores);
                 weigh(routing, scores, ids.as<const int32_t>() + t * top_k, top_k, weights.as<float>() + t * top_k);
               }
             });
}

}  // namespace kt
