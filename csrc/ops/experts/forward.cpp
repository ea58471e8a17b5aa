#include "ops/experts/forward.h"

#include <algorithm>
#include <cstring>

#include "ops/experts/forward_pass.h"
#include "ops/experts/lora.h"
#include "ops/pairs/dropout.h"

namespace kt {
namespace {

// Blocks per step, where one thread computes a whole expert.
int64_t blocks_of_gate_up(int64_t rows) { return few_rows(rows) ? 64 : 8; }
int64_t blocks_of_down(int64_t rows) { return few_rows(rows) ? 64 : 16; }

}  // namespace

// Kept by a thread between calls, so that a call of the same size allocates nothing.
struct ForwardPass::Buffers {
  OperandBuffer x, h, tokens;
  Scratch low[kNumProjections], y, sums, row;
  static Buffers& all() {
    static thread_local Buffers buffers;
    return buffers;
  }
  static Buffers& own() {  // of a thread that works on one expert
    static thread_local Buffers buffers;
    return buffers;
  }
};

ForwardPass::ForwardPass(const Engine& engine, const RoutedCall& call, const Routing& routing, RetainedChunk* keep)
    : engine_(engine),
      call_(call),
      routing_(routing),
      keep_(keep),
      arithmetic_(arithmetic_of(engine, call)),
      rank_(keep ? keep->rank : max_rank_of_all(call.slots)),
      with_lora_in_(max_rank(call.slots, kGate) > 0 || max_rank(call.slots, kUp) > 0),
      with_lora_down_(max_rank(call.slots, kDown) > 0) {}

int64_t ForwardPass::bytes_per_pair(const Engine& engine) {
  const ExpertShape& shape = engine.layer.shape();
  return (3 * activation_stride(shape.hidden) + 2 * activation_stride(shape.intermediate)) *
         static_cast<int64_t>(sizeof(float));
}

ForwardPass::Activations ForwardPass::reserve(Buffers* buffers, int64_t pairs) const {
  Activations arrays{};
  arrays.x = buffers->x.reserve(engine_.tiles, engine_.layer.in_shape(), arithmetic_, pairs, with_lora_in_);
  // h is computed in float32 before it is narrowed or quantized
  arrays.h = buffers->h.reserve(engine_.tiles, engine_.layer.out_shape(), arithmetic_, pairs, true);
  for (int part = 0; part < kNumProjections; ++part)
    arrays.low[part] = {buffers->low[part].reserve<float>(pairs * rank_), rank_};
  return arrays;
}

ForwardPass::Activations ForwardPass::of_run(const PairRange& run) const {
  Activations arrays{all_.x.from(run.begin), all_.h.from(run.begin), {}};
  for (int part = 0; part < kNumProjections; ++part) arrays.low[part] = all_.low[part].from(run.begin);
  return arrays;
}

ForwardPass::Activations ForwardPass::own() const { return reserve(&Buffers::own(), routing_.most_pairs); }

Rows<float> ForwardPass::low_of(const Activations& arrays, const PairRange& run, Projection part) const {
  return keep_ ? keep_->low_rows(part).from(run.begin) : arrays.low[part];
}

void ForwardPass::prepare_token(int64_t token) {
  const PackedShape shape = engine_.layer.in_shape();
  float* row = Buffers::own().row.reserve<float>(shape.cols);
  widen_row(engine_.tiles, call_.x, routing_.first_token + token, row);
  finish_row(engine_.tiles, shape, tokens_, token, row);
}

// The run's rows of x, gathered.
void ForwardPass::load(const PairRange& run, const Activations& arrays) const {
  const int64_t cols = engine_.layer.in_shape().cols;
  for (int64_t m = 0; m < run.size(); ++m) {
    const int64_t token = routing_.token[static_cast<size_t>(run.begin + m)];
    const auto [arithmetic, f32, bf16, codes, scales, sums] = arrays.x.from(m);
    if (codes.data) copy_row(tokens_, token - routing_.first_token, arrays.x, m);
    if (bf16.data) {
      std::memcpy(bf16.data, call_.x.as<uint16_t>() + token * call_.x.strides[0],
                  static_cast<size_t>(cols) * sizeof(uint16_t));
      std::fill(bf16.data + cols, bf16.row(1), uint16_t{0});
    }
    if (f32.data) {
      widen_row(engine_.tiles, call_.x, token, f32.data);
      std::fill(f32.data + cols, f32.row(1), 0.0f);
    }
  }
}

void ForwardPass::load_expert(int64_t index, const Activations& arrays) const {
  load(run_of(index), arrays);
  for (const Projection part : engine_.layer.mlp().inputs()) low(index, part, arrays.x, arrays);
}

void ForwardPass::low(int64_t index, Projection part, const Operand& input, const Activations& arrays) const {
  if (max_rank(call_.slots, part) == 0) return;
  const PairRange& run = run_of(index);
  for_each_group(routing_, index, [&](const PairRange& group, int64_t row) {
    const LoraSlot& slot = call_.slots[static_cast<size_t>(group.slot)];
    const int64_t cols = engine_.layer.shape_of(part).cols;
    const Rows<const float> in = Dropout(slot, part, routing_, group).dropped(input.f32.from(row), cols);
    lora_down({engine_.tiles, slot, part, run.expert, group.size()}, in, low_of(arrays, run, part).from(row));
  });
}

// Of a matrix, where it lies on the node; null if it does not.
const uint8_t* ForwardPass::address_of(const Place& place, Projection part, int node) const {
  if (place.index < 0) return nullptr;
  const auto piece = engine_.layer.piece(run_of(place.index).expert, part, node);
  const int64_t block = place.block - piece.first;
  if (block < 0 || block >= piece.blocks.blocks) return nullptr;
  return piece.blocks.data + block * engine_.layer.shape_of(part).block_bytes();
}

// The expert's rows times some blocks of a matrix, each where it lies; `to` begins with the first of these blocks. Gate
// is followed by the same blocks of up, up by `next` of the first matrix that multiplies x, down by its own `next`.
void ForwardPass::multiply(int64_t index, Projection part, const Operand& input, const Span& blocks, const Place& next,
                           Rows<float> to) const {
  const PairRange& run = run_of(index);
  const PackedShape shape = engine_.layer.shape_of(part);
  const Projection following = part == kGate ? kUp : part == kUp ? engine_.layer.mlp().inputs().front() : kDown;
  for (int node = 0; node < engine_.layer.num_nodes(); ++node) {
    const auto piece = engine_.layer.piece(run.expert, part, node);
    const int64_t begin = std::max(blocks.first, piece.first),
                  end = std::min(blocks.first + blocks.size, piece.first + piece.blocks.blocks);
    if (begin >= end) continue;
    const PackedBlocks weights{.shape = shape,
                               .data = piece.blocks.data + (begin - piece.first) * shape.block_bytes(),
                               .blocks = end - begin,
                               .next = address_of(part == kGate ? Place{index, begin} : next, following, node)};
    multiply_rows(engine_.tiles, input, run.size(), weights, to.from(0, (begin - blocks.first) * kBlockRows));
  }
}

void ForwardPass::add_bias(const PairRange& run, Projection part, const Span& blocks, Rows<float> to) const {
  const float* bias = engine_.layer.bias(run.expert, part);
  if (bias == nullptr) return;
  for (int64_t m = 0; m < run.size(); ++m)
    engine_.tiles.add_scaled(bias + blocks.first * kBlockRows, 1.0f, blocks.size * kBlockRows, to.row(m));
}

// The adapters' part of the same.
void ForwardPass::add_lora(int64_t index, Projection part, const Span& blocks, const Activations& arrays,
                           Rows<float> to) const {
  const PairRange& run = run_of(index);
  const int64_t first = blocks.first * kBlockRows;
  const ColumnRange columns{first, std::min(blocks.size * kBlockRows, engine_.layer.shape_of(part).rows - first)};
  for_each_group(routing_, index, [&](const PairRange& group, int64_t row) {
    const LoraSlot& slot = call_.slots[static_cast<size_t>(group.slot)];
    lora_up({engine_.tiles, slot, part, run.expert, group.size()}, low_of(arrays, run, part).from(row), columns,
            to.from(row));
  });
}

// h = f(gate, up) for columns of some blocks of one expert.
void ForwardPass::gate_up(int64_t index, const Span& blocks, const Place& next, const Activations& arrays) const {
  const PairRange& run = run_of(index);
  const Rows<float> h = arrays.h.f32;
  const int64_t first = blocks.first * kBlockRows, width = blocks.size * kBlockRows;
  const ExpertMlp& mlp = engine_.layer.mlp();
  Rows<float> sums[2];  // of gate, where there is one, and up
  if (keep_) {
    if (mlp.has_gate()) sums[kGate] = keep_->gate_rows().from(run.begin, first);
    sums[kUp] = keep_->up_rows().from(run.begin, first);
  } else {
    sums[kGate] = {Buffers::own().sums.reserve<float>(2 * run.size() * width), width};
    sums[kUp] = sums[kGate].from(run.size());
  }
  for (const Projection part : mlp.inputs()) {
    multiply(index, part, arrays.x, blocks, next, sums[part]);
    add_bias(run, part, blocks, sums[part]);
    add_lora(index, part, blocks, arrays, sums[part]);
  }
  // Rows beyond the matrix decode to zero, and every activation of zeros is zero, so h is zero there; only columns
  // beyond the last block are left to clear.
  const int64_t end = blocks.first + blocks.size == engine_.layer.in_shape().blocks() ? h.ld : first + width;
  for (int64_t m = 0; m < run.size(); ++m) {
    engine_.tiles.activate(mlp.activation, sums[kGate].row(m), sums[kUp].row(m), width, h.row(m) + first);
    std::fill(h.row(m) + first + width, h.row(m) + end, 0.0f);
  }
}

// Runs when all columns of h are complete: the low-rank product of h, and its rows in the type that `down` multiplies.
void ForwardPass::finish_h(int64_t index, const Activations& arrays, bool for_down) const {
  low(index, kDown, arrays.h, arrays);
  if (!for_down || arithmetic_ == Arithmetic::kFloat) return;
  for (int64_t m = 0; m < run_of(index).size(); ++m)
    finish_row(engine_.tiles, engine_.layer.out_shape(), arrays.h, m, arrays.h.f32.row(m));
}

void ForwardPass::down(int64_t index, const Span& blocks, const Place& next, const Activations& arrays) const {
  const PairRange& run = run_of(index);
  const Rows<float> y = y_.from(run.begin, blocks.first * kBlockRows);
  multiply(index, kDown, arrays.h, blocks, next, y);
  add_bias(run, kDown, blocks, y);
  add_lora(index, kDown, blocks, arrays, y);
}

void ForwardPass::whole_expert(int64_t index, const Activations& arrays, bool with_down) const {
  const int64_t pairs = run_of(index).size();
  load_expert(index, arrays);
  const int64_t in_blocks = engine_.layer.in_shape().blocks(), out_blocks = engine_.layer.out_shape().blocks();
  int64_t at_once = blocks_of_gate_up(pairs);
  for (int64_t block = 0; block < in_blocks; block += at_once)
    gate_up(index, {block, std::min(at_once, in_blocks - block)}, {index, block + at_once}, arrays);
  finish_h(index, arrays, with_down);
  if (!with_down) return;
  at_once = blocks_of_down(pairs);
  for (int64_t block = 0; block < out_blocks; block += at_once)
    down(index, {block, std::min(at_once, out_blocks - block)}, {index, block + at_once}, arrays);
}

void ForwardPass::run_plan(const TensorView* out, const FiniteCheck* finite) {
  const ForwardWork work{.parts_to_check = finite ? finite->num_parts() : 0,
                         .quantized = arithmetic_ == Arithmetic::kInt8,
                         .with_out = out != nullptr};
  const Plan plan = forward_plan(engine_.layer, routing_, engine_.num_threads, work);
  if (plan.has(kLoad)) all_ = reserve(&Buffers::all(), routing_.num_pairs());
  kt::run(plan, [&](int step, const Range& range) {
    const int64_t item = range.item;
    const Span blocks{range.first, range.count};
    const Place next{range.next_item, range.next_first};
    const auto arrays = [&] { return of_run(run_of(item)); };
    switch (step) {
      case kCheck:
        return finite->check_part(item);
      case kPrepare:
        return prepare_token(item);
      case kWholeExpert:
        return whole_expert(routing_.by_size[static_cast<size_t>(item)], own(), out != nullptr);
      case kLoad:
        return load_expert(item, arrays());
      case kGateUp:
        return gate_up(item, blocks, next, arrays());
      case kFinish:
        return finish_h(item, arrays(), out != nullptr);
      case kDownForward:
        return down(item, blocks, next, arrays());
      default:
        return combine_pairs(engine_.tiles, routing_, y_, true, item, *out);
    }
  });
}

void ForwardPass::run(const TensorView& out, const FiniteCheck* finite) {
  const int64_t ld = activation_stride(engine_.layer.shape().hidden);
  y_ = {Buffers::all().y.reserve<float>(routing_.num_pairs() * ld), ld};
  reserve_tokens();
  run_plan(&out, finite);
}

void ForwardPass::run_kept(const FiniteCheck* finite) {
  reserve_tokens();
  run_plan(nullptr, finite);
}

void ForwardPass::reserve_tokens() {
  if (arithmetic_ != Arithmetic::kInt8) return;
  tokens_ =
      Buffers::all().tokens.reserve(engine_.tiles, engine_.layer.in_shape(), arithmetic_, routing_.num_tokens, false);
}

namespace {

void run_forward(const Engine& engine, const RoutedCall& call, const TensorView& out, Retained* retained,
                 const FiniteCheck* finite) {
  static thread_local ScratchObject<Routing> own_routing;
  const int64_t num_tokens = call.x.shape[0];
  const int64_t step = tokens_at_once(engine.layer, call, ForwardPass::bytes_per_pair(engine));
  for (int64_t first = 0; first < num_tokens; first += step) {
    RetainedChunk* keep = retained ? &retained->add_chunk() : nullptr;
    Routing* routing = keep ? &keep->routing : &own_routing.get();
    route(engine.layer.shape(), call, first, std::min(step, num_tokens - first), routing);
    if (!keep) own_routing.note_size();
    if (keep) keep->reserve(engine.layer, call);
    ForwardPass(engine, call, *routing, keep).run(out, first == 0 ? finite : nullptr);
  }
}

}  // namespace

Status forward(const Engine& engine, const RoutedCall& call, const TensorView& out, Retained* retained) {
  const CallScope scope;
  KT_RETURN_IF_ERROR(check_call(engine.layer.shape(), call));
  KT_RETURN_IF_ERROR(check_adapters(engine.layer.mlp(), call.slots));
  if (retained) retained->clear();
  KT_RETURN_IF_ERROR(with_check({{&call.x, "x"}}, engine.num_threads,
                                [&](const FiniteCheck* finite) { run_forward(engine, call, out, retained, finite); }));
  if (retained) retained->call = facts_of(engine.layer, call);
  return {};
}

}  // namespace kt
