// Who does what where, as data: the stages of a job, and the ranges of work in each, by memory node.
//
// A stage is `items` times `units`: experts times blocks of weights, say. Each node has a span of the units, the same
// for all items; a task is a range of a span. Nothing here knows what an item or a unit is, and no choice here changes
// a result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "threads/pool.h"

namespace kt {

struct Span {
  int64_t first = 0, size = 0;
};

// Units [first, first + count) of one item, on one node.
struct Range {
  int node;
  int64_t item, first, count;
};

struct Stage {
  int step = 0;  // what is to be done; a number of whoever makes the plan
  int64_t items = 0;
  int64_t at_once = 1;  // units in a task
  int num_nodes = 1;
  Span spans[kMaxNodes] = {{0, 1}};
  bool bound = false;  // each task on a processor of its node (pool.h)

  int64_t ranges(int node) const { return (spans[node].size + at_once - 1) / at_once; }
  int64_t num_tasks(int node) const { return items * ranges(node); }
  Range range(int node, int64_t task) const {
    const int64_t begin = task % ranges(node) * at_once;
    return {node, task / ranges(node), spans[node].first + begin, std::min(at_once, spans[node].size - begin)};
  }
};

// One queue: `items` tasks that belong to no node.
inline Stage stage_of(int step, int64_t items) {
  Stage stage;
  stage.step = step;
  stage.items = items;
  return stage;
}

struct Plan {
  int num_threads = 1;
  std::vector<Stage> stages;  // each begins when the one before has ended; kMaxPhases at most

  bool has(int step) const {
    return std::any_of(stages.begin(), stages.end(), [&](const Stage& stage) { return stage.step == step; });
  }
};

// Adds stages in which every unit of every item passes the nodes in their order: node 0, then node 1, ... The units are
// cut into groups, and while a node has one group, the node before it has the next.
void add_relay(Plan* plan, int step, int64_t items, int64_t units, int num_nodes);

// body(step, range) for each range of each stage. The first exception is rethrown; stages after it are left out.
template <class Body>
void run(const Plan& plan, Body&& body) {
  struct Task {
    const Stage* stage;
    Body* body;
  } tasks[kMaxPhases];
  Phase phases[kMaxPhases];
  int count = 0;
  for (const Stage& stage : plan.stages) {
    tasks[count] = {&stage, &body};
    Phase& phase = phases[count];
    phase.num_queues = stage.num_nodes;
    for (int node = 0; node < stage.num_nodes; ++node) phase.num_tasks[node] = stage.num_tasks(node);
    phase.self = &tasks[count++];
    phase.bound = stage.bound;
    phase.task = [](void* self, int node, int64_t task) {
      const Task& t = *static_cast<Task*>(self);
      (*t.body)(t.stage->step, t.stage->range(node, task));
    };
  }
  ThreadPool::instance().run_phases(phases, count, plan.num_threads);
}

}  // namespace kt
