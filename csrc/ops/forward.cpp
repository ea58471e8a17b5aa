#include "ops/forward.h"

#include <algorithm>
#include <cstring>

#include "ops/dropout.h"
#include "ops/forward_pass.h"
#include "ops/lora.h"

namespace kt {
namespace {

// Blocks per step, where one thread computes a whole expert.
int64_t blocks_of_gate_up(int64_t rows) { return few_rows(rows) ? 64 : 8; }
int64_t blocks_of_down(int64_t rows) { return few_rows(rows) ? 64 : 16; }

template <class Body>
void for_each_group(const Routing& routing, int64_t index, Body&& body) {
  const auto at = static_cast<size_t>(index);
  for (int64_t g = routing.first_group[at]; g < routing.first_group[at + 1]; ++g)
    body(routing.groups[static_cast<size_t>(g)]);
}

}  // namespace

void widen_row(const Tiles& tiles, const TensorView& matrix, int64_t token, float* values) {
  const int64_t at = token * matrix.strides[0], cols = matrix.shape[1];
  if (matrix.dtype == DType::kBf16) {
    tiles.widen(matrix.as<uint16_t>() + at, cols, values);
  } else {
    std::memcpy(values, matrix.as<float>() + at, static_cast<size_t>(cols) * sizeof(float));
  }
}

void combine_pairs(const Engine& engine, const Routing& routing, const float* rows, int64_t ld, bool weighted,
                   int64_t token, const TensorView& out) {
  static thread_local Scratch scratch;
  const int64_t cols = out.shape[1], at = (routing.first_token + token) * out.strides[0];
  float* sum = out.dtype == DType::kBf16 ? scratch.reserve<float>(cols) : out.as<float>() + at;
  std::fill(sum, sum + cols, 0.0f);
  for (int64_t position = 0; position < routing.top_k; ++position) {
    const int64_t pair = routing.pair_of[static_cast<size_t>(token * routing.top_k + position)];
    if (pair < 0) continue;
    const float factor = weighted ? routing.weight[static_cast<size_t>(pair)] : 1.0f;
    engine.tiles.add_scaled(rows + pair * ld, factor, cols, sum);
  }
  if (out.dtype == DType::kBf16) engine.tiles.narrow(sum, cols, out.as<uint16_t>() + at);
}

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
      with_lora_down_(max_rank(call.slots, kDown) > 0),
      ld_y_(activation_stride(engine.layer.shape().hidden)) {}

int64_t ForwardPass::bytes_per_pair(const Engine& engine) {
  const ExpertShape& shape = engine.layer.shape();
  return (3 * activation_stride(shape.hidden) + 2 * activation_stride(shape.intermediate)) *
         static_cast<int64_t>(sizeof(float));
}

ForwardPass::Rows ForwardPass::reserve(Buffers* buffers, int64_t pairs) const {
  Rows rows{};
  rows.x = buffers->x.reserve(engine_.tiles, engine_.layer.in_shape(), arithmetic_, pairs, with_lora_in_);
  // h is computed in float32 before it is narrowed or quantized
  rows.h = buffers->h.reserve(engine_.tiles, engine_.layer.out_shape(), arithmetic_, pairs, true);
  for (int part = 0; part < kNumProjections; ++part) rows.low[part] = buffers->low[part].reserve<float>(pairs * rank_);
  return rows;
}

ForwardPass::Rows ForwardPass::rows_of(const PairRange& run) const {
  Rows rows{all_.x.from(run.begin), all_.h.from(run.begin), {}};
  for (int part = 0; part < kNumProjections; ++part) rows.low[part] = all_.low[part] + run.begin * rank_;
  return rows;
}

ForwardPass::Rows ForwardPass::own_rows() const { return reserve(&Buffers::own(), routing_.most_pairs); }

float* ForwardPass::low_of(const Rows& rows, const PairRange& run, Projection part) const {
  return keep_ ? keep_->low_rows(part) + run.begin * rank_ : rows.low[part];
}

void ForwardPass::prepare_token(int64_t token) {
  const PackedShape shape = engine_.layer.in_shape();
  float* row = Buffers::own().row.reserve<float>(shape.cols);
  widen_row(engine_.tiles, call_.x, routing_.first_token + token, row);
  finish_row(engine_.tiles, shape, tokens_, token, row);
}

// The run's rows of x, gathered.
void ForwardPass::load(const PairRange& run, const Rows& rows) const {
  const PackedShape shape = engine_.layer.in_shape();
  for (int64_t m = 0; m < run.size(); ++m) {
    const int64_t token = routing_.token[static_cast<size_t>(run.begin + m)];
    const Operand at = rows.x.from(m);
    if (at.codes) copy_row(tokens_, token - routing_.first_token, rows.x, m);
    if (at.bf16) {
      std::memcpy(at.bf16, call_.x.as<uint16_t>() + token * call_.x.strides[0],
                  static_cast<size_t>(shape.cols) * sizeof(uint16_t));
      std::fill(at.bf16 + shape.cols, at.bf16 + at.ld, uint16_t{0});
    }
    if (at.f32) {
      widen_row(engine_.tiles, call_.x, token, at.f32);
      std::fill(at.f32 + shape.cols, at.f32 + at.ld, 0.0f);
    }
  }
}

void ForwardPass::load_expert(int64_t index, const Rows& rows) const {
  load(routing_.experts[static_cast<size_t>(index)], rows);
  for (const Projection part : {kGate, kUp}) low(index, part, rows.x, rows);
}

void ForwardPass::low(int64_t index, Projection part, const Operand& input, const Rows& rows) const {
  if (max_rank(call_.slots, part) == 0) return;
  const PairRange& run = routing_.experts[static_cast<size_t>(index)];
  for_each_group(routing_, index, [&](const PairRange& group) {
    const int64_t first = group.begin - run.begin;
    const LoraSlot& slot = call_.slots[static_cast<size_t>(group.slot)];
    const int64_t cols = engine_.layer.shape_of(part).cols;
    const float* in = Dropout(slot, part, routing_, group).dropped(input.f32 + first * input.ld, input.ld, cols);
    lora_down(engine_.tiles, slot, part, run.expert, group.size(), in, input.ld,
              low_of(rows, run, part) + first * rank_, rank_);
  });
}

// h = silu(gate) * up for columns of `blocks` blocks of one expert.
void ForwardPass::gate_up(int64_t index, int64_t block, int64_t blocks, const Rows& rows) const {
  const PairRange& run = routing_.experts[static_cast<size_t>(index)];
  const PackedShape shape = engine_.layer.in_shape();
  const int64_t first = block * kBlockRows, width = blocks * kBlockRows;
  const int64_t ld = keep_ ? rows.h.ld : width;
  float* sums[2];
  if (keep_) {
    sums[0] = keep_->gate_rows() + run.begin * ld + first;
    sums[1] = keep_->up_rows() + run.begin * ld + first;
  } else {
    sums[0] = Buffers::own().sums.reserve<float>(2 * run.size() * width);
    sums[1] = sums[0] + run.size() * width;
  }
  for (const Projection part : {kGate, kUp}) {
    for (int node = 0; node < engine_.layer.num_nodes(); ++node) {
      const auto piece = engine_.layer.piece(run.expert, part, node);
      const int64_t begin = std::max(block, piece.first),
                    end = std::min(block + blocks, piece.first + piece.blocks.blocks);
      if (begin >= end) continue;
      const PackedBlocks weights{shape, piece.blocks.data + (begin - piece.first) * shape.block_bytes(), end - begin};
      multiply_rows(engine_.tiles, rows.x, run.size(), weights, sums[part] + (begin - block) * kBlockRows, ld);
    }
    const int64_t count = std::min(width, shape.rows - first);
    for_each_group(routing_, index, [&](const PairRange& group) {
      const int64_t m = group.begin - run.begin;
      lora_up(engine_.tiles, call_.slots[static_cast<size_t>(group.slot)], part, run.expert, group.size(),
              low_of(rows, run, part) + m * rank_, rank_, first, count, sums[part] + m * ld, ld);
    });
  }
  // Rows beyond the matrix decode to zero, so h is zero there; only columns beyond the last block are left to clear.
  const int64_t end = block + blocks == shape.blocks() ? rows.h.ld : first + width;
  for (int64_t m = 0; m < run.size(); ++m) {
    float* h = rows.h.f32 + m * rows.h.ld;
    engine_.tiles.swiglu(sums[0] + m * ld, sums[1] + m * ld, width, h + first);
    std::fill(h + first + width, h + end, 0.0f);
  }
}

// Runs when all columns of h are complete: the low-rank product of h, and its rows in the type that `down` multiplies.
void ForwardPass::finish_h(int64_t index, const Rows& rows, bool for_down) const {
  const PairRange& run = routing_.experts[static_cast<size_t>(index)];
  low(index, kDown, rows.h, rows);
  if (!for_down || arithmetic_ == Arithmetic::kFloat) return;
  for (int64_t m = 0; m < run.size(); ++m)
    finish_row(engine_.tiles, engine_.layer.out_shape(), rows.h, m, rows.h.f32 + m * rows.h.ld);
}

void ForwardPass::down(int64_t index, int64_t block, int64_t blocks, const Rows& rows) const {
  const PairRange& run = routing_.experts[static_cast<size_t>(index)];
  const PackedShape shape = engine_.layer.out_shape();
  const int64_t first = block * kBlockRows, count = std::min(blocks * kBlockRows, shape.rows - first);
  float* y = y_ + run.begin * ld_y_;
  for (int node = 0; node < engine_.layer.num_nodes(); ++node) {
    const auto piece = engine_.layer.piece(run.expert, kDown, node);
    const int64_t begin = std::max(block, piece.first),
                  end = std::min(block + blocks, piece.first + piece.blocks.blocks);
    if (begin >= end) continue;
    const PackedBlocks weights{shape, piece.blocks.data + (begin - piece.first) * shape.block_bytes(), end - begin};
    multiply_rows(engine_.tiles, rows.h, run.size(), weights, y + begin * kBlockRows, ld_y_);
  }
  for_each_group(routing_, index, [&](const PairRange& group) {
    const int64_t m = group.begin - run.begin;
    lora_up(engine_.tiles, call_.slots[static_cast<size_t>(group.slot)], kDown, run.expert, group.size(),
            low_of(rows, run, kDown) + m * rank_, rank_, first, count, y + m * ld_y_ + first, ld_y_);
  });
}

void ForwardPass::whole_expert(int64_t index, const Rows& rows, bool with_down) const {
  const PairRange& run = routing_.experts[static_cast<size_t>(index)];
  load_expert(index, rows);
  const int64_t in_blocks = engine_.layer.in_shape().blocks(), out_blocks = engine_.layer.out_shape().blocks();
  int64_t at_once = blocks_of_gate_up(run.size());
  for (int64_t block = 0; block < in_blocks; block += at_once)
    gate_up(index, block, std::min(at_once, in_blocks - block), rows);
  finish_h(index, rows, with_down);
  if (!with_down) return;
  at_once = blocks_of_down(run.size());
  for (int64_t block = 0; block < out_blocks; block += at_once)
    down(index, block, std::min(at_once, out_blocks - block), rows);
}

void ForwardPass::combine(int64_t token, const TensorView& out) const {
  combine_pairs(engine_, routing_, y_, ld_y_, true, token, out);
}

void ForwardPass::run_plan(const TensorView* out, const FiniteCheck* finite) {
  const ForwardWork work{finite ? finite->num_parts() : 0, arithmetic_ == Arithmetic::kInt8, out != nullptr};
  const Plan plan = forward_plan(engine_.layer, routing_, engine_.num_threads, work);
  if (plan.has(kLoad)) all_ = reserve(&Buffers::all(), routing_.num_pairs());
  const auto rows = [&](int64_t index) { return rows_of(routing_.experts[static_cast<size_t>(index)]); };
  kt::run(plan, [&](int step, const Range& range) {
    const int64_t item = range.item;
    switch (step) {
      case kCheck:
        return finite->check_part(item);
      case kPrepare:
        return prepare_token(item);
      case kWholeExpert:
        return whole_expert(routing_.by_size[static_cast<size_t>(item)], own_rows(), out != nullptr);
      case kLoad:
        return load_expert(item, rows(item));
      case kGateUp:
        return gate_up(item, range.first, range.count, rows(item));
      case kFinish:
        return finish_h(item, rows(item), out != nullptr);
      case kDownForward:
        return down(item, range.first, range.count, rows(item));
      default:
        return combine(item, *out);
    }
  });
}

void ForwardPass::run(const TensorView& out, const FiniteCheck* finite) {
  y_ = Buffers::all().y.reserve<float>(routing_.num_pairs() * ld_y_);
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
  static thread_local Routing own_routing;
  const int64_t num_tokens = call.x.shape[0];
  const int64_t step = tokens_at_once(engine.layer, call, ForwardPass::bytes_per_pair(engine));
  for (int64_t first = 0; first < num_tokens; first += step) {
    RetainedChunk* keep = retained ? &retained->add_chunk() : nullptr;
    Routing* routing = keep ? &keep->routing : &own_routing;
    route(engine.layer.shape(), call, first, std::min(step, num_tokens - first), routing);
    if (keep) keep->reserve(engine.layer, call);
    ForwardPass(engine, call, *routing, keep).run(out, first == 0 ? finite : nullptr);
  }
}

}  // namespace

Status forward(const Engine& engine, const RoutedCall& call, const TensorView& out, Retained* retained) {
  const CallScope scope;
  KT_RETURN_IF_ERROR(check_call(engine.layer.shape(), call));
  if (retained) retained->clear();
  KT_RETURN_IF_ERROR(with_check({{&call.x, "x"}}, engine.num_threads,
                                [&](const FiniteCheck* finite) { run_forward(engine, call, out, retained, finite); }));
  if (retained) retained->call = facts_of(engine.layer, call);
  return {};
}

}  // namespace kt
