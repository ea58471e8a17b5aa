// The native step: double precision, tokens that are not finite, what is refused, and the memory that it keeps.
// step_contract_test.cpp has the bits.
#include <functional>

#include "allocations.h"
#include "nodes.h"
#include "remembered.h"
#include "step_exact.h"
#include "step_server.h"

namespace kt_test {
namespace {

// The base and adapters of all ranks; more tokens of one adapter than a task of LoRA's products has, and enough for
// several threads.
const std::vector<std::pair<int64_t, int64_t>> kLengths = {{1, -1}, {5, 0}, {33, 1}, {70, 0}, {12, -1}, {9, 2}};
const std::vector<int64_t> kWhole(kLengths.size(), 99), kDecode(kLengths.size(), 1), kMixed = {1, 1, 16, 64, 1, 3};

// Relative to the norm of a token's hidden states. Measured on portable, AVX2 and AVX-512 kernels: 1.8e-6 in float32,
// 3.6e-2 in bf16 (a hybrid; others 2.5e-2), which rounds the result of every operation.
double tolerance(const Model& model) { return model.kind.bf16 ? 8e-2 : 5e-6; }

// Of a model that outlives the test, computed once for all instruction sets.
const std::vector<Row>& exact_rows(const Model& model, const Sequence& sequence,
                                   size_t without_experts = ExactStep::kNoLayer) {
  Digest digest;
  digest.add(reinterpret_cast<uintptr_t>(&model)).add(sequence.ids).add(sequence.adapter).add(without_experts);
  return remembered(digest, [&] { return ExactStep(model, sequence.ids, sequence.adapter, without_experts).hidden; });
}

void compare(const Tensor& out, const Sequence& sequence, const std::vector<Row>& exact, double allowed,
             Report& report) {
  for (int64_t t = 0; t < sequence.tokens(); ++t) {
    Row error = row_of(out, sequence.first_row + t);
    const Row& wanted = exact[static_cast<size_t>(t)];
    add(error, wanted, -1);
    report.close("step: token " + std::to_string(t) + " of adapter " + std::to_string(sequence.adapter), norm(error), 0,
                 allowed, norm(wanted));
  }
}

void test_values(const Model& model, const kt::Tiles& tiles, Random& random, Report& report) {
  const std::vector<Sequence> sequences = drawn_sequences(kLengths, random);
  Server server(model, sequences, tiles, 2);
  server.run_all(kMixed, report);
  for (const Sequence& sequence : sequences)
    compare(server.out, sequence, exact_rows(model, sequence), tolerance(model), report);
  report.equal("step: a finite token is refused",
               std::find(server.refused.begin(), server.refused.end(), true) == server.refused.end());
}

// A row with infinite routing weights has no experts in that layer.
void test_refused_routing(const Model& model, const kt::Tiles& tiles, Random& random, Report& report) {
  Model spoiled = model;
  for (int64_t i = 0; i < kHidden; ++i) {
    spoiled.layers[1].gate.set(i, 3e38f);
    spoiled.layers[1].gate.set(kHidden + i, -3e38f);
  }
  const std::vector<Sequence> sequences = drawn_sequences({{3, -1}, {9, 1}}, random);
  Server server(spoiled, sequences, tiles, 2);
  server.run_all({2, 8}, report);
  for (const Sequence& sequence : sequences)
    compare(server.out, sequence, exact_rows(model, sequence, 1), tolerance(model), report);
  report.equal("step: infinite routing weights are not refused",
               std::find(server.refused.begin(), server.refused.end(), false) == server.refused.end());
}

// A token whose embedding is NaN: it is refused, and the other sequences do not change. In a batch without adapters the
// later tokens of its sequence see its keys, and are refused too. In a batch with an adapter its keys and values are
// zeros in the pool. A state has NaN from this token on.
void test_not_finite(const Model& model, bool adapted, const kt::Tiles& tiles, Random& random, Report& report) {
  constexpr size_t kHit = 2, kToken = 3;
  auto lengths = kLengths;
  for (auto& [length, adapter] : lengths) adapter = adapted ? adapter : -1;
  const std::vector<Sequence> sequences = drawn_sequences(lengths, random);
  std::vector<Sequence> spoiled = sequences;
  spoiled[kHit].ids[kToken] = kNanId;
  Server clean(model, sequences, tiles, 2);
  clean.run_all(kWhole, report);
  const int64_t first = sequences[kHit].first_row, hit = first + static_cast<int64_t>(kToken),
                end = first + sequences[kHit].tokens();
  for (const auto* at_once : {&kWhole, &kDecode, &kMixed}) {
    Server server(model, spoiled, tiles, 2);
    server.run_all(*at_once, report);
    for (int64_t row = 0; row < count_tokens(sequences); ++row) {
      const bool sees = row >= hit && row < end, is_lost = adapted && !model.kind.is_hybrid ? row == hit : sees;
      const Row found = row_of(server.out, row);
      const auto is_nan = [](double x) { return x != x; };
      report.equal("step: refused tokens", server.refused[static_cast<size_t>(row)] == is_lost);
      if (is_lost) {
        report.equal("step: NaN is lost", std::all_of(found.begin(), found.end(), is_nan));
      } else {
        report.equal("step: NaN reaches other tokens", std::none_of(found.begin(), found.end(), is_nan));
        report.equal("step: NaN changes other sequences", sees || server.out.same_row(row, clean.out, row));
      }
    }
    const bool is_latent = model.kind.is_latent;
    const size_t first = model.kind.is_hybrid ? 1 : 0;
    for (const Tensor& rows : {server.pool.keys[first], is_latent ? server.pool.keys[1] : server.pool.values[1]}) {
      const Row written = row_of(rows, model.kind.key_heads() * spoiled[kHit].slots[kToken]);
      report.equal("step: what the pool has of a token with NaN",
                   std::all_of(written.begin(), written.end(), [&](double x) { return adapted ? x == 0 : x != x; }));
    }
  }
}

// What no batch of three tokens may be: the first two are an adapter's, with a prefix of two keys.
struct Wrong {
  std::string message;
  std::function<void(Batch&)> change;
};

std::vector<Wrong> wrong_numbers() {
  static const std::vector<int32_t> bad_slots = {0, kKvSlots, 1, 2};
  return {
      {"ids[1] is 60; allowed: 0 to 59", [](Batch& b) { b.ids[1] = kVocabulary; }},
      {"ids[2] is -1; allowed: 0 to 59", [](Batch& b) { b.ids[2] = -1; }},
      {"positions[0] is 640; allowed: 0 to 639", [](Batch& b) { b.positions[0] = kPositions; }},
      {"positions[1] is -1; allowed: 0 to 639", [](Batch& b) { b.positions[1] = -1; }},
      {"slots[2] is 700; allowed: 0 to 699", [](Batch& b) { b.slots[2] = kKvSlots; }},
      {"slots[0] is -1; allowed: 0 to 699", [](Batch& b) { b.slots[0] = -1; }},
      {"the sequences have 2 new tokens; there are 3 ids", [](Batch& b) { b.sequences.pop_back(); }},
      {"sequence 0 has key 1 in slot 700; allowed: 0 to 699",
       [](Batch& b) { b.sequences[0].slots = bad_slots.data(); }},
      {"sequence 0 has a prefix of -1 keys", [](Batch& b) { b.sequences[0].prefix = -1; }},
      {"sequence 1 has queries 1 to 1; allowed: 2 to 2", [](Batch& b) { b.sequences[1].first_query = 1; }},
  };
}

std::vector<Wrong> wrong_states() {
  return {
      {"states[1] is 12; allowed: 0 to 11", [](Batch& b) { b.states[1] = kStates; }},
      {"states[0] is -1; allowed: 0 to 11", [](Batch& b) { b.states[0] = -1; }},
      {"states has 1 slots; there are 2 sequences", [](Batch& b) { b.states.pop_back(); }},
      {"states has slot 3 twice: a sequence has a state of its own", [](Batch& b) { b.states = {3, 3}; }},
  };
}

std::vector<Wrong> wrong_adapters() {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return {
      {"adapter_rows[0] has slot 3; allowed: 0 to 2", [](Batch& b) { b.adapter_rows[0].slot = kLoraSlots; }},
      {"adapter_rows[0] has slot -1; allowed: 0 to 2", [](Batch& b) { b.adapter_rows[0].slot = -1; }},
      {"adapter_rows[0] has rank 7; allowed: 1 to 6", [](Batch& b) { b.adapter_rows[0].rank = kRank + 1; }},
      {"adapter_rows[0] has rank 0; allowed: 1 to 6", [](Batch& b) { b.adapter_rows[0].rank = 0; }},
      {"adapter_rows[0] has a scaling that is not a finite number",
       [](Batch& b) { b.adapter_rows[0].scaling = INFINITY; }},
      {"adapter_rows[0] begins at token -1 and has 2; there are 3 tokens, and the first 0 are taken",
       [](Batch& b) { b.adapter_rows[0].first = -1; }},
      {"adapter_rows[0] begins at token 9223372036854775807 and has 2; there are 3 tokens, and the first 0 are taken",
       [](Batch& b) { b.adapter_rows[0].first = kMost; }},
      {"adapter_rows[0] begins at token 0 and has 9223372036854775807; there are 3 tokens, and the first 0 are taken",
       [](Batch& b) { b.adapter_rows[0].rows = kMost; }},
      {"adapter_rows[0] begins at token 0 and has 0; there are 3 tokens, and the first 0 are taken",
       [](Batch& b) { b.adapter_rows[0].rows = 0; }},
      {"adapter_rows[1] begins at token 0 and has 2; there are 3 tokens, and the first 2 are taken",
       [](Batch& b) { b.adapter_rows.push_back(b.adapter_rows[0]); }},
      {"expert_adapters[0] has slot 3; allowed: 0 to 2", [](Batch& b) { b.experts[0].slot = kLoraSlots; }},
      {"expert_adapters[0] has rank 7; allowed: 1 to 6", [](Batch& b) { b.experts[0].rank = kRank + 1; }},
      {"expert_adapters[0] has a scaling that is not a finite number", [](Batch& b) { b.experts[0].scaling = NAN; }},
      {"token_slots[2] is 1; allowed: -1 to 0", [](Batch& b) { b.token_slots[2] = 1; }},
      {"token_slots[0] is -2; allowed: -1 to 0", [](Batch& b) { b.token_slots[0] = -2; }},
      {"token_slots is missing: there are expert_adapters", [](Batch& b) { b.token_slots.clear(); }},
  };
}

// The batch is refused with this message, and nothing is written.
void test_refusal(Server& server, const Batch& batch, const std::string& message, Report& report) {
  const KvPool before = server.pool;
  const Tensor untouched({batch.tokens(), kHidden}, server.out.bf16(), NAN);
  Tensor rows;
  std::vector<int64_t> refused;
  const kt::Status status = server.run(batch, &rows, &refused);
  report.equal("step: '" + status.message() + "' instead of '" + message + "'",
               status.code() == kt::StatusCode::kInvalidValue && status.message() == message);
  report.equal("step: written although " + message, server.pool == before && rows == untouched && refused.empty());
}

void test_refusals(const Model& model, const kt::Tiles& tiles, Random& random, Report& report) {
  const std::vector<Sequence> sequences = drawn_sequences({{4, 1}, {1, -1}}, random);
  Server server(model, sequences, tiles, 2), without_pool(model, sequences, tiles, 2, false);
  server.run({2, 0}, report);
  const Batch right = server.batch({2, 1});
  for (const auto& wrongs :
       {wrong_numbers(), wrong_adapters(), model.kind.is_hybrid ? wrong_states() : std::vector<Wrong>()}) {
    for (const Wrong& wrong : wrongs) {
      Batch batch = right;
      wrong.change(batch);
      test_refusal(server, batch, wrong.message, report);
    }
  }
  test_refusal(without_pool, right, "adapter_rows[0] has an adapter; the step has no LoRA pool", report);
  server.run({0, 0}, report);
  server.run({2, 1}, report);
  Server other(model, sequences, tiles, 1);
  other.run_all({4, 1}, report);
  report.equal("step: a refused batch changes later ones", server.same(other));
}

// Memory for a large batch is freed when many small ones have followed it, and on demand; results stay the same.
void test_memory(const Model& model, const kt::Tiles& tiles, Random& random, Report& report) {
  const std::vector<Sequence> sequences = drawn_sequences(kLengths, random);
  Server server(model, sequences, tiles, 1);
  const Batch large = server.batch(server.left(kWhole)), small = server.batch({1, 1, 0, 0, 0, 0});
  Tensor rows, again;
  std::vector<int64_t> refused;
  const auto run = [&](const Batch& batch, Tensor* to) {
    if (!server.run(batch, to, &refused).ok()) report.fail("step: memory");
  };
  run(small, &rows);
  const int64_t needed = server.program.scratch_bytes();
  run(large, &rows);
  report.equal("step: a large batch needs no memory", server.program.scratch_bytes() > 20 * needed && needed > 0);
  for (int64_t i = 0; i < 3 * kt::kCallsInWindow; ++i) run(small, &again);
  report.equal("step: memory of a large batch is kept", server.program.scratch_bytes() == needed);
  run(large, &again);
  report.equal("step: bits after memory was freed", again == rows && refused.empty());
  server.program.free_scratch();
  report.equal("step: memory that was not freed", server.program.scratch_bytes() == 0);
  run(large, &again);
  report.equal("step: bits after all memory was freed", again == rows && refused.empty());
}

// Batches that a program runs again and again, the second with the first one's keys before it: prompts, one token of
// each sequence, and both at once.
class Repeated {
 public:
  Repeated(const Model& model, bool adapted, int num_threads, int num_nodes, const kt::Tiles& tiles, Random& random,
           Report& report)
      : report_(report),
        sequences_(drawn(adapted, random)),
        server_(model, sequences_, tiles, num_threads, adapted, num_nodes) {
    const auto add = [&](const std::vector<int64_t>& at_once) {
      const std::vector<int64_t> counts = server_.left(at_once);
      batches_.push_back(std::make_unique<Batch>(server_.batch(counts)));
      server_.run(counts, report_);
    };
    add({1, 4, 30, 60, 8, 1});
    add({1, 1, 1, 1, 1, 1});
    add({1, 1, 1, 8, 1, 7});
    for (const auto& batch : batches_) steps_.push_back(batch->step());
    for (const auto& batch : batches_)
      outs_.emplace_back(std::vector<int64_t>{batch->tokens(), kHidden}, model.kind.bf16, NAN);
  }

  // All batches once; how often this called operator new.
  int64_t allocations() {
    const int64_t before = count_allocations();
    for (size_t i = 0; i < steps_.size(); ++i) {
      if (!server_.program.run(steps_[i], outs_[i].view(), &refused_).ok()) report_.fail("step: a repeated batch");
    }
    return count_allocations() - before;
  }
  int64_t scratch_bytes() const { return server_.program.scratch_bytes() + kt::scratch_bytes(); }

 private:
  static std::vector<Sequence> drawn(bool adapted, Random& random) {
    auto lengths = kLengths;
    for (auto& [length, adapter] : lengths) adapter = adapted ? adapter : -1;
    return drawn_sequences(lengths, random);
  }

  Report& report_;
  const std::vector<Sequence> sequences_;
  Server server_;
  std::vector<std::unique_ptr<Batch>> batches_;
  std::vector<kt::StepBatch> steps_;
  std::vector<Tensor> outs_;
  std::vector<int64_t> refused_;
};

// A run of a warm program allocates nothing. One thread is warm after a run. Of several, each is when it has had a task
// of each kind, which is up to chance: some runs without an allocation are enough, for what a run itself allocates,
// every run does.
void test_allocations(const Model& model, const kt::Tiles& tiles, Random& random, Report& report) {
  for (const bool adapted : {false, true}) {
    for (const int nodes : {1, 2}) {
      const kt::SimulatedTopology topology(simulated(nodes));
      Repeated alone(model, adapted, 1, nodes, tiles, random, report);
      alone.allocations();
      const int64_t bytes = alone.scratch_bytes(), allocations = alone.allocations();
      report.equal("step: a warm run of " + std::string(model.kind.name) + " allocates " + std::to_string(allocations) +
                       " times",
                   allocations == 0);
      report.equal("step: a warm run's scratch grows", alone.scratch_bytes() == bytes);
      Repeated shared(model, adapted, 3, nodes, tiles, random, report);
      int64_t least = shared.allocations();
      for (int run = 0; run < 100 && least > 0; ++run) least = std::min(least, shared.allocations());
      report.equal("step: each run of " + std::string(model.kind.name) + " on several threads allocates " +
                       std::to_string(least) + " times",
                   least == 0);
    }
  }
}

}  // namespace

void test_step(const kt::Tiles& tiles, Report& report) {
  // The models are drawn once: all instruction sets have the same ones, whose truth is remembered.
  static Random drawing(13);
  Random random(14);
  // With bf16 every expert is chosen where values are compared: rounding then changes no choice.
  static const Model wide({.name = "float32"}, drawing);
  static const Model narrow({.name = "bf16", .bf16 = true, .top_k = kExperts, .normalises = false}, drawing);
  static const Model routed({.name = "bf16, two experts", .bf16 = true}, drawing);
  static const Model mixed(
      {.name = "mixed", .is_mixed = true, .format = {.encoding = kt::Encoding::kInt4, .group = 32}}, drawing);
  static const Model latent({.name = "latent", .top_k = 3, .is_latent = true, .is_mixed = true, .in_groups = true},
                            drawing);
  static const Model uncompressed({.name = "latent, queries not compressed",
                                   .bf16 = true,
                                   .top_k = kExperts,
                                   .is_latent = true,
                                   .compresses_queries = false,
                                   .is_mixed = true,
                                   .in_groups = true},
                                  drawing);
  static const Model hybrid({.name = "hybrid", .is_mixed = true, .is_hybrid = true}, drawing);
  static const Model by_key_head({.name = "hybrid by key head, bf16",
                                  .bf16 = true,
                                  .top_k = kExperts,
                                  .is_mixed = true,
                                  .is_hybrid = true,
                                  .by_key_head = true},
                                 drawing);
  for (const Model* model : {&wide, &narrow, &mixed, &latent, &uncompressed, &hybrid, &by_key_head})
    test_values(*model, tiles, random, report);
  for (const Model* model : {&wide, &narrow}) test_refused_routing(*model, tiles, random, report);
  for (const Model* model : {&wide, &narrow, &routed, &latent, &uncompressed, &hybrid, &by_key_head}) {
    for (const bool adapted : {false, true}) test_not_finite(*model, adapted, tiles, random, report);
  }
  for (const Model* model : {&wide, &routed, &latent, &hybrid}) test_refusals(*model, tiles, random, report);
  test_memory(wide, tiles, random, report);
  for (const Model* model : {&wide, &narrow, &mixed, &latent, &uncompressed, &hybrid, &by_key_head})
    test_allocations(*model, tiles, random, report);
}

}  // namespace kt_test
