// With g the gradient of the output at a token, and p one of its pairs (expert e, routing weight w):
//
//   d h     = W_down^T g (+ LoRA)        computed without w
//   d w     = <h, d h> + <b_down, g>     <y, g> of the pair's output y, whose bias b_down may be
//   d up    = w * d h * df/dup           h = f(gate, up), kernels/activation.h; of SwiGLU silu(gate)
//   d gate  = w * d h * df/dgate         of SwiGLU up * silu'(gate)
//   d x     = W_gate^T d gate + W_up^T d up (+ LoRA), summed over the token's pairs in their order
//   d A, B  = products over the pairs of an (expert, slot) group, in token order
//
// Backward reads the same packed weights as forward. A product with the transposed matrix transposes one small panel at
// a time, on the stack (kernels/generic/transposed.h). Its other operand is a gradient that `transpose_rows` has
// transposed.
#include <algorithm>
#include <cstring>

#include "ops/experts/forward.h"
#include "ops/experts/forward_pass.h"
#include "ops/experts/lora.h"
#include "ops/pairs/dropout.h"

namespace kt {
namespace {

// The transposed operand of a transposed product, in the type of the multiplication.
struct Transposed {
  float* f32 = nullptr;
  uint16_t* bf16 = nullptr;
  int64_t ld = 0;  // padded number of tokens
};

struct BackwardBuffers {
  Scratch x, grad, gate, up, h, dh, by_up, low_down, y;
  Scratch dlow[kNumProjections], transposed[kNumProjections];
  static BackwardBuffers& all() {
    static thread_local BackwardBuffers buffers;
    return buffers;
  }
  static BackwardBuffers& own() {
    static thread_local BackwardBuffers buffers;
    return buffers;
  }
};

// Arrays of one expert's pairs: rows of `hidden` or `inner` floats, or of the rank. Without data where not needed.
struct ExpertRows {
  Rows<float> x, grad, gate, up, h, dh;
  Rows<float> by_up;     // up's part of d x, where the weights lie on several nodes
  Rows<float> low_down;  // scaled by the routing weight
  Rows<float> dlow[kNumProjections];
  Transposed grad_transposed, gate_transposed, up_transposed;
};

// Lane l takes the elements l, l + 8, l + 16, ...; then the lanes in order.
double dot(const float* a, const float* b, int64_t count) {
  constexpr int64_t kLanes = 8;
  double sums[kLanes] = {}, sum = 0;
  for (int64_t i = 0; i < count; ++i) sums[i % kLanes] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  for (const double lane : sums) sum += lane;
  return sum;
}

class BackwardPass {
 public:
  BackwardPass(const Engine& engine, const RoutedCall& call, const TensorView& grad_out, const RetainedChunk& chunk,
               const RoutedGradients& gradients)
      : engine_(engine),
        call_(call),
        grad_out_(grad_out),
        chunk_(chunk),
        routing_(chunk.routing),
        gradients_(gradients),
        hidden_(engine.layer.shape().hidden),
        inner_(engine.layer.shape().intermediate),
        ld_hidden_(activation_stride(hidden_)),
        ld_inner_(activation_stride(inner_)),
        activation_(engine.layer.mlp().activation),
        has_gate_(activation_.has_gate()),
        bf16_(call.x.dtype == DType::kBf16 && engine.tiles.multiply_transposed_bf16 != nullptr),
        lora_in_(max_rank(call.slots, kGate) > 0 || max_rank(call.slots, kUp) > 0),
        lora_down_(max_rank(call.slots, kDown) > 0) {}

  // The same job first runs the check `finite`, if not null. Throws NotFinite before anything is written to the
  // gradients.
  void run(const FiniteCheck* finite) {
    y_ = {BackwardBuffers::all().y.reserve<float>(routing_.num_pairs() * ld_hidden_), ld_hidden_};
    const Plan plan = backward_plan(engine_.layer, routing_, engine_.num_threads, finite ? finite->num_parts() : 0);
    if (plan.has(kLoad)) reserve_all();
    kt::run(plan, [&](int step, const Range& range) {
      const int64_t item = range.item;
      const ColumnRange columns{range.first * kColumnsInTask, range.count * kColumnsInTask};
      switch (step) {
        case kCheck:
          return finite->check_part(item);
        case kWholeExpert:
          return whole_expert(routing_.by_size[static_cast<size_t>(item)]);
        case kLoad:
          return load(item, rows_of(item));
        case kDownBackward:
          return down_columns(item, rows_of(item), columns, {range.node, 1});
        case kActivationBackward:
          return activation(item, rows_of(item));
        case kInputBackward:
          return input_columns(item, rows_of(item), columns, {range.node, 1});
        default:
          return sum_up(item);
      }
    });
  }

 private:
  // Nodes [first, first + count) of the layer: a transposed product sums over their pieces, and resumes from the sums
  // of the nodes before `first`.
  struct Nodes {
    int first, count;
  };
  Nodes all_nodes() const { return {0, engine_.layer.num_nodes()}; }
  bool is_last(const Nodes& nodes) const { return nodes.first + nodes.count == engine_.layer.num_nodes(); }

  const PairRange& run_of(int64_t index) const { return routing_.experts[static_cast<size_t>(index)]; }

  // Arrays for `pairs` pairs whose transposed rows have `transposed` tokens in all, padding included.
  ExpertRows reserve(BackwardBuffers* b, int64_t pairs, int64_t transposed) const {
    ExpertRows rows{};
    const auto floats = [pairs](Scratch& buffer, int64_t ld) {
      return Rows<float>{buffer.reserve<float>(pairs * ld), ld};
    };
    if (lora_in_) rows.x = floats(b->x, ld_hidden_);
    rows.grad = floats(b->grad, ld_hidden_);
    if (has_gate_) rows.gate = floats(b->gate, ld_inner_);
    rows.up = floats(b->up, ld_inner_);
    if (lora_down_) rows.h = floats(b->h, ld_inner_);
    rows.dh = floats(b->dh, ld_inner_);
    if (has_gate_ && engine_.layer.num_nodes() > 1) rows.by_up = floats(b->by_up, ld_hidden_);
    rows.low_down = floats(b->low_down, chunk_.rank);
    for (int part = 0; part < kNumProjections; ++part) rows.dlow[part] = floats(b->dlow[part], chunk_.rank);
    const auto transpose = [&](Scratch& buffer, int64_t cols) {
      Transposed made;
      const int64_t count = round_up(cols, kBlockRows) * transposed;
      (bf16_ ? (void)(made.bf16 = buffer.reserve<uint16_t>(count)) : (void)(made.f32 = buffer.reserve<float>(count)));
      return made;
    };
    rows.grad_transposed = transpose(b->transposed[0], hidden_);
    if (has_gate_) rows.gate_transposed = transpose(b->transposed[1], inner_);
    rows.up_transposed = transpose(b->transposed[2], inner_);
    return rows;
  }

  void reserve_all() {
    transposed_begin_.assign(1, 0);
    for (const PairRange& run : routing_.experts)
      transposed_begin_.push_back(transposed_begin_.back() + round_up(run.size(), kTokenUnit));
    all_ = reserve(&BackwardBuffers::all(), routing_.num_pairs(), transposed_begin_.back());
  }

  ExpertRows rows_of(int64_t index) const {
    const int64_t at = run_of(index).begin, transposed = transposed_begin_[static_cast<size_t>(index)];
    ExpertRows rows = all_;
    for (Rows<float>* array :
         {&rows.x, &rows.grad, &rows.gate, &rows.up, &rows.h, &rows.dh, &rows.by_up, &rows.low_down}) {
      if (array->data) *array = array->from(at);
    }
    for (Rows<float>& array : rows.dlow) array = array.from(at);
    const auto move = [&](Transposed& t, int64_t cols) {
      if (t.bf16) t.bf16 += transposed * round_up(cols, kBlockRows);
      if (t.f32) t.f32 += transposed * round_up(cols, kBlockRows);
    };
    move(rows.grad_transposed, hidden_);
    move(rows.gate_transposed, inner_);
    move(rows.up_transposed, inner_);
    return rows;
  }

  void transpose(Rows<const float> rows, int64_t count, int64_t cols, Transposed* transposed) const {
    transposed->ld = round_up(count, kTokenUnit);
    if (transposed->bf16) {
      engine_.tiles.transpose_rows_bf16(rows, count, cols, transposed->bf16, transposed->ld);
    } else {
      engine_.tiles.transpose_rows(rows, count, cols, transposed->f32, transposed->ld);
    }
  }

  // out[m, j] (+)= in times column columns.first + j of the matrix, for the run's rows m.
  void multiply_transposed(const PairRange& run, Projection part, const Transposed& in, const Nodes& nodes,
                           ColumnRange columns, Rows<float> out, bool accumulate) const {
    PackedBlocks pieces[kMaxNodes];
    for (int i = 0; i < nodes.count; ++i) pieces[i] = engine_.layer.piece(run.expert, part, nodes.first + i).blocks;
    const int64_t ld = round_up(run.size(), kTokenUnit);
    // Elements of `in` for the matrix rows of earlier nodes: `ld` per row, in both types.
    const int64_t skipped = engine_.layer.span(part, nodes.first).first * kBlockRows * ld;
    const auto product = [&]<class T>(const T* from) {
      return TransposedProduct<T>{.rows = run.size(),
                                  .in = from + skipped,
                                  .ld = ld,
                                  .pieces = pieces,
                                  .num_pieces = nodes.count,
                                  .first_col = columns.first,
                                  .cols = columns.count,
                                  .out = out,
                                  .accumulate = accumulate,
                                  .resume = nodes.first > 0};
    };
    if (in.bf16) {
      engine_.tiles.multiply_transposed_bf16(product(in.bf16));
    } else {
      engine_.tiles.multiply_transposed(product(in.f32));
    }
  }

  const LoraSlot& slot_of(const PairRange& group) const { return call_.slots[static_cast<size_t>(group.slot)]; }
  LoraFactors factors_of(const PairRange& group, Projection part) const {
    return {engine_.tiles, slot_of(group), part, group.expert, group.size()};
  }

  void load(int64_t index, ExpertRows rows) const {
    const PairRange& run = run_of(index);
    for (int64_t m = 0; m < run.size(); ++m) {
      const int64_t token = routing_.token[static_cast<size_t>(run.begin + m)];
      widen_row(engine_.tiles, grad_out_, token, rows.grad.row(m));
      if (rows.x.data) widen_row(engine_.tiles, call_.x, token, rows.x.row(m));
    }
    transpose(rows.grad, run.size(), hidden_, &rows.grad_transposed);
    for_each_group(routing_, index, [&](const PairRange& group, int64_t m) {
      lora_up_backward(factors_of(group, kDown), rows.grad.from(m), rows.dlow[kDown].from(m));
    });
  }

  // dh = W_down^T g (+ LoRA), some columns.
  void down_columns(int64_t index, const ExpertRows& rows, ColumnRange columns, const Nodes& nodes) const {
    columns.count = std::min(columns.count, round_up(inner_, kColumnUnit) - columns.first);
    const Rows<float> out = rows.dh.from(0, columns.first);
    multiply_transposed(run_of(index), kDown, rows.grad_transposed, nodes, columns, out, false);
    if (!is_last(nodes)) return;
    columns.count = std::min(columns.count, inner_ - columns.first);
    for_each_group(routing_, index, [&](const PairRange& group, int64_t m) {
      low_backward(group, kDown, rows.dlow[kDown].from(m), columns, out.from(m));
    });
  }

  // Overwrites gate and up with their gradients, and computes the gradients of the routing weights and of the adapters.
  void activation(int64_t index, ExpertRows rows) const {
    const PairRange& run = run_of(index);
    const int64_t rank = chunk_.rank;
    const auto bytes = static_cast<size_t>(inner_) * sizeof(float);
    const float* bias = engine_.layer.bias(run.expert, kDown);
    for (int64_t m = 0; m < run.size(); ++m) {
      const int64_t pair = run.begin + m;
      const float weight = routing_.weight[static_cast<size_t>(pair)];
      float *gate = has_gate_ ? rows.gate.row(m) : nullptr, *up = rows.up.row(m);
      if (has_gate_) std::memcpy(gate, chunk_.gate_rows().row(pair), bytes);
      std::memcpy(up, chunk_.up_rows().row(pair), bytes);
      if (rows.h.data) engine_.tiles.activate(activation_, gate, up, inner_, rows.h.row(m));
      double weight_grad = engine_.tiles.activate_backward(activation_, gate, up, rows.dh.row(m), weight, inner_);
      if (bias) weight_grad += dot(bias, rows.grad.row(m), hidden_);
      set_weight_gradient(pair, static_cast<float>(weight_grad));
      for (int64_t r = 0; lora_down_ && r < rank; ++r) {
        rows.low_down.row(m)[r] = weight * chunk_.low_rows(kDown).row(pair)[r];
        rows.dlow[kDown].row(m)[r] *= weight;
      }
    }
    if (has_gate_) transpose(rows.gate, run.size(), inner_, &rows.gate_transposed);
    transpose(rows.up, run.size(), inner_, &rows.up_transposed);
    for_each_group(routing_, index, [&](const PairRange& group, int64_t m) { adapter_gradients(group, m, rows); });
  }

  // Of a group whose first pair is row `m` of the expert's.
  void adapter_gradients(const PairRange& group, int64_t m, const ExpertRows& rows) const {
    const LoraSlot& slot = slot_of(group);
    const auto into = [&](Projection part) {
      const LoraSlot& gradients = gradients_.slots[static_cast<size_t>(group.slot)];
      return LoraFactors{engine_.tiles, gradients, part, group.expert, group.size()};
    };
    for (const Projection part : {kGate, kUp}) {
      if (!slot.pairs[part].present()) continue;  // without any such pair there are no rows of x
      const Rows<const float> grad = (part == kGate ? rows.gate : rows.up).from(m);
      const Rows<float> dlow = rows.dlow[part].from(m);
      lora_up_backward(factors_of(group, part), grad, dlow);
      lora_weight_gradients(into(part), {.x = Dropout(slot, part, routing_, group).dropped(rows.x.from(m), hidden_),
                                         .grad = grad,
                                         .low = chunk_.low_rows(part).from(group.begin),
                                         .low_grad = dlow});
    }
    if (!lora_down_) return;
    lora_weight_gradients(into(kDown), {.x = Dropout(slot, kDown, routing_, group).dropped(rows.h.from(m), inner_),
                                        .grad = rows.grad.from(m),
                                        .low = rows.low_down.from(m),
                                        .low_grad = rows.dlow[kDown].from(m)});
  }

  // out[m, j] += A's part of the gradient of column columns.first + j of the projection's input.
  void low_backward(const PairRange& group, Projection part, Rows<const float> dlow, ColumnRange columns,
                    Rows<float> out) const {
    const Dropout dropout(slot_of(group), part, routing_, group);
    if (!dropout.active() || columns.count <= 0) return lora_down_backward(factors_of(group, part), dlow, columns, out);
    static thread_local Scratch scratch;
    const Rows<float> by_dropped{scratch.reserve<float>(group.size() * columns.count), columns.count};
    std::fill(by_dropped.data, by_dropped.row(group.size()), 0.0f);
    lora_down_backward(factors_of(group, part), dlow, columns, by_dropped);
    dropout.add_masked(by_dropped, columns, out);
  }

  // d x of the pairs, some columns.
  void input_columns(int64_t index, const ExpertRows& rows, ColumnRange columns, const Nodes& nodes) const {
    const PairRange& run = run_of(index);
    columns.count = std::min(columns.count, round_up(hidden_, kColumnUnit) - columns.first);
    const Rows<float> out = y_.from(run.begin, columns.first);
    if (has_gate_) multiply_transposed(run, kGate, rows.gate_transposed, nodes, columns, out, false);
    if (!has_gate_ || nodes.count == engine_.layer.num_nodes()) {
      multiply_transposed(run, kUp, rows.up_transposed, nodes, columns, out, has_gate_);
    } else {  // separate sums until the last node has added its part
      multiply_transposed(run, kUp, rows.up_transposed, nodes, columns, rows.by_up.from(0, columns.first), false);
    }
    if (!is_last(nodes)) return;
    for (int64_t m = 0; has_gate_ && nodes.first > 0 && m < run.size(); ++m)
      engine_.tiles.add_scaled(rows.by_up.row(m) + columns.first, 1.0f, columns.count, out.row(m));
    columns.count = std::min(columns.count, hidden_ - columns.first);
    for (const Projection part : {kGate, kUp}) {
      for_each_group(routing_, index, [&](const PairRange& group, int64_t m) {
        low_backward(group, part, rows.dlow[part].from(m), columns, out.from(m));
      });
    }
  }

  void whole_expert(int64_t index) const {
    const int64_t most = routing_.most_pairs;
    const ExpertRows rows = reserve(&BackwardBuffers::own(), most, round_up(most, kTokenUnit));
    load(index, rows);
    down_columns(index, rows, {0, inner_ + kColumnUnit}, all_nodes());
    activation(index, rows);
    input_columns(index, rows, {0, hidden_ + kColumnUnit}, all_nodes());
  }

  void sum_up(int64_t token) const {
    combine_pairs(engine_.tiles, routing_, y_, false, token, gradients_.x);
    for (int64_t flat = token * routing_.top_k; flat < (token + 1) * routing_.top_k; ++flat) {
      if (routing_.pair_of[static_cast<size_t>(flat)] < 0) *weight_gradient(flat) = 0.0f;
    }
  }
  void set_weight_gradient(int64_t pair, float value) const {
    const int64_t token = routing_.token[static_cast<size_t>(pair)] - routing_.first_token;
    for (int64_t flat = token * routing_.top_k; flat < (token + 1) * routing_.top_k; ++flat) {
      if (routing_.pair_of[static_cast<size_t>(flat)] == pair) *weight_gradient(flat) = value;
    }
  }
  float* weight_gradient(int64_t flat) const {
    const int64_t token = routing_.first_token + flat / routing_.top_k;
    return gradients_.weights.as<float>() + token * gradients_.weights.strides[0] + flat % routing_.top_k;
  }

  const Engine& engine_;
  const RoutedCall& call_;
  const TensorView& grad_out_;
  const RetainedChunk& chunk_;
  const Routing& routing_;
  const RoutedGradients& gradients_;
  const int64_t hidden_, inner_, ld_hidden_, ld_inner_;
  const Activation activation_;
  const bool has_gate_;
  const bool bf16_, lora_in_, lora_down_;
  std::vector<int64_t> transposed_begin_;  // first column of each expert's tokens among all transposed ones
  ExpertRows all_{};
  Rows<float> y_;
};

void run_backward(const Engine& engine, const RoutedCall& call, const TensorView& grad_out,
                  const RoutedGradients& gradients, const Retained* retained, const FiniteCheck* finite) {
  if (retained) {
    for (const RetainedChunk& chunk : retained->chunks) {
      BackwardPass(engine, call, grad_out, chunk, gradients).run(finite);
      finite = nullptr;
    }
    return;
  }
  Retained own;
  RetainedChunk& recomputed = own.add_chunk();
  const int64_t num_tokens = call.x.shape[0];
  const int64_t step = tokens_at_once(engine.layer, call, 2 * ForwardPass::bytes_per_pair(engine));
  for (int64_t first = 0; first < num_tokens; first += step) {
    route(engine.layer.shape(), call, first, std::min(step, num_tokens - first), &recomputed.routing);
    recomputed.reserve(engine.layer, call);
    ForwardPass(engine, call, recomputed.routing, &recomputed).run_kept(first == 0 ? finite : nullptr);
    BackwardPass(engine, call, grad_out, recomputed, gradients).run(nullptr);
  }
}

}  // namespace

Status backward(const Engine& engine, const RoutedCall& call, const TensorView& grad_out,
                const RoutedGradients& gradients, const Retained* retained) {
  const CallScope scope;
  KT_RETURN_IF_ERROR(check_call(engine.layer.shape(), call));
  KT_RETURN_IF_ERROR(check_adapters(engine.layer.mlp(), call.slots));
  if (retained) KT_RETURN_IF_ERROR(check_retained(engine.layer, call, *retained));
  return with_check({{&call.x, "x"}, {&grad_out, "grad_out"}}, engine.num_threads, [&](const FiniteCheck* finite) {
    run_backward(engine, call, grad_out, gradients, retained, finite);
  });
}

}  // namespace kt
