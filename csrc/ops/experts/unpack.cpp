#include "ops/experts/unpack.h"

#include <algorithm>

namespace kt {
namespace {

enum UnpackStep { kUnpackGateUp, kUnpackDown };

// Packed bytes of a task: long enough to read at full speed, and short enough that all threads end together.
constexpr int64_t kTaskBytes = 128 << 10;

int64_t num_inputs(const ExpertLayer& layer) { return static_cast<int64_t>(layer.mlp().inputs().size()); }

Stage stage_of_matrices(const ExpertLayer& layer, UnpackStep step, Projection part, int64_t matrices) {
  Stage stage = stage_of(step, matrices);
  stage.num_nodes = layer.num_nodes();
  stage.at_once = std::max<int64_t>(1, kTaskBytes / layer.shape_of(part).block_bytes());
  for (int node = 0; node < layer.num_nodes(); ++node) stage.spans[node] = layer.span(part, node);
  return stage;
}

// Blocks [range.first, range.first + range.count) of one matrix, to its rows from `matrix` on.
void unpack_range(const Engine& engine, int64_t expert, Projection part, const Range& range, uint16_t* matrix) {
  const ExpertLayer::Piece piece = engine.layer.piece(expert, part, range.node);
  const PackedShape& shape = piece.blocks.shape;
  const int64_t row = range.first * kBlockRows;
  const uint8_t* data = piece.blocks.data + (range.first - piece.first) * shape.block_bytes();
  engine.tiles.unpack({.weights = {shape, data, range.count},
                       .rows = std::min(shape.rows - row, range.count * kBlockRows),
                       .out = {matrix + row * shape.cols, shape.cols}});
}

}  // namespace

Plan unpacking_plan(const ExpertLayer& layer, ExpertRange experts, int num_threads) {
  Plan plan;
  plan.num_threads = num_threads;
  plan.stages.push_back(stage_of_matrices(layer, kUnpackGateUp, kUp, num_inputs(layer) * experts.count));
  plan.stages.push_back(stage_of_matrices(layer, kUnpackDown, kDown, experts.count));
  return plan;
}

void unpack(const Engine& engine, ExpertRange experts, const UnpackedExperts& out) {
  const int64_t matrix = engine.layer.shape().intermediate * engine.layer.shape().hidden;
  run(unpacking_plan(engine.layer, experts, engine.num_threads), [&](int step, const Range& range) {
    const int64_t per_expert = step == kUnpackGateUp ? num_inputs(engine.layer) : 1;
    const auto input = static_cast<size_t>(range.item % per_expert);
    const Projection part = step == kUnpackDown ? kDown : engine.layer.mlp().inputs()[input];
    const TensorView& target = step == kUnpackDown ? out.down : out.gate_up;
    unpack_range(engine, experts.first + range.item / per_expert, part, range,
                 target.as<uint16_t>() + range.item * matrix);
  });
}

}  // namespace kt
