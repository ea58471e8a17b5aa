// Plans of forward, backward and loading as data, for one, two and four memory nodes: no kernel runs here.
#include <cerrno>
#include <map>
#include <set>
#include <tuple>

#include "checks.h"
#include "ops/experts/schedule.h"
#include "ops/pairs/finite.h"
#include "threads/topology.h"
#include "weights/loader.h"

namespace kt_test {
namespace {

// Tokens routed to experts in turn, one expert each.
kt::Routing routing_of(const kt::ExpertShape& shape, int64_t tokens) {
  std::vector<int32_t> ids;
  std::vector<float> weights(static_cast<size_t>(tokens), 1.0f);
  for (int64_t t = 0; t < tokens; ++t) ids.push_back(static_cast<int32_t>(t % shape.num_experts));
  kt::RoutedCall call;
  call.ids = {ids.data(), kt::DType::kI32, 2, {tokens, 1}, {1, 1}};
  call.weights = {weights.data(), kt::DType::kF32, 2, {tokens, 1}, {1, 1}};
  kt::Routing routing;
  kt::route(shape, call, 0, tokens, &routing);
  return routing;
}

const kt::Stage* stage_with(const kt::Plan& plan, int step) {
  for (const kt::Stage& stage : plan.stages) {
    if (stage.step == step) return &stage;
  }
  return nullptr;
}

template <class Body>
void for_each_range(const kt::Stage& stage, Body&& body) {
  for (int node = 0; node < stage.num_nodes; ++node) {
    for (int64_t task = 0; task < stage.num_tasks(node); ++task) body(stage.range(node, task));
  }
}

// Every block of every expert once, on the node that holds it.
void test_blocks(const kt::ExpertLayer& layer, const kt::Stage* stage, kt::Projection part, int64_t experts,
                 Report& report) {
  report.equal("experts are cut between threads", stage != nullptr);
  if (stage == nullptr) return;
  std::set<std::pair<int64_t, int64_t>> seen;
  int64_t tasks = 0;
  for_each_range(*stage, [&](const kt::Range& range) {
    ++tasks;
    const auto piece = layer.piece(range.item, part, range.node);
    report.equal("a range lies on its node", range.count > 0 && range.first >= piece.first &&
                                                 range.first + range.count <= piece.first + piece.blocks.blocks);
    for (int64_t block = range.first; block < range.first + range.count; ++block)
      report.equal("a block is multiplied once", seen.insert({range.item, block}).second);
  });
  report.equal("no block is left out", static_cast<int64_t>(seen.size()) == experts * layer.shape_of(part).blocks());
  report.equal("an expert is several tasks", tasks >= 2 * experts);
}

// Every unit of every expert passes the nodes in their order, a stage each.
void test_relay(const kt::Plan& plan, int step, int64_t experts, int64_t units, int num_nodes, Report& report) {
  std::map<std::pair<int64_t, int64_t>, int> passed;
  bool all_busy = false;
  for (const kt::Stage& stage : plan.stages) {
    if (stage.step != step) continue;
    std::set<std::pair<int64_t, int64_t>> here;
    std::set<int> busy;
    for_each_range(stage, [&](const kt::Range& range) {
      busy.insert(range.node);
      for (int64_t unit = range.first; unit < range.first + range.count; ++unit) {
        report.equal("a sum is on one node in a stage", here.insert({range.item, unit}).second);
        report.equal("a sum goes from node to node", passed[{range.item, unit}]++ == range.node);
      }
    });
    all_busy |= static_cast<int>(busy.size()) == num_nodes;
  }
  report.equal("all nodes work at the same time", all_busy);
  report.equal("no column is left out", static_cast<int64_t>(passed.size()) == experts * units);
  for (const auto& [unit, count] : passed) report.equal("a sum passes every node", count == num_nodes);
}

void test_calls(int num_nodes, Report& report) {
  const kt::ExpertShape shape{4, 1024, 640};
  const kt::ExpertLayer layer(shape, {}, num_nodes);
  const kt::Routing routing = routing_of(shape, 64);
  const kt::Plan forward = kt::forward_plan(layer, routing, 4, {3, true, true});
  report.equal("what is read is checked before anything else",
               forward.stages[0].step == kt::kCheck && forward.stages[0].num_tasks(0) == 3);
  report.equal("the output is written last, by token",
               forward.stages.back().step == kt::kSum && forward.stages.back().items == 64);
  report.equal("all threads work", forward.num_threads == 4);
  test_blocks(layer, stage_with(forward, kt::kGateUp), kt::kGate, 4, report);
  test_blocks(layer, stage_with(forward, kt::kDownForward), kt::kDown, 4, report);
  const kt::Plan kept = kt::forward_plan(layer, routing, 4, {0, false, false});
  report.equal("only what backward needs", !kept.has(kt::kDownForward) && !kept.has(kt::kSum) && kept.has(kt::kGateUp));

  const kt::Plan backward = kt::backward_plan(layer, routing, 4, 2);
  report.equal("gradients are checked first", backward.stages[0].step == kt::kCheck);
  report.equal("a job holds the plan", static_cast<int>(backward.stages.size()) <= kt::kMaxPhases);
  test_relay(backward, kt::kDownBackward, 4, 640 / kt::kColumnsInTask, num_nodes, report);
  test_relay(backward, kt::kInputBackward, 4, 1024 / kt::kColumnsInTask, num_nodes, report);
}

// NaN and Inf in large inputs are searched for by the threads of the job itself, in parts of some rows.
void test_check(Report& report) {
  constexpr int64_t kRows = 64, kCols = 2048, kPartRows = 16;
  std::vector<float> values(kRows * kCols, 1.0f);
  const auto rows = [&](int64_t count) { return tensor_view(values.data(), kt::DType::kF32, {count, kCols}); };
  const kt::TensorView all = rows(kRows), few = rows(kPartRows);
  const auto parts_in_job = [&](const kt::TensorView& x, int num_threads) {
    int64_t parts = 0;
    const kt::Status status = kt::with_check(
        {{&x, "x"}}, num_threads, [&](const kt::FiniteCheck* check) { parts = check ? check->num_parts() : 0; });
    report.equal("finite values pass", status.ok());
    return parts;
  };
  report.equal("a large matrix is checked in the job, in parts", parts_in_job(all, 2) == kRows / kPartRows);
  report.equal("a small one by the caller", parts_in_job(few, 2) == 0);
  report.equal("without other threads by the caller", parts_in_job(all, 1) == 0);

  values[40 * kCols + 7] = INFINITY;
  std::set<int64_t> found;
  const kt::Status status = kt::with_check({{&all, "x"}}, 2, [&](const kt::FiniteCheck* check) {
    for (int64_t part = 0; part < check->num_parts(); ++part) {
      try {
        check->check_part(part);
      } catch (const kt::NotFinite&) {
        found.insert(part);
      }
    }
    throw kt::NotFinite();
  });
  report.equal("the part that holds it finds it", found == std::set<int64_t>{40 / kPartRows});
  report.equal("its place is named", status.message() == "x[40, 7] is NaN or Inf");
}

void test_whole_experts(Report& report) {
  const kt::ExpertShape shape{64, 128, 64};
  const kt::Routing routing = routing_of(shape, 640);
  for (const int num_nodes : {1, 2}) {
    const kt::ExpertLayer layer(shape, {}, num_nodes);
    const bool whole = num_nodes == 1;
    for (const kt::Plan& plan : {kt::forward_plan(layer, routing, 2, {}), kt::backward_plan(layer, routing, 2, 0)}) {
      report.equal("many experts: one task each, but on several nodes", plan.has(kt::kWholeExpert) == whole);
      report.equal("nothing to check, no stage for it", !plan.has(kt::kCheck));
    }
  }
  const kt::ExpertLayer layer(shape, {}, 2);
  report.equal("little work is done by the caller alone",
               kt::forward_plan(layer, routing_of(shape, 4), 2, {}).num_threads == 1);
}

void test_loading(Report& report) {
  for (const int num_nodes : {1, 2, 4}) {
    const kt::Plan plan = kt::loading_plan(5, {3, num_nodes, ""});
    std::set<std::pair<int64_t, int>> pieces;
    for_each_range(plan.stages[0], [&](const kt::Range& range) {
      report.equal("a piece is packed on its node", range.first == range.node && range.count == 1);
      pieces.insert({range.item, range.node});
    });
    report.equal("every piece of every matrix", static_cast<int>(pieces.size()) == 5 * 3 * num_nodes);
    report.equal("several nodes: by their own threads", plan.stages[0].bound == (num_nodes > 1));
    report.equal("all threads load", plan.num_threads == 3 && plan.stages.size() == 1);
  }
}

// Where three threads take tasks in turn, a thread's next range is the third from its own, and the last have none.
void test_next(Report& report) {
  kt::Stage stage = kt::stage_of(0, 2);
  stage.at_once = 4;
  stage.num_nodes = 2;
  stage.spans[0] = {0, 10};
  stage.spans[1] = {10, 3};
  for (int node = 0; node < stage.num_nodes; ++node) {
    for (int64_t task = 0; task < stage.num_tasks(node); ++task) {
      const kt::Range range = stage.range(node, task, 3);
      report.equal("without a stride nothing is next", stage.range(node, task).next_item == -1);
      if (task + 3 >= stage.num_tasks(node)) {
        report.equal("the last ranges have no next one", range.next_item == -1);
        continue;
      }
      const kt::Range next = stage.range(node, task + 3);
      report.equal("the next range's item", range.next_item == next.item);
      report.equal("the next range's first unit", range.next_first == next.first);
    }
  }
}

std::vector<std::tuple<const uint8_t*, size_t, int>> asked;

void test_placement(Report& report) {
  kt::Topology four;
  for (const int id : {3, 5, 8, 9}) four.nodes.push_back({id, {0}, 1});
  const kt::SimulatedTopology simulated(four);
  const kt::ExpertShape shape{3, 200, 176};
  for (const int num_nodes : {2, 4}) {
    asked.clear();
    kt::set_placement_call([](void* data, size_t bytes, int node) {
      asked.emplace_back(static_cast<const uint8_t*>(data), bytes, node);
      return 0;
    });
    const kt::ExpertLayer layer(shape, {}, num_nodes);
    report.equal("one request for each node", static_cast<int>(asked.size()) == num_nodes);
    for (int node = 0; node < num_nodes; ++node) {
      const auto [data, bytes, id] = asked.at(static_cast<size_t>(node));
      report.equal("the system's number of the node", id == four.nodes[static_cast<size_t>(node)].id);
      report.equal("a node's bytes", static_cast<int64_t>(bytes) == layer.node_bytes(node));
      report.equal("weights are spread over the nodes",
                   layer.node_bytes(node) * num_nodes * 2 > layer.resident_bytes());
      for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
        for (const kt::Projection part : {kt::kGate, kt::kUp, kt::kDown}) {
          const auto piece = layer.piece(expert, part, node).blocks;
          report.equal("a piece lies on its node",
                       piece.blocks > 0 && piece.data >= data &&
                           piece.data + piece.blocks * piece.shape.block_bytes() <= data + bytes);
        }
      }
    }
  }
  const kt::PlacementCounts before = kt::placement_counts();
  kt::set_placement_call([](void*, size_t, int) { return EPERM; });
  const kt::ExpertLayer refused(shape, {}, 2);
  const kt::PlacementCounts after = kt::placement_counts();
  report.equal("refusals are counted, with their reason",
               after.refused == before.refused + 2 && after.granted == before.granted && after.last_error == EPERM);
  kt::set_placement_call(nullptr);
  asked.clear();
  const kt::ExpertLayer one(shape, {}, 1);
  report.equal("one node asks for nothing",
               kt::placement_counts().refused == after.refused && kt::placement_counts().granted == after.granted);
}

}  // namespace

void test_plan(Report& report) {
  for (const int num_nodes : {1, 2, 4}) test_calls(num_nodes, report);
  test_check(report);
  test_whole_experts(report);
  test_next(report);
  test_loading(report);
  test_placement(report);
}

}  // namespace kt_test
