#include "threads/plan.h"

namespace kt {

void add_relay(Plan* plan, int step, int64_t items, int64_t units, int num_nodes) {
  // In a relay of g groups over n nodes, the first and the last n - 1 stages leave some nodes without their own work.
  const int64_t groups = num_nodes == 1 ? 1 : std::clamp<int64_t>(units, 1, std::max(8, 2 * num_nodes));
  for (int64_t round = 0; round < groups + num_nodes - 1; ++round) {
    Stage stage = stage_of(step, items);
    stage.num_nodes = num_nodes;
    for (int node = 0; node < num_nodes; ++node) {
      const int64_t group = round - node;
      stage.spans[node] = {};
      if (group < 0 || group >= groups) continue;
      const int64_t first = units * group / groups;
      stage.spans[node] = {first, units * (group + 1) / groups - first};
    }
    plan->stages.push_back(stage);
  }
}

}  // namespace kt
