// A tiny Qwen3-MoE for the tests of the step: its tensors, a LoRA pool of adapters with different ranks, and the same
// decoder stack in double precision.
#pragma once

#include <functional>
#include <memory>
#include <numeric>

#include "packed_case.h"
#include "step/stack.h"

namespace kt_test {

// A contiguous tensor of float32 or bf16; by default absent.
class Tensor {
 public:
  Tensor() = default;
  Tensor(std::vector<int64_t> shape, bool bf16, float value) : shape_(std::move(shape)), bf16_(bf16) {
    const int64_t count = std::accumulate(shape_.begin(), shape_.end(), int64_t{1}, std::multiplies<>());
    wide_.assign(static_cast<size_t>(bf16 ? 0 : count), value);
    narrow_.assign(static_cast<size_t>(bf16 ? count : 0), kt::float_to_bf16(value));
  }

  bool present() const { return !shape_.empty(); }
  bool bf16() const { return bf16_; }
  int64_t count() const { return static_cast<int64_t>(bf16_ ? narrow_.size() : wide_.size()); }
  int64_t cols() const { return shape_.back(); }
  double operator[](int64_t i) const {
    const auto at = static_cast<size_t>(i);
    return bf16_ ? kt::bf16_to_float(narrow_[at]) : wide_[at];
  }
  void set(int64_t i, float value) {
    const auto at = static_cast<size_t>(i);
    if (bf16_) {
      narrow_[at] = kt::float_to_bf16(value);
    } else {
      wide_[at] = value;
    }
  }
  const void* row(int64_t index) const {
    const auto first = static_cast<size_t>(index * cols());
    return bf16_ ? static_cast<const void*>(narrow_.data() + first) : wide_.data() + first;
  }
  void copy_row(int64_t index, const Tensor& from, int64_t from_row) {
    std::memcpy(const_cast<void*>(row(index)), from.row(from_row), row_bytes());
  }
  bool same_row(int64_t index, const Tensor& other) const {
    return std::memcmp(row(index), other.row(index), row_bytes()) == 0;
  }
  bool operator==(const Tensor& other) const {  // of bits
    return shape_ == other.shape_ &&
           std::memcmp(row(0), other.row(0), static_cast<size_t>(count()) * (bf16_ ? 2 : 4)) == 0;
  }
  kt::TensorView view() const {
    return present() ? tensor_view(row(0), bf16_ ? kt::DType::kBf16 : kt::DType::kF32, shape_) : kt::TensorView{};
  }

 private:
  size_t row_bytes() const { return static_cast<size_t>(cols()) * (bf16_ ? 2 : 4); }

  std::vector<int64_t> shape_;
  bool bf16_ = false;
  std::vector<float> wide_;
  std::vector<uint16_t> narrow_;
};

using Row = std::vector<double>;

inline Row row_of(const Tensor& matrix, int64_t index) {
  Row row;
  for (int64_t k = 0; k < matrix.cols(); ++k) row.push_back(matrix[index * matrix.cols() + k]);
  return row;
}
inline void add(Row& to, const Row& row, double factor = 1) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += factor * row[i];
}

// The products of x with `rows` rows of a matrix, whose first element is values[first]; rows are `stride` apart.
template <class Values>
Row times(const Values& values, int64_t first, int64_t stride, int64_t rows, const Row& x) {
  Row y;
  for (int64_t n = 0; n < rows; ++n) {
    double sum = 0;
    for (size_t k = 0; k < x.size(); ++k) sum += values[first + n * stride + static_cast<int64_t>(k)] * x[k];
    y.push_back(sum);
  }
  return y;
}

struct Adapter {
  int64_t rank;
  float scaling;
};
constexpr Adapter kAdapters[] = {{6, 0.5f}, {1, 2.0f}, {4, -1.5f}};  // by slot of the LoRA pool
constexpr int64_t kLoraSlots = 3, kRank = 6;

constexpr int64_t kHidden = 72, kHeads = 4, kKeyHeads = 2, kSize = 18, kExperts = 6, kInner = 40;
constexpr int64_t kQueries = kHeads * kSize, kKeys = kKeyHeads * kSize, kQkv = kQueries + 2 * kKeys;
constexpr int64_t kEndsOfQkv[] = {kQueries, kQueries + kKeys, kQkv};
constexpr int64_t kVocabulary = 60, kPositions = 640, kKvSlots = 700;
constexpr int64_t kNanId = kVocabulary - 1;  // its embedding is NaN
constexpr double kEpsilon = 0x1p-17;

struct Layer {
  Tensor input_norm, qkv, qkv_bias, query_norm, key_norm, out, out_bias, post_norm, gate;
  std::shared_ptr<kt::ExpertLayer> experts;
  std::vector<double> projections[kt::kNumProjections];  // [E, rows, columns], as `experts` has them
  Tensor qkv_a, qkv_b, out_a, out_b, gate_up_a, gate_up_b, down_a, down_b;
};

// Keys and values of each layer; NaN where no token has been written.
struct KvPool {
  explicit KvPool(bool bf16, size_t layers)
      : keys(layers, Tensor({kKvSlots, kKeyHeads, kSize}, bf16, NAN)), values(keys) {}
  bool operator==(const KvPool&) const = default;

  std::vector<Tensor> keys, values;
};

class Model {
 public:
  // The first layer has no biases; the pool does not adapt the second one's `out` and experts.
  Model(bool bf16, int64_t top_k, bool normalises, Random& random)
      : bf16(bf16), top_k(top_k), normalises(normalises), layers(2), random_(random) {
    embedding = drawn({kVocabulary, kHidden}, 1);
    for (int64_t i = 0; i < kHidden; ++i) embedding.set(kNanId * kHidden + i, NAN);
    angles = Tensor({kPositions, kSize}, bf16, 0);
    for (int64_t i = 0; i < angles.count(); ++i) {
      const int64_t position = i / kSize, pair = i % (kSize / 2);
      const double angle = static_cast<double>(position) * std::pow(0.4, static_cast<double>(pair));
      angles.set(i, static_cast<float>(i % kSize < kSize / 2 ? std::cos(angle) : std::sin(angle)));
    }
    final_norm = drawn_norm(kHidden);
    for (Layer& layer : layers) draw(&layer, &layer == &layers[1]);
  }

  // Over the given KV pool; `with_lora`: and the LoRA pool.
  kt::Stack stack(const KvPool& pool, bool with_lora) const {
    kt::Stack stack{.heads = kHeads,
                    .top_k = top_k,
                    .normalises = normalises,
                    .groups = {},
                    .epsilon = static_cast<float>(kEpsilon),
                    .scaling = static_cast<float>(scaling),
                    .interleaved = false,
                    .lora_slots = with_lora ? kLoraSlots : 0,
                    .lora_rank = with_lora ? kRank : 0,
                    .embedding = embedding.view(),
                    .angles = angles.view(),
                    .final_norm = final_norm.view(),
                    .layers = {}};
    for (size_t i = 0; i < layers.size(); ++i) {
      const Layer& layer = layers[i];
      stack.layers.push_back({.input_norm = layer.input_norm.view(),
                              .post_norm = layer.post_norm.view(),
                              .attention = attention_of(layer, pool.keys[i], pool.values[i], with_lora),
                              .mlp = {},
                              .routed = experts_of(layer, with_lora)});
    }
    return stack;
  }

  const bool bf16;
  const int64_t top_k;
  const bool normalises;
  const double scaling = 0.25;
  Tensor embedding, angles, final_norm;
  std::vector<Layer> layers;

 private:
  Tensor drawn(std::vector<int64_t> shape, double size, double mean = 0) {
    Tensor tensor(std::move(shape), bf16, 0);
    for (int64_t i = 0; i < tensor.count(); ++i) tensor.set(i, static_cast<float>(mean + size * random_.normal()));
    return tensor;
  }
  Tensor drawn_norm(int64_t size) { return drawn({size}, 0.1, 1); }
  Tensor drawn_matrix(int64_t rows, int64_t cols) { return drawn({rows, cols}, 1 / std::sqrt(cols)); }

  // Matrices of the LoRA pool, of this shape in each slot: NaN where is_used(row, column, rank) is false.
  template <class IsUsed>
  Tensor drawn_lora(std::vector<int64_t> shape, double size, IsUsed&& is_used) {
    const int64_t cols = shape.back(), rows = shape[shape.size() - 2];
    shape.insert(shape.begin(), kLoraSlots);
    Tensor pool(std::move(shape), bf16, NAN);
    for (int64_t i = 0; i < pool.count(); ++i) {
      const Adapter& adapter = kAdapters[i / (pool.count() / kLoraSlots)];
      if (is_used(i / cols % rows, i % cols, adapter.rank)) pool.set(i, static_cast<float>(size * random_.normal()));
    }
    return pool;
  }
  // A: gate's and up's rows begin at rows 0 and R; those of queries, keys and values lie one after the other.
  Tensor drawn_a(std::vector<int64_t> shape) {
    const double size = 1 / std::sqrt(shape.back());
    return drawn_lora(std::move(shape), size, [](int64_t row, int64_t, int64_t rank) { return row % kRank < rank; });
  }
  Tensor drawn_qkv_a() {
    return drawn_lora({3 * kRank, kHidden}, 1 / std::sqrt(kHidden),
                      [](int64_t row, int64_t, int64_t rank) { return row < 3 * rank; });
  }
  Tensor drawn_b(std::vector<int64_t> shape) {
    return drawn_lora(std::move(shape), 0.3, [](int64_t, int64_t col, int64_t rank) { return col < rank; });
  }

  void draw(Layer* layer, bool is_second) {
    layer->input_norm = drawn_norm(kHidden);
    layer->qkv = drawn_matrix(kQkv, kHidden);
    layer->query_norm = drawn_norm(kSize);
    layer->key_norm = drawn_norm(kSize);
    layer->out = drawn_matrix(kHidden, kQueries);
    layer->post_norm = drawn_norm(kHidden);
    layer->gate = drawn_matrix(kExperts, kHidden);
    layer->qkv_a = drawn_qkv_a();
    layer->qkv_b = drawn_b({kQkv, kRank});
    if (is_second) {
      layer->qkv_bias = drawn({kQkv}, 0.5);
      layer->out_bias = drawn({kHidden}, 0.5);
    } else {
      layer->out_a = drawn_a({kRank, kQueries});
      layer->out_b = drawn_b({kHidden, kRank});
      layer->gate_up_a = drawn_a({kExperts, 2 * kRank, kHidden});
      layer->gate_up_b = drawn_b({kExperts, 2 * kInner, kRank});
      layer->down_a = drawn_a({kExperts, kRank, kInner});
      layer->down_b = drawn_b({kExperts, kHidden, kRank});
    }
    draw_experts(layer);
  }
  void draw_experts(Layer* layer) {
    const kt::Format format{};
    layer->experts = std::make_shared<kt::ExpertLayer>(kt::ExpertShape{kExperts, kHidden, kInner}, format, 1);
    for (const kt::Projection part : {kt::kGate, kt::kUp, kt::kDown}) {
      const kt::PackedShape shape = layer->experts->shape_of(part);
      for (int64_t e = 0; e < kExperts; ++e) {
        const PackedCase matrix(shape.rows, shape.cols, format, random_, 1 / std::sqrt(static_cast<float>(shape.cols)));
        pack_into(layer->experts.get(), matrix, e, part);
        for (int64_t i = 0; i < shape.rows * shape.cols; ++i)
          layer->projections[part].push_back(matrix.at(i / shape.cols, i % shape.cols));
      }
    }
  }

  static kt::LowRankPool low_rank_of(const Tensor& a, const Tensor& b, std::vector<int64_t> ends) {
    kt::LowRankPool pool;
    pool.a = a.view();
    pool.b = b.view();
    pool.parts = static_cast<int>(ends.size());
    std::copy(ends.begin(), ends.end(), pool.ends);
    return pool;
  }
  static kt::GroupedQuery attention_of(const Layer& layer, const Tensor& keys, const Tensor& values, bool with_lora) {
    kt::GroupedQuery attention{.qkv = {.weight = layer.qkv.view(), .bias = layer.qkv_bias.view(), .lora = {}},
                               .query_norm = layer.query_norm.view(),
                               .key_norm = layer.key_norm.view(),
                               .keys = keys.view(),
                               .values = values.view(),
                               .out = {.weight = layer.out.view(), .bias = layer.out_bias.view(), .lora = {}}};
    if (with_lora) {
      attention.qkv.lora = low_rank_of(layer.qkv_a, layer.qkv_b, {std::begin(kEndsOfQkv), std::end(kEndsOfQkv)});
      attention.out.lora = low_rank_of(layer.out_a, layer.out_b, {kHidden});
    }
    return attention;
  }
  static kt::RoutedExperts experts_of(const Layer& layer, bool with_lora) {
    kt::RoutedExperts routed{.gate = layer.gate.view(),
                             .bias = {},
                             .layer = layer.experts,
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

  Random& random_;
};

// The decoder stack in double precision, for one sequence.
class Exact {
 public:
  static constexpr size_t kNoLayer = 99;

  // `adapter`: a slot of the LoRA pool, or -1. The experts of the layer `without_experts` return zeros.
  Exact(const Model& model, const std::vector<int64_t>& ids, int64_t adapter, size_t without_experts = kNoLayer)
      : model_(model), adapter_(adapter) {
    for (const int64_t id : ids) hidden.push_back(row_of(model.embedding, id));
    for (size_t layer = 0; layer < model.layers.size(); ++layer) {
      add_attention(model.layers[layer]);
      if (layer == without_experts) continue;
      for (Row& row : hidden) add(row, routed(model.layers[layer], normed(row, model.layers[layer].post_norm)));
    }
    for (Row& row : hidden) row = normed(row, model.final_norm);
  }

  std::vector<Row> hidden;  // after the final norm, by token

 private:
  static Row normed(Row x, const Tensor& weight) {
    double squares = 0;
    for (const double value : x) squares += value * value;
    const double inverse = 1 / std::sqrt(squares / static_cast<double>(x.size()) + kEpsilon);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= inverse * weight[static_cast<int64_t>(i)];
    return x;
  }

  // y += the adapter's part. `a`, `b`: where its matrices begin.
  void adapt(const Tensor& pool_a, int64_t a, const Tensor& pool_b, int64_t b, const Row& x, Row* y) const {
    if (adapter_ < 0 || !pool_a.present()) return;
    const auto [rank, scaling] = kAdapters[adapter_];
    const Row low = times(pool_a, a, pool_a.cols(), rank, x);
    add(*y, times(pool_b, b, kRank, static_cast<int64_t>(y->size()), low), scaling);
  }

  Row qkv(const Layer& layer, const Row& x) const {
    Row y = times(layer.qkv, 0, kHidden, kQkv, x);
    if (layer.qkv_bias.present()) add(y, row_of(layer.qkv_bias, 0));
    if (adapter_ < 0) return y;
    const int64_t row = 3 * kRank * adapter_, rank = kAdapters[adapter_].rank;
    for (int64_t part = 0, begin = 0; part < 3; begin = kEndsOfQkv[part++]) {
      Row one(y.begin() + begin, y.begin() + kEndsOfQkv[part]);
      adapt(layer.qkv_a, (row + part * rank) * kHidden, layer.qkv_b, (adapter_ * kQkv + begin) * kRank, x, &one);
      std::copy(one.begin(), one.end(), y.begin() + begin);
    }
    return y;
  }

  // A head of `x`, after its norm, at a position.
  Row rotated(const Row& x, int64_t first, const Tensor& weight, int64_t position) const {
    const Row head = normed(Row(x.begin() + first, x.begin() + first + kSize), weight);
    const Row angles = row_of(model_.angles, position);
    constexpr size_t kHalf = kSize / 2;
    Row turned(kSize);
    for (size_t i = 0; i < kHalf; ++i) {
      turned[i] = head[i] * angles[i] - head[kHalf + i] * angles[kHalf + i];
      turned[kHalf + i] = head[kHalf + i] * angles[i] + head[i] * angles[kHalf + i];
    }
    return turned;
  }

  void add_attention(const Layer& layer) {
    std::vector<Row> keys, values;  // by token and key head
    for (size_t t = 0; t < hidden.size(); ++t) {
      const Row x = qkv(layer, normed(hidden[t], layer.input_norm));
      const auto position = static_cast<int64_t>(t);
      for (int64_t head = 0; head < kKeyHeads; ++head) {
        keys.push_back(rotated(x, kQueries + head * kSize, layer.key_norm, position));
        const auto value = x.begin() + kQueries + kKeys + head * kSize;
        values.emplace_back(value, value + kSize);
      }
      Row attended;
      for (int64_t head = 0; head < kHeads; ++head) {
        const Row query = rotated(x, head * kSize, layer.query_norm, position);
        const Row one = attend(query, keys, values, static_cast<size_t>(head / (kHeads / kKeyHeads)));
        attended.insert(attended.end(), one.begin(), one.end());
      }
      Row y = times(layer.out, 0, kQueries, kHidden, attended);
      if (layer.out_bias.present()) add(y, row_of(layer.out_bias, 0));
      adapt(layer.out_a, adapter_ * kRank * kQueries, layer.out_b, adapter_ * kHidden * kRank, attended, &y);
      add(hidden[t], y);
    }
  }
  Row attend(const Row& query, const std::vector<Row>& keys, const std::vector<Row>& values, size_t head) const {
    Row weights;
    for (size_t i = head; i < keys.size(); i += kKeyHeads)
      weights.push_back(model_.scaling * std::inner_product(query.begin(), query.end(), keys[i].begin(), 0.0));
    const double most = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (double& weight : weights) total += weight = std::exp(weight - most);
    Row out(kSize, 0.0);
    for (size_t i = 0; i < weights.size(); ++i) add(out, values[kKeyHeads * i + head], weights[i] / total);
    return out;
  }

  Row routed(const Layer& layer, const Row& x) const {
    const Row logits = times(layer.gate, 0, kHidden, kExperts, x);
    std::vector<size_t> order(kExperts);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
    double all = 0, chosen = 0;
    for (const size_t e : order) all += std::exp(logits[e]);
    order.resize(static_cast<size_t>(model_.top_k));
    for (const size_t e : order) chosen += std::exp(logits[e]);
    Row y(kHidden, 0.0);
    for (const size_t e : order)
      add(y, expert(layer, static_cast<int64_t>(e), x), std::exp(logits[e]) / (model_.normalises ? chosen : all));
    return y;
  }
  Row expert(const Layer& layer, int64_t e, const Row& x) const {
    const int64_t place = adapter_ * kExperts + e;
    Row inner[2];
    for (const int64_t part : {kt::kGate, kt::kUp}) {
      inner[part] = times(layer.projections[part], e * kInner * kHidden, kHidden, kInner, x);
      adapt(layer.gate_up_a, (place * 2 + part) * kRank * kHidden, layer.gate_up_b, (place * 2 + part) * kInner * kRank,
            x, &inner[part]);
    }
    Row h = inner[kt::kGate];
    for (size_t i = 0; i < h.size(); ++i) h[i] = h[i] / (1 + std::exp(-h[i])) * inner[kt::kUp][i];
    Row y = times(layer.projections[kt::kDown], e * kHidden * kInner, kInner, kHidden, h);
    adapt(layer.down_a, place * kRank * kInner, layer.down_b, place * kHidden * kRank, h, &y);
    return y;
  }

  const Model& model_;
  const int64_t adapter_;
};

}  // namespace kt_test
