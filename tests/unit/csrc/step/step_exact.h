// The decoder stack of step_model.h in float64, for one sequence.
#pragma once

#include "step_model.h"

namespace kt_test {

class ExactStep {
 public:
  static constexpr size_t kNoLayer = 99;

  // `adapter`: a slot of the LoRA pool, or -1. The routed experts of the layer `without_experts` return zeros.
  ExactStep(const Model& model, const std::vector<int64_t>& ids, int64_t adapter, size_t without_experts = kNoLayer)
      : model_(model), adapter_(adapter) {
    for (const int64_t id : ids) hidden.push_back(row_of(model.embedding, id));
    for (size_t i = 0; i < model.layers.size(); ++i) {
      const Layer& layer = model.layers[i];
      if (layer.is_delta) {
        add_gated_delta(layer);
      } else {
        model.kind.is_latent ? add_latent(layer) : add_grouped_query(layer);
      }
      for (Row& row : hidden) {
        const Row x = normed(row, layer.post_norm);
        if (layer.gate_up.weight.present()) add(row, mlp(layer, x), mlp_gate(layer, x));
        if (layer.is_routed && i != without_experts) add(row, routed(layer, x));
      }
    }
    for (Row& row : hidden) row = normed(row, model.final_norm);
  }

  std::vector<Row> hidden;  // after the final norm, by token

 private:
  Row normed(const Row& x, const Tensor& weight) const {
    Row weights = row_of(weight, 0);
    for (double& value : weights) value += model_.kind.is_hybrid ? 1 : 0;
    return kt_test::normed(x, weights, kEpsilon);
  }
  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
  static Row part(const Row& x, int64_t first, int64_t size) { return {x.begin() + first, x.begin() + first + size}; }
  static Row joined(Row first, const Row& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }
  Row rotated(const Row& x, size_t position) const {
    const Row angles = row_of(model_.angles, static_cast<int64_t>(position));
    return kt_test::rotated(x, angles, model_.kind.is_latent);
  }

  // y += the adapter's part. `a`, `b`: where its matrices begin.
  void adapt(const Tensor& pool_a, int64_t a, const Tensor& pool_b, int64_t b, const Row& x, Row* y) const {
    if (adapter_ < 0 || !pool_a.present()) return;
    const auto [rank, scaling] = kAdapters[adapter_];
    const Row low = times(pool_a, a, pool_a.cols(), rank, x);
    add(*y, times(pool_b, b, kRank, static_cast<int64_t>(y->size()), low), static_cast<double>(scaling));
  }
  Row product(const Linear& layer, const Row& x) const {
    Row y = times(layer.weight, 0, layer.in(), layer.out(), x);
    if (layer.bias.present()) add(y, row_of(layer.bias, 0));
    if (adapter_ < 0) return y;
    for (int64_t p = 0, begin = 0; p < layer.parts(); begin = layer.ends[static_cast<size_t>(p++)]) {
      Row one = part(y, begin, layer.ends[static_cast<size_t>(p)] - begin);
      const int64_t row = layer.parts() * kRank * adapter_ + p * kAdapters[adapter_].rank;
      adapt(layer.a, row * layer.in(), layer.b, (adapter_ * layer.out() + begin) * kRank, x, &one);
      std::copy(one.begin(), one.end(), y.begin() + begin);
    }
    return y;
  }

  static Row attend(const Row& query, const std::vector<Row>& keys, const std::vector<Row>& values, int64_t size) {
    const auto score = [&](int64_t i) {
      const Row& key = keys[static_cast<size_t>(i)];
      return dot(
          static_cast<int64_t>(key.size()), [&](int64_t c) { return query[static_cast<size_t>(c)]; },
          [&](int64_t c) { return key[static_cast<size_t>(c)]; });
    };
    const auto value = [&](int64_t i, int64_t c) { return values[static_cast<size_t>(i)][static_cast<size_t>(c)]; };
    return Attended(static_cast<int64_t>(keys.size()), size, kScaling, 0, score, value).out;
  }

  void add_grouped_query(const Layer& layer) {
    std::vector<Row> keys[kKeyHeads], values[kKeyHeads];
    const bool is_gated = model_.kind.is_hybrid;  // each head's gates are behind its query
    const int64_t distance = is_gated ? 2 * kSize : kSize, queries = kHeads * distance;
    for (size_t t = 0; t < hidden.size(); ++t) {
      const Row x = product(layer.qkv, normed(hidden[t], layer.input_norm));
      for (int64_t head = 0; head < kKeyHeads; ++head) {
        keys[head].push_back(rotated(normed(part(x, queries + head * kSize, kSize), layer.key_norm), t));
        values[head].push_back(part(x, queries + kKeys + head * kSize, kSize));
      }
      Row attended;
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t key_head = head / (kHeads / kKeyHeads);
        const Row query = rotated(normed(part(x, head * distance, kSize), layer.query_norm), t);
        Row result = attend(query, keys[key_head], values[key_head], kSize);
        for (size_t i = 0; is_gated && i < result.size(); ++i)
          result[i] *= sigmoid(x[static_cast<size_t>(head * distance + kSize) + i]);
        attended = joined(attended, result);
      }
      add(hidden[t], product(layer.out, attended));
    }
  }

  // Of a projection's result the columns of channel c, of the gate of a result, and of strength or decay of a head:
  // part after part, or of each key head with its value heads.
  int64_t channel_at(int64_t c) const {
    if (!model_.kind.by_key_head) return c;
    const int64_t size = c < 2 * kDeltaKeys ? kDeltaKey : kValues, first = c < kDeltaKeys ? 0 : kDeltaKeys;
    const int64_t of_values = c - 2 * kDeltaKeys, within = c < 2 * kDeltaKeys ? c - first : of_values;
    const int64_t before = c < kDeltaKeys ? 0 : c < 2 * kDeltaKeys ? kDeltaKey : 2 * kDeltaKey;
    return within / size * 2 * (kDeltaKey + kValues) + before + within % size;
  }
  int64_t gate_at(int64_t c) const {
    if (!model_.kind.by_key_head) return kChannels + c;
    return c / kValues * 2 * (kDeltaKey + kValues) + 2 * kDeltaKey + kValues + c % kValues;
  }
  int64_t rate_at(int64_t head, bool is_decay) const {
    if (!model_.kind.by_key_head) return head + (is_decay ? kDeltaHeads : 0);
    return (head / kGroup * 2 + (is_decay ? 1 : 0)) * kGroup + head % kGroup;
  }

  // SiLU of the filtered channels of token t.
  Row filtered(const Layer& layer, const std::vector<Row>& inputs, size_t t) const {
    Row y(kChannels, 0.0);
    for (int64_t c = 0; c < kChannels; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < kTaps; ++j) {
        const int64_t from = static_cast<int64_t>(t) - kTaps + 1 + j;
        if (from >= 0)
          sum += layer.filter[c * kTaps + j] * inputs[static_cast<size_t>(from)][static_cast<size_t>(channel_at(c))];
      }
      y[static_cast<size_t>(c)] = sum * sigmoid(sum);
    }
    return y;
  }
  static Row unit(Row x) {
    double sum = 1e-6;
    for (const double value : x) sum += value * value;
    for (double& value : x) value /= std::sqrt(sum);
    return x;
  }

  void add_gated_delta(const Layer& layer) {
    std::vector<Row> inputs;
    std::vector<Row> state(kDeltaHeads * kDeltaKey, Row(kDeltaValue, 0.0));
    for (size_t t = 0; t < hidden.size(); ++t) {
      const Row x = normed(hidden[t], layer.input_norm), rates = product(layer.gates, x);
      inputs.push_back(product(layer.inputs, x));
      const Row y = filtered(layer, inputs, t);
      Row results;
      for (int64_t head = 0; head < kDeltaHeads; ++head) {
        const Row query = unit(part(y, head / kGroup * kDeltaKey, kDeltaKey));
        const Row key = unit(part(y, kDeltaKeys + head / kGroup * kDeltaKey, kDeltaKey));
        const double raw = rates[static_cast<size_t>(rate_at(head, true))] + layer.rate_bias[head];
        const double decay = std::exp(-std::exp(layer.log_rate[head]) * std::log1p(std::exp(raw)));
        const double strength = sigmoid(rates[static_cast<size_t>(rate_at(head, false))]);
        Row change = part(y, 2 * kDeltaKeys + head * kDeltaValue, kDeltaValue), result(kDeltaValue, 0.0);
        Row* rows = &state[static_cast<size_t>(head * kDeltaKey)];
        for (int64_t k = 0; k < kDeltaKey; ++k) {
          for (double& value : rows[k]) value *= decay;
          add(change, rows[k], -key[static_cast<size_t>(k)]);
        }
        for (int64_t k = 0; k < kDeltaKey; ++k) {
          add(rows[k], change, strength * key[static_cast<size_t>(k)]);
          add(result, rows[k], query[static_cast<size_t>(k)] / std::sqrt(kDeltaKey));
        }
        result = kt_test::normed(result, row_of(layer.delta_norm, 0), kEpsilon);
        for (int64_t i = 0; i < kDeltaValue; ++i) {
          const double gate = inputs[t][static_cast<size_t>(gate_at(head * kDeltaValue + i))];
          result[static_cast<size_t>(i)] *= gate * sigmoid(gate);
        }
        results = joined(results, result);
      }
      add(hidden[t], product(layer.out, results));
    }
  }

  // An element of the adapter's A or B of kv_b_proj.
  double heads_a(const Layer& layer, int64_t row, int64_t col) const {
    return layer.heads.a[(adapter_ * kRank + row) * kLatent + col];
  }
  double heads_b(const Layer& layer, int64_t row, int64_t col) const {
    return layer.heads.b[(adapter_ * layer.heads.out() + row) * kRank + col];
  }

  // A head's query for the latents: the adapter's part is x B A.
  Row absorbed(const Layer& layer, int64_t head, const Row& query) const {
    Row y = times(layer.key_heads, head * kLatent * kNope, kNope, kLatent, query);
    if (adapter_ < 0) return y;
    for (int64_t r = 0; r < kAdapters[adapter_].rank; ++r) {
      double low = 0;
      for (int64_t i = 0; i < kNope; ++i)
        low += query[static_cast<size_t>(i)] * heads_b(layer, head * (kNope + kValue) + i, r);
      for (int64_t i = 0; i < kLatent; ++i)
        y[static_cast<size_t>(i)] += static_cast<double>(kAdapters[adapter_].scaling) * low * heads_a(layer, r, i);
    }
    return y;
  }
  // A head's output from its sum of latents.
  Row output(const Layer& layer, int64_t head, const Row& attended) const {
    Row y = times(layer.value_heads, head * kValue * kLatent, kLatent, kValue, attended);
    const int64_t b = (adapter_ * layer.heads.out() + head * (kNope + kValue) + kNope) * kRank;
    adapt(layer.heads.a, adapter_ * kRank * kLatent, layer.heads.b, b, attended, &y);
    return y;
  }

  void add_latent(const Layer& layer) {
    const int64_t rank = model_.kind.rank();
    std::vector<Row> keys, latents;
    for (size_t t = 0; t < hidden.size(); ++t) {
      const Row x = normed(hidden[t], layer.input_norm), compressed = product(layer.compress, x);
      const Row queries = product(layer.query, rank > 0 ? normed(part(compressed, 0, rank), layer.query_norm) : x);
      latents.push_back(normed(part(compressed, rank, kLatent), layer.latent_norm));
      keys.push_back(joined(latents.back(), rotated(part(compressed, rank + kLatent, kRope), t)));
      Row outputs;
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t first = head * (kNope + kRope);
        const Row query =
            joined(absorbed(layer, head, part(queries, first, kNope)), rotated(part(queries, first + kNope, kRope), t));
        outputs = joined(outputs, output(layer, head, attend(query, keys, latents, kLatent)));
      }
      add(hidden[t], product(layer.out, outputs));
    }
  }

  Row mlp(const Layer& layer, const Row& x) const {
    const Row both = product(layer.gate_up, x);
    const auto inner = static_cast<int64_t>(both.size() / 2);
    return product(layer.down, swiglu(part(both, 0, inner), part(both, inner, inner)));
  }
  double mlp_gate(const Layer& layer, const Row& x) const {
    return layer.mlp_gate.present() ? sigmoid(times(layer.mlp_gate, 0, kHidden, 1, x)[0]) : 1;
  }
  Row routed(const Layer& layer, const Row& x) const {
    const Kind& kind = model_.kind;
    const Row logits = times(layer.gate, 0, kHidden, kExperts, x);
    const Chosen chosen = kind.in_groups ? chosen_from_groups(logits, row_of(layer.bias, 0), *kind.groups(), kind.top_k)
                                         : chosen_by_softmax(logits, kind.top_k, kind.normalises);
    Row y(kHidden, 0.0);
    for (size_t i = 0; i < chosen.experts.size(); ++i)
      add(y, expert(layer, static_cast<int64_t>(chosen.experts[i]), x), chosen.weights[i]);
    return y;
  }
  Row expert(const Layer& layer, int64_t e, const Row& x) const {
    const int64_t place = adapter_ * kExperts + e;
    return gated_mlp(x, [&](kt::Projection which, const Row& in) {
      const auto cols = static_cast<int64_t>(in.size());
      const int64_t rows = which == kt::kDown ? kHidden : kInner;
      Row y = times(layer.projections[which], e * rows * cols, cols, rows, in);
      if (which == kt::kDown) {
        adapt(layer.down_a, place * kRank * kInner, layer.down_b, place * kHidden * kRank, in, &y);
      } else {
        adapt(layer.gate_up_a, (place * 2 + which) * kRank * kHidden, layer.gate_up_b,
              (place * 2 + which) * kInner * kRank, in, &y);
      }
      return y;
    });
  }

  static constexpr int64_t kGroup = kDeltaHeads / kDeltaKeyHeads, kValues = kGroup * kDeltaValue;
  const Model& model_;
  const int64_t adapter_;
};

}  // namespace kt_test
