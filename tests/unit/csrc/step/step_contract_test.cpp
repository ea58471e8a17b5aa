// The native step's contract: a token's bits depend on its own inputs alone. Not on the other sequences of a batch,
// their order, how a prompt is cut into batches, the slots of the KV pool or of the LoRA pool, the number of threads
// and of memory nodes, or on adapters that other tokens have. For every kind of attention, MLP and router, and every
// format of the experts.
#include "nodes.h"
#include "remembered.h"
#include "step_server.h"

namespace kt_test {
namespace {

// The base and adapters of all ranks; more tokens of one adapter than a task of LoRA's products has, and enough for
// several threads.
const std::vector<std::pair<int64_t, int64_t>> kLengths = {{1, -1}, {5, 0}, {33, 1}, {70, 0}, {12, -1}, {9, 2}};
const std::vector<int64_t> kWhole(kLengths.size(), 99), kDecode(kLengths.size(), 1), kMixed = {1, 1, 16, 64, 1, 3};

std::string named(const Model& model, const std::string& what) {
  return std::string("step, ") + model.kind.name + ": bits depend on " + what;
}

// Prompts cut in each of these ways on each number of threads; each way and each number meet both numbers of memory
// nodes.
void test_threads_and_nodes(const Model& model, const Server& whole, const std::vector<Sequence>& sequences,
                            std::initializer_list<const std::vector<int64_t>*> ways, const kt::Tiles& tiles,
                            Report& report) {
  int run = 0;
  for (const auto* at_once : ways) {
    for (const int threads : {1, 2, 3}) {
      const int nodes = 2 - run++ % 2;
      if (at_once == &kDecode && threads == 3) continue;
      const kt::SimulatedTopology topology(simulated(nodes));
      Server server(model, sequences, tiles, threads, true, nodes);
      server.run_all(*at_once, report);
      report.equal(named(model, std::to_string(threads) + " threads, " + std::to_string(nodes) +
                                    " memory nodes, or on how prompts are cut"),
                   server.same(whole));
    }
  }
}

// Every sequence in batches of its own; the base also without a LoRA pool.
void test_alone(const Model& model, const Server& whole, const std::vector<Sequence>& sequences, const kt::Tiles& tiles,
                Report& report) {
  Server alone(model, sequences, tiles, 2), base(model, sequences, tiles, 2, false);
  for (size_t i = 0; i < sequences.size(); ++i) {
    std::vector<int64_t> counts(sequences.size(), 0);
    counts[i] = sequences[i].tokens();
    alone.run(counts, report);
    if (sequences[i].adapter >= 0) continue;
    base.run(counts, report);
    for (int64_t row = sequences[i].first_row; row < sequences[i].first_row + counts[i]; ++row)
      report.equal(named(model, "the LoRA pool"), base.out.same_row(row, whole.out, row));
  }
  report.equal(named(model, "other sequences"), alone.same(whole));
}

// Adapters in other slots of the LoRA pool, in batches of all sequences and token by token.
void test_moved_adapters(const Model& model, const Server& whole, const std::vector<Sequence>& sequences,
                         const kt::Tiles& tiles, Report& report) {
  const Model moved = model.with_moved_adapters();
  for (const auto* at_once : {&kWhole, &kMixed}) {
    Server server(moved, sequences, tiles, 2);
    server.run_all(*at_once, report);
    report.equal(named(model, "the adapters' slots"), server.same(whole));
  }
}

// Drawn batches in drawn orders, in other slots, on drawn numbers of threads and nodes.
void test_drawn(const Model& model, const Server& whole, const std::vector<Sequence>& sequences, const kt::Tiles& tiles,
                int trials, Random& random, Report& report) {
  for (int trial = 0; trial < trials; ++trial) {
    std::vector<Sequence> moved = sequences;
    draw_slots(moved, static_cast<unsigned>(random.below(1 << 20)));
    const int nodes = 1 + trial % 2, threads = 1 + static_cast<int>(random.below(4));
    const kt::SimulatedTopology topology(simulated(nodes));
    Server server(model, moved, tiles, threads, true, nodes);
    std::vector<size_t> order(moved.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (std::vector<int64_t> left = server.left(kWhole); *std::max_element(left.begin(), left.end()) > 0;
         left = server.left(kWhole)) {
      for (int64_t& count : left) count = random.below(3) == 0 ? std::min<int64_t>(count, 1) : random.below(count + 1);
      for (size_t i = 1; i < order.size(); ++i)
        std::swap(order[i], order[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
      server.run(left, report, order);
    }
    report.equal(named(model, "batches, their order, or slots of the pool"), server.same(whole));
  }
}

// More keys than attention computes at once, so that its parts are computed by several threads and merged.
void test_long_prefix(const Model& model, const kt::Tiles& tiles, Random& random, Report& report) {
  const std::vector<Sequence> sequences = drawn_sequences({{530, 2}, {4, -1}}, random);
  Server whole(model, sequences, tiles, 1), cut(model, sequences, tiles, 2);
  whole.run_all({530, 4}, report);
  const std::vector<int64_t> batches[] = {{515, 1}, {1, 1}, {1, 0}, {13, 2}};
  for (const auto& counts : batches) cut.run(counts, report);
  report.equal(named(model, "how a long prompt is cut"), cut.same(whole));
}

// Another model's tokens are others: the comparisons see a difference.
void test_comparison(const Server& whole, const std::vector<Sequence>& sequences, const Model& model,
                     const kt::Tiles& tiles, Report& report) {
  std::vector<Sequence> other = sequences;
  other.back().ids.back() = (other.back().ids.back() + 1) % kNanId;
  Server server(model, other, tiles, 1);
  server.run_all(kWhole, report);
  report.equal("step: the comparison of bits sees nothing", !server.same(whole));
}

// What depends on the format of the experts: what their kernels compute for batches of other sizes, on other threads
// and nodes. kMixed ends with batches of one and two tokens.
void test_format(const Model& model, const kt::Tiles& tiles, Random& random, Report& report) {
  const std::vector<Sequence> sequences = drawn_sequences(kLengths, random);
  Server whole(model, sequences, tiles, 1);
  whole.run_all(kWhole, report);
  test_threads_and_nodes(model, whole, sequences, {&kWhole, &kMixed}, tiles, report);
  test_alone(model, whole, sequences, tiles, report);
  test_drawn(model, whole, sequences, tiles, 2, random, report);
}

void test_kind(const Model& model, const kt::Tiles& tiles, Random& random, Report& report) {
  const std::vector<Sequence> sequences = drawn_sequences(kLengths, random);
  Server whole(model, sequences, tiles, 1);
  whole.run_all(kWhole, report);
  report.equal("step: a finite token is refused",
               std::find(whole.refused.begin(), whole.refused.end(), true) == whole.refused.end());
  test_comparison(whole, sequences, model, tiles, report);
  // Whole prompts, each token alone, and both at once.
  test_threads_and_nodes(model, whole, sequences, {&kWhole, &kDecode, &kMixed}, tiles, report);
  test_alone(model, whole, sequences, tiles, report);
  test_drawn(model, whole, sequences, tiles, 6, random, report);
  test_moved_adapters(model, whole, sequences, tiles, report);
}

// Drawn once: all instruction sets have the same models. `number`: another one for each model.
const Model& drawn_model(unsigned number, const Kind& kind) {
  return remembered(Digest().add(number), [&] {
    Random random(number);
    return Model(kind, random);
  });
}

}  // namespace

void test_contract(const kt::Tiles& tiles, Report& report) {
  Random random(17);
  const Kind kinds[] = {
      {.name = "grouped-query, routed, float32"},
      {.name = "grouped-query, routed, bf16", .bf16 = true},
      {.name = "grouped-query, shared experts, bf16", .bf16 = true, .top_k = 3, .is_mixed = true},
      {.name = "grouped-query, groups, bf16", .bf16 = true, .top_k = 3, .is_mixed = true, .in_groups = true},
      {.name = "hybrid, float32", .is_mixed = true, .is_hybrid = true, .by_key_head = true},
      {.name = "hybrid, bf16", .bf16 = true, .top_k = 3, .is_mixed = true, .is_hybrid = true},
      {.name = "latent, routed, bf16", .bf16 = true, .normalises = false, .is_latent = true},
      {.name = "latent, groups, float32", .top_k = 3, .is_latent = true, .is_mixed = true, .in_groups = true},
      {.name = "latent, groups, bf16",
       .bf16 = true,
       .top_k = 3,
       .is_latent = true,
       .compresses_queries = false,
       .is_mixed = true,
       .in_groups = true},
  };
  unsigned number = 0;
  for (const Kind& kind : kinds) {
    const Model& model = drawn_model(number++, kind);
    test_kind(model, tiles, random, report);
    test_long_prefix(model, tiles, random, report);
  }
  // Each format with one kind of attention in bf16, and with the other in float32.
  bool is_latent = false;
  for (const kt::Format& format : all_formats()) {
    if (format == kt::Format{}) continue;
    is_latent = !is_latent;
    for (const bool bf16 : {false, true}) {
      ++number;
      if (!report.takes(bf16)) continue;
      std::string name = kt::format_name(format);
      name += bf16 ? " bf16" : " float32";
      const Model& model =
          drawn_model(number, {.name = name, .bf16 = bf16, .is_latent = is_latent == bf16, .format = format});
      test_format(model, tiles, random, report);
    }
  }
}

}  // namespace kt_test
