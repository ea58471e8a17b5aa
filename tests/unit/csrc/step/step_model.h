// A tiny decoder stack for the tests of the step, of every kind: grouped-query or latent attention, Gated DeltaNet,
// dense MLPs, shared and routed experts in any format, both routers, and a LoRA pool of adapters with different ranks.
#pragma once

#include <memory>

#include "packed_case.h"
#include "step/stack.h"
#include "tensor.h"

namespace kt_test {

struct Adapter {
  int64_t rank;
  float scaling;
};
constexpr Adapter kAdapters[] = {{6, 0.5f}, {1, 2.0f}, {4, -1.5f}};  // by slot of the LoRA pool
constexpr int64_t kLoraSlots = 3, kRank = 6;

constexpr int64_t kHidden = 72, kHeads = 4, kExperts = 6, kInner = 40, kShared = 28;
constexpr int64_t kVocabulary = 60, kPositions = 640, kKvSlots = 700;
constexpr int64_t kNanId = kVocabulary - 1;  // its embedding is NaN
constexpr double kEpsilon = 0x1p-17, kScaling = 0.25;
// Of grouped-query attention.
constexpr int64_t kKeyHeads = 2, kSize = 18;
constexpr int64_t kQueries = kHeads * kSize, kKeys = kKeyHeads * kSize, kQkv = kQueries + 2 * kKeys;
// Of latent attention.
constexpr int64_t kQueryRank = 20, kLatent = 34, kNope = 10, kRope = 6, kValue = 14;
// Of Gated DeltaNet: key heads and value heads, elements of a key and of a value, taps, slots of states.
constexpr int64_t kDeltaKeyHeads = 2, kDeltaHeads = 4, kDeltaKey = 12, kDeltaValue = 10, kTaps = 4, kStates = 12;
constexpr int64_t kDeltaKeys = kDeltaKeyHeads * kDeltaKey, kDeltaResults = kDeltaHeads * kDeltaValue;
constexpr int64_t kChannels = 2 * kDeltaKeys + kDeltaResults;

// What a model is made of.
struct Kind {
  std::string name;
  bool bf16 = false;
  int64_t top_k = 2;
  bool normalises = true;
  bool is_latent = false;
  bool compresses_queries = true;  // of latent attention
  bool is_mixed = false;           // a dense MLP in layer 0, shared beside routed experts in layer 1; else routed ones
  bool is_hybrid = false;          // Gated DeltaNet in layer 0, attention and shared experts in layer 1 have gates, and
                                   // norms are offsets from one
  bool by_key_head = false;        // of Gated DeltaNet
  bool in_groups = false;          // the router chooses by sigmoid, from groups with a bias; else by softmax
  kt::Format format{};             // of the routed experts

  int64_t rank() const { return compresses_queries ? kQueryRank : 0; }
  int64_t rotated_size() const { return is_latent ? kRope : kSize; }
  int64_t key_heads() const { return is_latent ? 1 : kKeyHeads; }
  int64_t key_size() const { return is_latent ? kLatent + kRope : kSize; }
  std::optional<kt::GroupedRouting> groups() const {
    if (!in_groups) return {};
    return kt::GroupedRouting{.score = kt::RouterScore::kSigmoid,
                              .groups = 3,
                              .top_groups = top_k == kExperts ? 3 : 2,
                              .normalises = normalises,
                              .scaling = 1.5f};
  }
};

// A linear layer with its adapters, whose columns of the result are parts: part p ends before column ends[p].
struct Linear {
  Tensor weight, bias, a, b;
  std::vector<int64_t> ends;

  int64_t in() const { return weight.cols(); }
  int64_t out() const { return ends.back(); }
  int64_t parts() const { return static_cast<int64_t>(ends.size()); }

  kt::LowRankPool pool() const {
    kt::LowRankPool pool;
    pool.a = a.view();
    pool.b = b.view();
    pool.parts = static_cast<int>(parts());
    std::copy(ends.begin(), ends.end(), pool.ends);
    return pool;
  }
  kt::StackLinear view(bool with_lora) const {
    kt::StackLinear linear{.weight = weight.view(), .bias = bias.view(), .lora = {}};
    if (with_lora) linear.lora = pool();
    return linear;
  }
};

struct Layer {
  Tensor input_norm, query_norm, key_norm, latent_norm, post_norm;
  Linear qkv, out;                // grouped-query; `out` is latent attention's too
  Linear compress, query;         // latent
  Tensor key_heads, value_heads;  // the same
  Linear inputs, gates;           // Gated DeltaNet; `out` is its too
  Tensor filter, log_rate, rate_bias, delta_norm;
  bool is_delta = false;
  Linear heads;          // only its adapters: those of kv_b_proj
  Linear gate_up, down;  // of the gated MLP
  Tensor mlp_gate;
  bool is_routed = true;
  Tensor gate, bias;
  std::shared_ptr<kt::ExpertLayer> experts[2];           // on one and on two memory nodes
  std::vector<double> projections[kt::kNumProjections];  // [E, rows, columns], as `experts` have them
  Tensor gate_up_a, gate_up_b, down_a, down_b;
};

// Keys and values of each layer; NaN where no token has been written. Latent attention has no values of its own. What
// Gated DeltaNet keeps of sequences, in layer 0 of a hybrid; NaN before their first tokens.
struct KvPool {
  KvPool(const Kind& kind, size_t layers)
      : keys(layers, Tensor({kKvSlots, kind.key_heads(), kind.key_size()}, kind.bf16, NAN)),
        values(kind.is_latent ? std::vector<Tensor>(layers) : keys) {
    if (!kind.is_hybrid) return;
    inputs = Tensor({kStates, kChannels, kTaps - 1}, kind.bf16, NAN);
    states = Tensor({kStates, kDeltaHeads, kDeltaKey, kDeltaValue}, false, NAN);
  }
  bool operator==(const KvPool&) const = default;

  std::vector<Tensor> keys, values;
  Tensor inputs, states;
};

class Model {
 public:
  // The first layer has no biases; the pool does not adapt the second one's output product, and its routed experts
  // only where the first layer has none.
  Model(const Kind& kind, Random& random) : kind(kind), layers(2), random_(&random) {
    embedding = drawn({kVocabulary, kHidden}, 1);
    for (int64_t i = 0; i < kHidden; ++i) embedding.set(kNanId * kHidden + i, NAN);
    const int64_t size = kind.rotated_size();
    angles = Tensor({kPositions, size}, kind.bf16, 0);
    for (int64_t i = 0; i < angles.count(); ++i) {
      const int64_t position = i / size, pair = i % (size / 2);
      const double angle = static_cast<double>(position) * std::pow(0.4, static_cast<double>(pair));
      angles.set(i, static_cast<float>(i % size < size / 2 ? std::cos(angle) : std::sin(angle)));
    }
    final_norm = drawn_norm(kHidden);
    for (Layer& layer : layers) draw(&layer, &layer == &layers[1]);
    random_ = nullptr;
  }

  // Over the given KV pool, with the experts on one or two memory nodes; `with_lora`: and the LoRA pool.
  kt::Stack stack(const KvPool& pool, bool with_lora, int num_nodes = 1) const {
    kt::Stack stack{.heads = kHeads,
                    .top_k = kind.top_k,
                    .normalises = kind.normalises,
                    .groups = kind.groups(),
                    .epsilon = static_cast<float>(kEpsilon),
                    .scaling = static_cast<float>(kScaling),
                    .offset_norms = kind.is_hybrid,
                    .interleaved = kind.is_latent,
                    .lora_slots = with_lora ? kLoraSlots : 0,
                    .lora_rank = with_lora ? kRank : 0,
                    .embedding = embedding.view(),
                    .angles = angles.view(),
                    .final_norm = final_norm.view(),
                    .layers = {}};
    for (size_t i = 0; i < layers.size(); ++i) {
      const Layer& layer = layers[i];
      kt::StackLayer made{.input_norm = layer.input_norm.view(),
                          .post_norm = layer.post_norm.view(),
                          .attention = {},
                          .mlp = {},
                          .routed = {}};
      if (layer.is_delta) {
        made.attention = gated_delta(layer, pool, with_lora);
      } else if (kind.is_latent) {
        made.attention = latent(layer, pool, i, with_lora);
      } else {
        made.attention = grouped_query(layer, pool, i, with_lora);
      }
      if (layer.gate_up.weight.present()) {
        made.mlp = {.gate_up = layer.gate_up.view(with_lora),
                    .down = layer.down.view(with_lora),
                    .gate = layer.mlp_gate.view()};
      }
      if (layer.is_routed) made.routed = routed(layer, with_lora, num_nodes);
      stack.layers.push_back(made);
    }
    return stack;
  }

  // The same model with each adapter in the next slot of the LoRA pool.
  Model with_moved_adapters() const {
    Model moved = *this;
    moved.moved_by = moved_by + 1;
    for (Layer& layer : moved.layers) {
      for (Linear* linear : {&layer.qkv, &layer.out, &layer.compress, &layer.query, &layer.heads, &layer.gate_up,
                             &layer.down, &layer.inputs, &layer.gates}) {
        move_slots(linear->a);
        move_slots(linear->b);
      }
      for (Tensor* experts : {&layer.gate_up_a, &layer.gate_up_b, &layer.down_a, &layer.down_b}) move_slots(*experts);
    }
    return moved;
  }

  const Kind kind;
  int64_t moved_by = 0;  // adapter i lies in slot (i + moved_by) % kLoraSlots
  Tensor embedding, angles, final_norm;
  std::vector<Layer> layers;

 private:
  static void move_slots(Tensor& pool) {
    if (!pool.present()) return;
    const Tensor before = pool;
    const int64_t rows = pool.count() / pool.cols(), of_slot = rows / kLoraSlots;
    for (int64_t row = 0; row < rows; ++row) pool.copy_row((row + of_slot) % rows, before, row);
  }

  Tensor drawn(std::vector<int64_t> shape, double size, double mean = 0) {
    Tensor tensor(std::move(shape), kind.bf16, 0);
    for (int64_t i = 0; i < tensor.count(); ++i) tensor.set(i, static_cast<float>(mean + size * random_->normal()));
    return tensor;
  }
  Tensor drawn_norm(int64_t size) { return drawn({size}, 0.1, kind.is_hybrid ? 0 : 1); }
  Tensor drawn_matrix(int64_t rows, int64_t cols) { return drawn({rows, cols}, 1 / std::sqrt(cols)); }

  // Matrices of the LoRA pool, of this shape in each slot: NaN where is_used(row, column, rank) is false.
  template <class IsUsed>
  Tensor drawn_lora(std::vector<int64_t> shape, double size, IsUsed&& is_used) {
    const int64_t cols = shape.back(), rows = shape[shape.size() - 2];
    shape.insert(shape.begin(), kLoraSlots);
    Tensor pool(std::move(shape), kind.bf16, NAN);
    for (int64_t i = 0; i < pool.count(); ++i) {
      const Adapter& adapter = kAdapters[i / (pool.count() / kLoraSlots)];
      if (is_used(i / cols % rows, i % cols, adapter.rank)) pool.set(i, static_cast<float>(size * random_->normal()));
    }
    return pool;
  }
  // The rows of A of a linear layer's parts lie one after the other.
  Tensor drawn_a(int64_t parts, int64_t in) {
    return drawn_lora({parts * kRank, in}, 1 / std::sqrt(in),
                      [&](int64_t row, int64_t, int64_t rank) { return row < parts * rank; });
  }
  // A of experts: gate's and up's rows begin at rows 0 and R.
  Tensor drawn_experts_a(int64_t parts, int64_t in) {
    return drawn_lora({kExperts, parts * kRank, in}, 1 / std::sqrt(in),
                      [](int64_t row, int64_t, int64_t rank) { return row % kRank < rank; });
  }
  Tensor drawn_b(std::vector<int64_t> shape) {
    return drawn_lora(std::move(shape), 0.3, [](int64_t, int64_t col, int64_t rank) { return col < rank; });
  }
  Linear drawn_linear(int64_t in, std::vector<int64_t> ends, bool with_bias, bool with_lora) {
    Linear linear;
    linear.ends = std::move(ends);
    linear.weight = drawn_matrix(linear.out(), in);
    if (with_bias) linear.bias = drawn({linear.out()}, 0.5);
    if (with_lora) draw_adapters(&linear, in);
    return linear;
  }
  void draw_adapters(Linear* linear, int64_t in) {
    linear->a = drawn_a(linear->parts(), in);
    linear->b = drawn_b({linear->out(), kRank});
  }

  void draw(Layer* layer, bool is_second) {
    layer->input_norm = drawn_norm(kHidden);
    layer->post_norm = drawn_norm(kHidden);
    layer->is_delta = kind.is_hybrid && !is_second;
    if (layer->is_delta) {
      draw_gated_delta(layer);
    } else {
      kind.is_latent ? draw_latent(layer, is_second) : draw_grouped_query(layer, is_second);
    }
    if (kind.is_hybrid && is_second) layer->mlp_gate = drawn_matrix(1, kHidden);
    if (kind.is_mixed) {
      const int64_t inner = is_second ? kShared : kInner;
      layer->gate_up = drawn_linear(kHidden, {inner, 2 * inner}, false, true);
      layer->down = drawn_linear(inner, {kHidden}, false, true);
      layer->is_routed = is_second;
    }
    if (!layer->is_routed) return;
    layer->gate = drawn_matrix(kExperts, kHidden);
    if (kind.in_groups) {
      layer->bias = Tensor({kExperts}, false, 0);
      for (int64_t i = 0; i < kExperts; ++i) layer->bias.set(i, random_->normal() / 4);
    }
    draw_experts(layer);
    if (is_second && !kind.is_mixed) return;
    layer->gate_up_a = drawn_experts_a(2, kHidden);
    layer->gate_up_b = drawn_b({kExperts, 2 * kInner, kRank});
    layer->down_a = drawn_experts_a(1, kInner);
    layer->down_b = drawn_b({kExperts, kHidden, kRank});
  }
  void draw_grouped_query(Layer* layer, bool is_second) {
    const int64_t queries = kQueries * (kind.is_hybrid ? 2 : 1);
    layer->qkv = drawn_linear(kHidden, {queries, queries + kKeys, queries + 2 * kKeys}, is_second, true);
    layer->query_norm = drawn_norm(kSize);
    layer->key_norm = drawn_norm(kSize);
    layer->out = drawn_linear(kQueries, {kHidden}, is_second, !is_second);
  }
  void draw_gated_delta(Layer* layer) {
    const bool whole = kind.by_key_head;
    const std::vector<int64_t> all = {kChannels + kDeltaResults}, both = {2 * kDeltaHeads};
    layer->inputs = drawn_linear(kHidden, whole ? all : std::vector<int64_t>{kChannels, all[0]}, false, true);
    layer->gates = drawn_linear(kHidden, whole ? both : std::vector<int64_t>{kDeltaHeads, both[0]}, false, true);
    layer->filter = drawn({kChannels, kTaps}, 0.5);
    layer->log_rate = drawn({kDeltaHeads}, 0.5);
    layer->rate_bias = drawn({kDeltaHeads}, 0.5);
    layer->delta_norm = drawn({kDeltaValue}, 0.1, 1);
    layer->out = drawn_linear(kDeltaResults, {kHidden}, false, true);
  }
  void draw_latent(Layer* layer, bool is_second) {
    const int64_t rank = kind.rank();
    layer->compress = drawn_linear(kHidden, {rank, rank + kLatent + kRope}, is_second, true);
    if (rank > 0) layer->query_norm = drawn_norm(rank);
    layer->query = drawn_linear(rank > 0 ? rank : kHidden, {kHeads * (kNope + kRope)}, is_second, true);
    layer->latent_norm = drawn_norm(kLatent);
    layer->key_heads = drawn({kHeads, kLatent, kNope}, 1 / std::sqrt(kNope));
    layer->value_heads = drawn({kHeads, kValue, kLatent}, 1 / std::sqrt(kLatent));
    layer->heads.ends = {kHeads * (kNope + kValue)};
    draw_adapters(&layer->heads, kLatent);
    layer->out = drawn_linear(kHeads * kValue, {kHidden}, is_second, !is_second);
  }
  void draw_experts(Layer* layer) {
    for (const int nodes : {1, 2}) {
      layer->experts[nodes - 1] =
          std::make_shared<kt::ExpertLayer>(kt::ExpertShape{kExperts, kHidden, kInner}, kind.format, nodes);
    }
    for (const kt::Projection part : {kt::kGate, kt::kUp, kt::kDown}) {
      const kt::PackedShape shape = layer->experts[0]->shape_of(part);
      for (int64_t e = 0; e < kExperts; ++e) {
        const PackedCase matrix(shape.rows, shape.cols, kind.format, *random_,
                                1 / std::sqrt(static_cast<float>(shape.cols)));
        for (const auto& experts : layer->experts) pack_into(experts.get(), matrix, e, part);
        for (int64_t i = 0; i < shape.rows * shape.cols; ++i)
          layer->projections[part].push_back(matrix.at(i / shape.cols, i % shape.cols));
      }
    }
  }

  kt::GroupedQuery grouped_query(const Layer& layer, const KvPool& pool, size_t index, bool with_lora) const {
    return {.qkv = layer.qkv.view(with_lora),
            .query_norm = layer.query_norm.view(),
            .key_norm = layer.key_norm.view(),
            .keys = pool.keys[index].view(),
            .values = pool.values[index].view(),
            .out = layer.out.view(with_lora),
            .is_gated = kind.is_hybrid};
  }
  kt::GatedDelta gated_delta(const Layer& layer, const KvPool& pool, bool with_lora) const {
    return {.shape = {.key_heads = kDeltaKeyHeads,
                      .value_heads = kDeltaHeads,
                      .key_size = kDeltaKey,
                      .value_size = kDeltaValue},
            .inputs = layer.inputs.view(with_lora),
            .gates = layer.gates.view(with_lora),
            .by_key_head = kind.by_key_head,
            .filter = layer.filter.view(),
            .log_rate = layer.log_rate.view(),
            .bias = layer.rate_bias.view(),
            .norm = layer.delta_norm.view(),
            .kept = {.inputs = pool.inputs.view(), .states = pool.states.view()},
            .out = layer.out.view(with_lora)};
  }
  static kt::Latent latent(const Layer& layer, const KvPool& pool, size_t index, bool with_lora) {
    return {.compress = layer.compress.view(with_lora),
            .query_norm = layer.query_norm.view(),
            .query = layer.query.view(with_lora),
            .latent_norm = layer.latent_norm.view(),
            .key_heads = layer.key_heads.view(),
            .value_heads = layer.value_heads.view(),
            .heads_lora = with_lora ? layer.heads.pool() : kt::LowRankPool{},
            .keys = pool.keys[index].view(),
            .out = layer.out.view(with_lora)};
  }
  static kt::RoutedExperts routed(const Layer& layer, bool with_lora, int num_nodes) {
    kt::RoutedExperts routed{.gate = layer.gate.view(),
                             .bias = layer.bias.view(),
                             .layer = layer.experts[num_nodes - 1],
                             .gate_up_a = {},
                             .gate_up_b = {},
                             .down_a = {},
                             .down_b = {}};
    if (with_lora) {
      routed.gate_up_a = layer.gate_up_a.view();
      routed.gate_up_b = layer.gate_up_b.view();
      routed.down_a = layer.down_a.view();
      routed.down_b = layer.down_b.view();
    }
    return routed;
  }

  Random* random_;  // while the model is drawn
};

}  // namespace kt_test
