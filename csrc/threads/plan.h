// A job as data: its stages, and the ranges of work of each stage by memory node (NUMA).
//
// A stage is a grid of `items` x `units`, for example experts x blocks of weights. Each node has a span of the units,
// the same span for all items. A task is a range of one span. The caller defines items and units. No choice of a plan
// changes a result.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>

#include "threads/pool.h"

namespace kt {

struct Span {
  int64_t first, size;
};

// Units [first, first + count) of one item, on one node.
struct Range {
  int node;
  int64_t item, first, count;
  // The beginning of the range that the same thread probably takes next, where threads take tasks in turn: only to
  // prefetch. -1: there is none.
  int64_t next_item = -1, next_first = 0;
};

// `stage_of` makes one.
struct Stage {
  int step;  // the operation, numbered by the maker of the plan
  int64_t items;
  int64_t at_once;  // units in a task
  int num_nodes;
  Span spans[kMaxNodes];
  bool bound;  // each task on a processor of its node (pool.h)

  int64_t ranges(int node) const { return (spans[node].size + at_once - 1) / at_once; }
  int64_t num_tasks(int node) const { return items * ranges(node); }
  // `stride`: from a task of the node to the next one that the same thread takes; 0: not known.
  Range range(int node, int64_t task, int64_t stride = 0) const {
    const int64_t begin = task % ranges(node) * at_once;
    Range found{node, task / ranges(node), spans[node].first + begin, std::min(at_once, spans[node].size - begin)};
    if (const int64_t next = task + stride; stride > 0 && next < num_tasks(node)) {
      found.next_item = next / ranges(node);
      found.next_first = spans[node].first + next % ranges(node) * at_once;
    }
    return found;
  }
};

// One queue: `items` tasks that belong to no node.
inline Stage stage_of(int step, int64_t items) {
  return {.step = step, .items = items, .at_once = 1, .num_nodes = 1, .spans = {{0, 1}}, .bound = false};
}

// At most kMaxPhases stages, in the object itself: to make a plan allocates nothing.
class Stages {
 public:
  void push_back(const Stage& stage) {
    assert(count_ < kMaxPhases);
    stages_[count_++] = stage;
  }
  int size() const { return count_; }
  const Stage* begin() const { return stages_; }
  const Stage* end() const { return stages_ + count_; }
  const Stage& operator[](int index) const { return stages_[index]; }
  const Stage& back() const { return stages_[count_ - 1]; }

 private:
  int count_ = 0;
  Stage stages_[kMaxPhases];  // the first count_ are set
};

struct Plan {
  int num_threads = 1;
  Stages stages;  // a stage begins when the previous one has ended

  bool has(int step) const {
    return std::any_of(stages.begin(), stages.end(), [&](const Stage& stage) { return stage.step == step; });
  }
};

// Adds stages that pass every unit of every item through the nodes in order: node 0, then node 1, ... The stages form a
// pipeline over groups of units: while a node works on one group, the previous node works on the next group.
void add_relay(Plan* plan, int step, int64_t items, int64_t units, int num_nodes);

// Calls body(step, range) for each range of each stage. Rethrows the first exception; later stages are skipped.
template <class Body>
void run(const Plan& plan, Body&& body) {
  struct Task {
    const Stage* stage;
    Body* body;
    int64_t stride;
  } tasks[kMaxPhases];
  Phase phases[kMaxPhases];
  int count = 0;
  for (const Stage& stage : plan.stages) {
    tasks[count] = {&stage, &body, std::max(1, plan.num_threads / stage.num_nodes)};
    Phase& phase = phases[count];
    phase.num_queues = stage.num_nodes;
    for (int node = 0; node < stage.num_nodes; ++node) phase.num_tasks[node] = stage.num_tasks(node);
    phase.self = &tasks[count++];
    phase.bound = stage.bound;
    phase.task = [](void* self, int node, int64_t task) {
      const Task& t = *static_cast<Task*>(self);
      (*t.body)(t.stage->step, t.stage->range(node, task, t.stride));
    };
  }
  ThreadPool::instance().run_phases(phases, count, plan.num_threads);
}

}  // namespace kt
