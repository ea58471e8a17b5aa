// The native step: double precision, bits that depend on a token's own inputs alone, tokens that are not finite, what
// is refused, and the memory that it keeps.
#include <functional>
#include <numeric>

#include "step/program.h"
#include "step_model.h"

namespace kt_test {
namespace {

// A prompt and its answer, the slots of their keys, and the row of its first token among those of all sequences.
struct Sequence {
  std::vector<int64_t> ids;
  int64_t adapter;
  std::vector<int32_t> slots;
  int64_t first_row;

  int64_t tokens() const { return static_cast<int64_t>(ids.size()); }
};

// Of these lengths and adapters, in drawn slots.
std::vector<Sequence> drawn_sequences(const std::vector<std::pair<int64_t, int64_t>>& lengths, Random& random) {
  std::vector<int32_t> free(kKvSlots);
  std::iota(free.begin(), free.end(), 0);
  std::mt19937 engine(7);
  std::shuffle(free.begin(), free.end(), engine);
  std::vector<Sequence> sequences;
  int64_t row = 0;
  for (const auto& [length, adapter] : lengths) {
    sequences.push_back({{}, adapter, {free.end() - length, free.end()}, row});
    free.resize(free.size() - static_cast<size_t>(length));
    for (int64_t t = 0; t < length; ++t) sequences.back().ids.push_back(random.below(kNanId));
    row += length;
  }
  return sequences;
}

int64_t count_tokens(const std::vector<Sequence>& sequences) {
  return sequences.back().first_row + sequences.back().tokens();
}

// The next counts[i] tokens of sequence i, of which done[i] are in the KV pool.
struct Batch {
  Batch(const std::vector<Sequence>& all, const std::vector<int64_t>& done, const std::vector<int64_t>& counts) {
    for (size_t i = 0; i < all.size(); ++i) {
      if (counts[i] > 0) add(all[i], done[i], counts[i]);
    }
  }

  kt::StepBatch step() const {
    kt::StepBatch batch;
    const auto view = [](const auto& values, kt::DType dtype) {
      return tensor_view(values.data(), dtype, {static_cast<int64_t>(values.size())});
    };
    batch.ids = view(ids, kt::DType::kI64);
    batch.positions = view(positions, kt::DType::kI64);
    batch.slots = view(slots, kt::DType::kI64);
    batch.sequences = sequences;
    batch.adapters = {.rows = adapter_rows, .experts = experts, .token_slots = {}};
    if (!token_slots.empty()) batch.adapters.token_slots = view(token_slots, kt::DType::kI32);
    return batch;
  }
  int64_t tokens() const { return static_cast<int64_t>(ids.size()); }

  std::vector<int64_t> ids, positions, slots;
  std::vector<int64_t> rows;  // of each token among those of all sequences
  std::vector<kt::KvSequence> sequences;
  std::vector<kt::LowRankRows> adapter_rows;
  std::vector<kt::ExpertAdapter> experts;
  std::vector<int32_t> token_slots;  // empty: there are no adapters

 private:
  void add(const Sequence& sequence, int64_t done, int64_t count) {
    const int32_t expert = sequence.adapter < 0 ? -1 : expert_of(sequence.adapter);
    if (expert >= 0) {
      const auto& [rank, scaling] = kAdapters[sequence.adapter];
      adapter_rows.push_back(
          {.first = tokens(), .rows = count, .slot = sequence.adapter, .rank = rank, .scaling = scaling});
      token_slots.resize(ids.size(), -1);
    }
    sequences.push_back(
        {.first_query = tokens(), .queries = count, .prefix = done, .slots = sequence.slots.data(), .first_key = 0});
    for (int64_t t = done; t < done + count; ++t) {
      ids.push_back(sequence.ids[static_cast<size_t>(t)]);
      positions.push_back(t);
      slots.push_back(sequence.slots[static_cast<size_t>(t)]);
      rows.push_back(sequence.first_row + t);
      if (!experts.empty()) token_slots.push_back(expert);
    }
  }
  // The place of an adapter among those of the batch's experts: in the order in which they appear.
  int32_t expert_of(int64_t slot) {
    const auto found =
        std::find_if(experts.begin(), experts.end(), [&](const kt::ExpertAdapter& use) { return use.slot == slot; });
    const auto place = static_cast<int32_t>(found - experts.begin());
    if (found == experts.end())
      experts.push_back({.slot = slot, .rank = kAdapters[slot].rank, .scaling = kAdapters[slot].scaling});
    return place;
  }
};

// A program with a KV pool of its own, and the results of all tokens so far.
class Server {
 public:
  Server(const Model& model, const std::vector<Sequence>& sequences, const kt::Tiles& tiles, int num_threads,
         bool with_lora = true)
      : pool(model.bf16, model.layers.size()),
        program(model.stack(pool, with_lora), tiles, num_threads),
        out({count_tokens(sequences), kHidden}, model.bf16, NAN),
        refused(static_cast<size_t>(count_tokens(sequences))),
        sequences_(sequences),
        bf16_(model.bf16),
        done_(sequences.size()) {}

  Batch batch(const std::vector<int64_t>& counts) const { return {sequences_, done_, counts}; }
  // Of each sequence the tokens that are left, at most at_once[i].
  std::vector<int64_t> left(const std::vector<int64_t>& at_once) const {
    std::vector<int64_t> counts;
    for (size_t i = 0; i < sequences_.size(); ++i)
      counts.push_back(std::min(at_once[i], sequences_[i].tokens() - done_[i]));
    return counts;
  }

  kt::Status run(const Batch& batch, Tensor* rows, std::vector<int64_t>* refused_rows) {
    *rows = Tensor({batch.tokens(), kHidden}, bf16_, NAN);
    return program.run(batch.step(), rows->view(), refused_rows);
  }
  // The next counts[i] tokens of sequence i.
  void run(const std::vector<int64_t>& counts, Report& report) {
    const Batch next = batch(counts);
    Tensor rows;
    std::vector<int64_t> refused_rows;
    const kt::Status status = run(next, &rows, &refused_rows);
    if (!status.ok()) report.fail("step: " + status.message());
    for (int64_t t = 0; t < next.tokens(); ++t) out.copy_row(next.rows[static_cast<size_t>(t)], rows, t);
    for (const int64_t row : refused_rows) refused[static_cast<size_t>(next.rows[static_cast<size_t>(row)])] = true;
    for (size_t i = 0; i < counts.size(); ++i) done_[i] += counts[i];
  }
  // All that is left, in batches.
  void run_all(const std::vector<int64_t>& at_once, Report& report) {
    for (std::vector<int64_t> counts = left(at_once); *std::max_element(counts.begin(), counts.end()) > 0;
         counts = left(at_once))
      run(counts, report);
  }

  bool same(const Server& other) const { return out == other.out && pool == other.pool && refused == other.refused; }

  KvPool pool;
  kt::Program program;
  Tensor out;                 // by row of all sequences
  std::vector<bool> refused;  // the same

 private:
  const std::vector<Sequence>& sequences_;
  const bool bf16_;
  std::vector<int64_t> done_;
};

// The base and adapters of all ranks; more tokens of one adapter than a task of LoRA's products has, and enough for
// several threads.
const std::vector<std::pair<int64_t, int64_t>> kLengths = {{1, -1}, {5, 0}, {33, 1}, {70, 0}, {12, -1}, {9, 2}};
const std::vector<int64_t> kWhole(kLengths.size(), 99), kDecode(kLengths.size(), 1), kMixed = {1, 1, 16, 64, 1, 3};

// Relative to the norm of a token's hidden states. Measured with 20 seeds on portable, AVX2 and AVX-512 kernels and
// AMX's on the model of its tiles: 5.2e-7 in float32, 1.3e-2 in bf16, which rounds the result of every operation.
double tolerance(const Model& model) { return model.bf16 ? 4e-2 : 2e-6; }

void compare(const Tensor& out, const Sequence& sequence, const Exact& exact, double allowed, Report& report) {
  for (int64_t t = 0; t < sequence.tokens(); ++t) {
    Row error = row_of(out, sequence.first_row + t);
    const Row& wanted = exact.hidden[static_cast<size_t>(t)];
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
    compare(server.out, sequence, Exact(model, sequence.ids, sequence.adapter), tolerance(model), report);
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
    compare(server.out, sequence, Exact(model, sequence.ids, sequence.adapter, 1), tolerance(model), report);
  report.equal("step: infinite routing weights are not refused",
               std::find(server.refused.begin(), server.refused.end(), false) == server.refused.end());
}

// Neither threads, nor the other sequences of a batch, nor how a prompt is cut into batches change a bit.
void test_bits(const Model& model, const kt::Tiles& tiles, Random& random, Report& report) {
  const std::vector<Sequence> sequences = drawn_sequences(kLengths, random);
  Server whole(model, sequences, tiles, 1);
  whole.run_all(kWhole, report);
  for (const int threads : {1, 2, 3}) {
    for (const auto* at_once : {&kWhole, &kDecode, &kMixed}) {
      Server server(model, sequences, tiles, threads);
      server.run_all(*at_once, report);
      report.equal("step: bits depend on " + std::to_string(threads) + " threads or on batches", server.same(whole));
    }
  }
  Server alone(model, sequences, tiles, 2), base(model, sequences, tiles, 2, false);
  for (size_t i = 0; i < sequences.size(); ++i) {
    std::vector<int64_t> counts(sequences.size(), 0);
    counts[i] = sequences[i].tokens();
    alone.run(counts, report);
    if (sequences[i].adapter >= 0) continue;
    base.run(counts, report);
    for (int64_t t = 0; t < counts[i]; ++t)
      report.equal("step: the base depends on the LoRA pool", base.out.same_row(sequences[i].first_row + t, whole.out));
  }
  report.equal("step: bits depend on other sequences", alone.same(whole));
}

// More keys than attention computes at once, so that its parts are computed by several threads and merged.
void test_long_prefix(const Model& model, const kt::Tiles& tiles, Random& random, Report& report) {
  const std::vector<Sequence> sequences = drawn_sequences({{530, 2}, {4, -1}}, random);
  Server whole(model, sequences, tiles, 1), cut(model, sequences, tiles, 2);
  whole.run_all({530, 4}, report);
  const std::vector<int64_t> batches[] = {{515, 1}, {1, 1}, {1, 0}, {13, 2}};
  for (const auto& counts : batches) cut.run(counts, report);
  report.equal("step: bits depend on how a long prompt is cut", cut.same(whole));
}

// A token whose embedding is NaN: it is refused, and the other sequences do not change. In a batch without adapters the
// later tokens of its sequence see its keys, and are refused too. In a batch with an adapter its keys and values are
// zeros in the pool.
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
      const bool sees = row >= hit && row < end, is_lost = adapted ? row == hit : sees;
      const Row found = row_of(server.out, row);
      const auto is_nan = [](double x) { return x != x; };
      report.equal("step: refused tokens", server.refused[static_cast<size_t>(row)] == is_lost);
      if (is_lost) {
        report.equal("step: NaN is lost", std::all_of(found.begin(), found.end(), is_nan));
      } else {
        report.equal("step: NaN reaches other tokens", std::none_of(found.begin(), found.end(), is_nan));
        report.equal("step: NaN changes other sequences", sees || server.out.same_row(row, clean.out));
      }
    }
    for (const Tensor& rows : {server.pool.keys[0], server.pool.values[1]}) {
      const Row written = row_of(rows, kKeyHeads * spoiled[kHit].slots[kToken]);
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
  for (const auto& wrongs : {wrong_numbers(), wrong_adapters()}) {
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

}  // namespace

void test_step(const kt::Tiles& tiles, Report& report) {
  Random random(13);
  const Model wide(false, 2, true, random);
  const Model narrow(true, kExperts, false, random);  // every expert: rounding changes no choice
  const Model routed(true, 2, true, random);
  for (const Model* model : {&wide, &narrow}) {
    test_values(*model, tiles, random, report);
    test_refused_routing(*model, tiles, random, report);
  }
  for (const Model* model : {&wide, &narrow, &routed}) {
    test_bits(*model, tiles, random, report);
    for (const bool adapted : {false, true}) test_not_finite(*model, adapted, tiles, random, report);
  }
  test_long_prefix(wide, tiles, random, report);
  test_long_prefix(routed, tiles, random, report);
  test_refusals(wide, tiles, random, report);
  test_refusals(routed, tiles, random, report);
  test_memory(wide, tiles, random, report);
}

}  // namespace kt_test
