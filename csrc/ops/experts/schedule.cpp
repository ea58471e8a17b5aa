#include "ops/experts/schedule.h"

namespace kt {
namespace {

// Below this many multiply-adds, waking other threads takes longer than the work.
constexpr int64_t kAloneBelow = 1 << 20;

int threads_for_work(const ExpertLayer& layer, const Routing& routing, int num_threads) {
  const ExpertShape& shape = layer.shape();
  return routing.num_pairs() * shape.hidden * shape.intermediate * 3 < kAloneBelow ? 1 : num_threads;
}

// With many experts per thread, one task computes a whole expert: intermediates stay in that core's cache, and no
// thread waits. Otherwise threads share the matrices of an expert. On several memory nodes they always do, so that each
// node reads its own weights.
bool by_expert(const ExpertLayer& layer, const Routing& routing, int num_threads) {
  constexpr int64_t kExpertsPerThread = 16;
  return num_threads == 1 ||
         (layer.num_nodes() == 1 && static_cast<int64_t>(routing.experts.size()) >= kExpertsPerThread * num_threads);
}

// Equal shares in multiples of four, the kernels' unit. Each thread has several tasks, so that a late thread costs
// little.
int64_t blocks_at_once(const ExpertLayer& layer, Projection part, const Routing& routing, int num_threads) {
  constexpr int64_t kUnit = 4, kMost = 64, kTasksPerThread = 8;
  if (routing.experts.empty() || !few_rows(routing.typical_pairs())) return kUnit;
  const int64_t blocks = layer.shape_of(part).blocks(), piece = (blocks + layer.num_nodes() - 1) / layer.num_nodes();
  const int64_t all = blocks * static_cast<int64_t>(routing.experts.size());
  const int64_t wanted = std::clamp(all / (num_threads * kTasksPerThread), kUnit, kMost);
  const int64_t ranges = (piece + wanted - 1) / wanted;
  return round_up((piece + ranges - 1) / ranges, kUnit);
}

// Each node's tasks are its own blocks.
Stage block_stage(Step step, const ExpertLayer& layer, Projection part, const Routing& routing, int num_threads) {
  Stage stage = stage_of(step, static_cast<int64_t>(routing.experts.size()));
  stage.at_once = blocks_at_once(layer, part, routing, num_threads);
  stage.num_nodes = layer.num_nodes();
  for (int node = 0; node < stage.num_nodes; ++node) stage.spans[node] = layer.span(part, node);
  return stage;
}

int64_t column_units(int64_t cols) { return (round_up(cols, kColumnUnit) + kColumnsInTask - 1) / kColumnsInTask; }

}  // namespace

Plan forward_plan(const ExpertLayer& layer, const Routing& routing, int num_threads, const ForwardWork& work) {
  Plan plan;
  const int threads = plan.num_threads = threads_for_work(layer, routing, num_threads);
  const auto experts = static_cast<int64_t>(routing.experts.size());
  if (work.parts_to_check) plan.stages.push_back(stage_of(kCheck, work.parts_to_check));
  if (work.quantized) plan.stages.push_back(stage_of(kPrepare, routing.num_tokens));
  if (by_expert(layer, routing, threads)) {
    plan.stages.push_back(stage_of(kWholeExpert, experts));
  } else {
    plan.stages.push_back(stage_of(kLoad, experts));
    plan.stages.push_back(block_stage(kGateUp, layer, kUp, routing, threads));
    plan.stages.push_back(stage_of(kFinish, experts));
    if (work.with_out) plan.stages.push_back(block_stage(kDownForward, layer, kDown, routing, threads));
  }
  if (work.with_out) plan.stages.push_back(stage_of(kSum, routing.num_tokens));
  return plan;
}

// A column of a transposed product is one sum over all rows of the matrix in order, so that its bits do not depend on
// the split. Where the rows lie on several nodes, each node extends the sum of the previous one (add_relay).
Plan backward_plan(const ExpertLayer& layer, const Routing& routing, int num_threads, int64_t parts_to_check) {
  Plan plan;
  const int threads = plan.num_threads = threads_for_work(layer, routing, num_threads);
  const auto experts = static_cast<int64_t>(routing.experts.size());
  if (parts_to_check) plan.stages.push_back(stage_of(kCheck, parts_to_check));
  if (by_expert(layer, routing, threads)) {
    plan.stages.push_back(stage_of(kWholeExpert, experts));
  } else {
    plan.stages.push_back(stage_of(kLoad, experts));
    add_relay(&plan, kDownBackward, experts, column_units(layer.shape().intermediate), layer.num_nodes());
    plan.stages.push_back(stage_of(kActivationBackward, experts));
    add_relay(&plan, kInputBackward, experts, column_units(layer.shape().hidden), layer.num_nodes());
  }
  plan.stages.push_back(stage_of(kSum, routing.num_tokens));
  return plan;
}

}  // namespace kt
