// Attention of one instruction set: head sizes around the tiles' edges, every pair of dtypes, permuted slots with NaN
// in all others, bits that depend on a query's own inputs alone, and what is refused.
#include "ops/attention/attention.h"

#include <functional>
#include <numeric>

#include "checks.h"
#include "reference.h"
#include "remembered.h"
#include "scratch_case.h"

namespace kt_test {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

// [rows][heads][cols] of float32 or bf16, one element off any alignment, with NaN before, between and after its heads.
class Heads {
 public:
  Heads(int64_t rows, int64_t heads, int64_t cols, bool bf16) : rows_(rows), heads_(heads), cols_(cols), bf16_(bf16) {
    const auto count = static_cast<size_t>(1 + rows * heads * (cols + 3));
    wide_.assign(bf16 ? 0 : count, kPoison);
    narrow_.assign(bf16 ? count : 0, kt::float_to_bf16(kPoison));
  }
  Heads(int64_t rows, int64_t heads, int64_t cols, bool bf16, Random& random) : Heads(rows, heads, cols, bf16) {
    for (int64_t r = 0; r < rows; ++r) draw_row(r, random);
  }

  void draw_row(int64_t r, Random& random) {
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t c = 0; c < cols_; ++c) set(r, h, c, random.normal());
    }
  }
  float at(int64_t r, int64_t h, int64_t c) const {
    return bf16_ ? kt::bf16_to_float(narrow_[place(r, h, c)]) : wide_[place(r, h, c)];
  }
  void set(int64_t r, int64_t h, int64_t c, float value) {
    if (bf16_) {
      narrow_[place(r, h, c)] = kt::float_to_bf16(value);
    } else {
      wide_[place(r, h, c)] = value;
    }
  }
  void copy_row(int64_t r, const Heads& from, int64_t row) {
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t c = 0; c < cols_; ++c) set(r, h, c, from.at(row, h, c));
    }
  }
  bool same_row(int64_t r, const Heads& other, int64_t row) const {
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t c = 0; c < cols_; ++c) {
        const float one = at(r, h, c), two = other.at(row, h, c);
        if (std::memcmp(&one, &two, sizeof one) != 0) return false;
      }
    }
    return true;
  }
  bool same_bits(const Heads& other) const {
    for (int64_t r = 0; r < rows_; ++r) {
      if (!same_row(r, other, r)) return false;
    }
    return true;
  }
  bool neighbours_untouched() const {
    bool untouched = true;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t h = 0; h < heads_; ++h) {
        for (int64_t c = cols_; c < cols_ + 3; ++c) untouched &= std::isnan(at(r, h, c));
      }
    }
    return untouched;
  }
  // The first `cols` columns.
  kt::TensorView view(int64_t cols) const {
    const void* first = bf16_ ? static_cast<const void*>(narrow_.data() + 1) : wide_.data() + 1;
    kt::TensorView view;
    view.data = const_cast<void*>(first);
    view.dtype = bf16_ ? kt::DType::kBf16 : kt::DType::kF32;
    view.ndim = 3;
    const int64_t shape[] = {rows_, heads_, cols}, strides[] = {heads_ * (cols_ + 3), cols_ + 3, 1};
    std::copy(shape, shape + 3, view.shape);
    std::copy(strides, strides + 3, view.strides);
    return view;
  }
  kt::TensorView view() const { return view(cols_); }
  void add_to(Digest* digest) const { digest->add(rows_).add(heads_).add(cols_).add(wide_).add(narrow_); }

 private:
  size_t place(int64_t r, int64_t h, int64_t c) const {
    return static_cast<size_t>(1 + (r * heads_ + h) * (cols_ + 3) + c);
  }

  int64_t rows_, heads_, cols_;
  bool bf16_;
  std::vector<float> wide_;
  std::vector<uint16_t> narrow_;
};

struct Sizes {
  int64_t heads, key_heads, key, value;
  bool is_latent = false;  // values are the first columns of the keys
};

struct Dtypes {
  bool q, kv, out;  // bf16
};

struct Length {
  int64_t prefix, queries;
};

// Sequences in one pool whose slots are drawn; all other slots are NaN.
struct Batch {
  Batch(const Sizes& sizes, const Dtypes& bf16, const std::vector<Length>& lengths, Random& random)
      : sizes(sizes),
        bf16(bf16),
        tokens(0),
        q(count_queries(lengths), sizes.heads, sizes.key, bf16.q, random),
        keys(pool_rows(lengths), sizes.key_heads, sizes.key, bf16.kv),
        values(pool_rows(lengths), sizes.key_heads, sizes.value, bf16.kv) {
    std::vector<int32_t> free(static_cast<size_t>(pool_rows(lengths)));
    std::iota(free.begin(), free.end(), 0);
    std::mt19937 engine(7);
    std::shuffle(free.begin(), free.end(), engine);
    slots.reserve(lengths.size());
    for (const auto& [prefix, queries] : lengths) {
      const auto number = static_cast<std::ptrdiff_t>(prefix + queries);
      slots.emplace_back(free.end() - number, free.end());
      free.resize(free.size() - static_cast<size_t>(number));
      for (const int32_t slot : slots.back()) {
        keys.draw_row(slot, random);
        values.draw_row(slot, random);
      }
      sequences.push_back({tokens, queries, prefix, slots.back().data(), 0});
      tokens += queries;
    }
  }
  Batch(const Batch&) = delete;

  static int64_t count_queries(const std::vector<Length>& lengths) {
    int64_t count = 0;
    for (const Length& length : lengths) count += length.queries;
    return count;
  }
  static int64_t pool_rows(const std::vector<Length>& lengths) {
    int64_t count = 5;
    for (const Length& length : lengths) count += length.prefix + length.queries;
    return count;
  }

  kt::AttentionCall call() const {
    kt::AttentionCall call;
    call.q = q.view();
    call.keys = keys.view();
    call.values = sizes.is_latent ? keys.view(sizes.value) : values.view();
    call.sequences = sequences.data();
    call.num_sequences = static_cast<int64_t>(sequences.size());
    call.scaling = scaling;
    call.logit_cap = cap;
    call.window = window;
    if (!sinks.empty()) {
      call.sinks.data = const_cast<float*>(sinks.data());
      call.sinks.ndim = 1;
    }
    return call;
  }
  Heads result(const kt::AttentionEngine& engine, bool out_bf16, std::vector<float>* log_sums = nullptr) const {
    Heads out(tokens, sizes.heads, sizes.value, out_bf16);
    kt::AttentionCall whole = call();
    whole.out = out.view();
    if (log_sums) {
      log_sums->assign(static_cast<size_t>(tokens * sizes.heads), kPoison);
      whole.log_sums.data = log_sums->data();
      whole.log_sums.ndim = 2;
    }
    kt::attend(engine, whole);
    return out;
  }
  const Heads& value_rows() const { return sizes.is_latent ? keys : values; }
  std::string name() const {
    const auto dtype = [](bool narrow) { return narrow ? " bf16" : " float32"; };
    return "attention " + std::to_string(sizes.heads) + "/" + std::to_string(sizes.key_heads) + " heads of " +
           std::to_string(sizes.key) + ", " + std::to_string(sizes.value) + dtype(bf16.q) + dtype(bf16.kv);
  }

  Sizes sizes;
  Dtypes bf16;
  int64_t tokens;
  float scaling = 0.3f, cap = 0;
  int64_t window = 0;
  std::vector<float> sinks = {};
  Heads q, keys, values;
  std::vector<std::vector<int32_t>> slots;
  std::vector<kt::KvSequence> sequences;
};

// A query's results in float64.
Attended exact(const Batch& batch, const kt::KvSequence& sequence, int64_t query, int64_t head) {
  const int64_t row = sequence.first_query + query, key_head = head / (batch.sizes.heads / batch.sizes.key_heads);
  const auto score = [&](int64_t i) {
    return dot(
        batch.sizes.key, [&](int64_t c) { return batch.q.at(row, head, c); },
        [&](int64_t c) { return batch.keys.at(sequence.slots[i], key_head, c); });
  };
  const auto value = [&](int64_t i, int64_t c) { return batch.value_rows().at(sequence.slots[i], key_head, c); };
  const int64_t keys = sequence.prefix + query + 1;
  const int64_t first = batch.window > 0 ? std::max<int64_t>(keys - batch.window, 0) : 0;
  const float* sink = batch.sinks.empty() ? nullptr : &batch.sinks[static_cast<size_t>(head)];
  return {keys, batch.sizes.value, batch.scaling, batch.cap, score, value, first, sink};
}

// Those of all queries: sequence by sequence, query by query, head by head.
const std::vector<Attended>& all_exact(const Batch& batch) {
  Digest digest;
  const auto& [heads, key_heads, key, value, is_latent] = batch.sizes;
  digest.add(heads).add(key_heads).add(key).add(value).add(is_latent);
  digest.add(batch.scaling).add(batch.cap).add(batch.window).add(batch.sinks);
  for (const Heads* each : {&batch.q, &batch.keys, &batch.values}) each->add_to(&digest);
  for (size_t i = 0; i < batch.sequences.size(); ++i)
    digest.add(batch.slots[i]).add(batch.sequences[i].first_query).add(batch.sequences[i].prefix);
  return remembered(digest, [&] {
    std::vector<Attended> all;
    for (const kt::KvSequence& sequence : batch.sequences) {
      for (int64_t t = 0; t < sequence.queries; ++t) {
        for (int64_t h = 0; h < batch.sizes.heads; ++h) all.push_back(exact(batch, sequence, t, h));
      }
    }
    return all;
  });
}

// An error of a score changes its weight by as much, relatively; the scores' errors are roundings of sums whose
// magnitudes add up to `largest_score`. Measured: up to 2.3 of these roundings.
constexpr double kTolerance = 4 * kFloatRounding;

void test_values(const kt::AttentionEngine& engine, const Batch& batch, Report& report) {
  std::vector<float> log_sums;
  const Heads out = batch.result(engine, false, &log_sums);
  const std::string name = batch.name(), of_sums = name + " log of sums", rounded = name + " is not rounded once";
  report.equal(name + " writes beside its result", out.neighbours_untouched());
  auto next = all_exact(batch).begin();
  for (const kt::KvSequence& sequence : batch.sequences) {
    for (int64_t t = 0; t < sequence.queries; ++t) {
      for (int64_t h = 0; h < batch.sizes.heads; ++h) {
        const Attended& wanted = *next++;
        const int64_t row = sequence.first_query + t;
        const double of_score = 1 + wanted.largest_score;
        for (int64_t c = 0; c < batch.sizes.value; ++c) {
          const auto at = static_cast<size_t>(c);
          report.close(name, out.at(row, h, c), wanted.out[at], kTolerance, of_score * wanted.scale[at]);
        }
        report.close(of_sums, log_sums[static_cast<size_t>(row * batch.sizes.heads + h)], wanted.log_sum, kTolerance,
                     of_score * (1 + std::fabs(wanted.log_sum)));
      }
    }
  }
  if (!batch.bf16.out) return;
  const Heads narrow = batch.result(engine, true);
  for (int64_t t = 0; t < batch.tokens; ++t) {
    for (int64_t h = 0; h < batch.sizes.heads; ++h) {
      for (int64_t c = 0; c < batch.sizes.value; ++c)
        report.equal(rounded, narrow.at(t, h, c) == kt::bf16_to_float(kt::float_to_bf16(out.at(t, h, c))));
    }
  }
}

// Keys 0 to prefix + queries of a sequence, adjacent and in order.
Heads in_order(const Heads& pool, const Batch& batch, const kt::KvSequence& sequence, int64_t cols) {
  Heads rows(sequence.keys() + 1, batch.sizes.key_heads, cols, batch.bf16.kv);
  for (int64_t i = 0; i < sequence.keys(); ++i) rows.copy_row(1 + i, pool, sequence.slots[i]);
  return rows;
}

// Every query alone, and in runs, over keys that lie in order: as decoded, as prefilled in pieces, as trained.
void test_cuts(const kt::AttentionEngine& engine, const Batch& batch, Report& report) {
  const Heads whole = batch.result(engine, batch.bf16.out);
  const std::string what = batch.name() + " depends on how queries are cut into calls";
  for (const kt::KvSequence& sequence : batch.sequences) {
    const Heads keys = in_order(batch.keys, batch, sequence, batch.sizes.key);
    const Heads values = in_order(batch.value_rows(), batch, sequence, batch.sizes.value);
    for (const int64_t run : {int64_t{1}, int64_t{3}, int64_t{64}, sequence.queries}) {
      Heads out(sequence.queries, batch.sizes.heads, batch.sizes.value, batch.bf16.out);
      Heads q(sequence.queries, batch.sizes.heads, batch.sizes.key, batch.bf16.q);
      for (int64_t t = 0; t < sequence.queries; ++t) q.copy_row(t, batch.q, sequence.first_query + t);
      for (int64_t t = 0; t < sequence.queries; t += run) {
        const kt::KvSequence part{t, std::min(run, sequence.queries - t), sequence.prefix + t, nullptr, 1};
        kt::AttentionCall call = batch.call();
        call.q = q.view();
        call.keys = keys.view();
        call.values = values.view();
        call.out = out.view();
        call.sequences = &part;
        call.num_sequences = 1;
        kt::attend(engine, call);
      }
      for (int64_t t = 0; t < sequence.queries; ++t)
        report.equal(what, out.same_row(t, whole, sequence.first_query + t));
    }
  }
}

void test_threads(const kt::AttentionEngine& engine, const Batch& batch, Report& report) {
  const Heads alone = batch.result({engine.kernels, 1}, batch.bf16.out);
  for (const int threads : {2, 3, 8, 40})
    report.equal(batch.name() + " depends on the number of threads",
                 alone.same_bits(batch.result({engine.kernels, threads}, batch.bf16.out)));
}

// NaN and Inf in one sequence's q, keys or values reach its own queries that see them.
void test_not_finite(const kt::AttentionEngine& engine, Batch& batch, Report& report) {
  const Heads clean = batch.result(engine, false);
  const std::string reaches = batch.name() + ": NaN or Inf in other queries", lost = batch.name() + ": NaN is lost";
  const kt::KvSequence& hit = batch.sequences[1];
  const int64_t query = 2, key = hit.prefix + query;
  const int64_t last_key = batch.sizes.key - 1, last_value = batch.sizes.value - 1;
  struct {
    Heads* tensor;
    int64_t row, col;
    bool is_query;
  } const places[] = {{&batch.q, hit.first_query + query, last_key, true},
                      {&batch.keys, hit.slots[key], last_key, false},
                      {&batch.values, hit.slots[key], last_value, false}};
  for (const auto& place : places) {
    for (const float value : {kPoison, kInf}) {
      const float before = place.tensor->at(place.row, 0, place.col);
      place.tensor->set(place.row, 0, place.col, value);
      const Heads out = batch.result(engine, false);
      place.tensor->set(place.row, 0, place.col, before);
      for (int64_t t = 0; t < batch.tokens; ++t) {
        const int64_t own = t - hit.first_query;
        const bool is_near = batch.window == 0 || own < query + batch.window;
        const bool sees = own < hit.queries && (place.is_query ? own == query : own >= query && is_near);
        if (!sees) report.equal(reaches, out.same_row(t, clean, t));
        if (sees && std::isnan(value)) report.equal(lost, std::isnan(out.at(t, 0, last_value)));
      }
    }
  }
}

// A key of -Inf has no weight; where all scores are -Inf there is no result.
void test_infinite_scores(const kt::AttentionEngine& engine, Random& random, Report& report) {
  Batch batch({1, 1, 1, 4}, {false, false, false}, {{600, 1}}, random);
  batch.q.set(0, 0, 0, 1);
  const std::vector<int32_t>& slots = batch.slots[0];
  for (size_t i = 0; i < slots.size(); ++i) batch.keys.set(slots[i], 0, 0, i == 555 ? 1 : -kInf);
  const Heads one = batch.result(engine, false);
  report.equal("attention: keys of -Inf have weight", one.same_row(0, batch.values, slots[555]));
  batch.keys.set(slots[555], 0, 0, -kInf);
  report.equal("attention: a result from no key", std::isnan(batch.result(engine, false).at(0, 0, 0)));
}

// Sliding windows and sinks: of a key, of less than a chunk, of several; sinks far below and above the scores.
void test_windows(const kt::AttentionEngine& engine, const Dtypes& bf16, Random& random, Report& report) {
  Batch batch({6, 2, 24, 40}, bf16, {{530, 1}, {505, 20}, {0, 0}, {1020, 9}, {0, 70}, {2100, 2}}, random);
  batch.sinks = {-100, -1, 0, 1, 5, 60};
  for (const int64_t window : {0, 1, 7, 513, 1600}) {
    batch.window = window;
    if (report.takes()) {
      test_values(engine, batch, report);
      test_cuts(engine, batch, report);
      test_threads(engine, batch, report);
    }
    batch.sinks.clear();
  }
}

void test_memory(const kt::Tiles& tiles, Random& random, Report& report) {
  const kt::AttentionEngine engine{*tiles.attention, 1};
  const Batch few({2, 1, 8, 8}, {true, true, true}, {{0, 1}}, random);
  const Batch many({64, 2, 512, 512}, {true, true, true}, {{900, 9}}, random);
  const auto attend = [&](const Batch& batch) { return std::function<void()>([&] { batch.result(engine, true); }); };
  test_scratch("attention", attend(few), attend(many), report);
}

void test_refusals(Report& report) {
  const std::vector<int32_t> slots = {3, 9, -1, 4};
  const auto message = [&](std::vector<kt::KvSequence> sequences, int64_t tokens, int64_t rows) {
    const auto count = static_cast<int64_t>(sequences.size());
    return kt::check_sequences(sequences.data(), count, tokens, rows).message();
  };
  const auto equal = [&](const std::string& got, const std::string& wanted) {
    report.equal("refusal: " + got, got == wanted);
  };
  equal(message({{0, 2, 0, slots.data()}}, 2, 10), "");
  equal(message({{0, 0, 99, slots.data()}}, 2, 1), "");
  equal(message({{0, 2, 0, slots.data()}}, 2, 9), "sequence 0 has key 1 in slot 9; allowed: 0 to 8");
  equal(message({{0, 1, 0, slots.data()}, {1, 1, 3, slots.data()}}, 2, 10),
        "sequence 1 has key 2 in slot -1; allowed: 0 to 9");
  equal(message({{0, 2, 5, nullptr, 3}}, 2, 9), "sequence 0 has 5 + 2 keys from row 3 on; there are 9 rows");
  equal(message({{0, 2, 5, nullptr, -1}}, 2, 9), "sequence 0 has 5 + 2 keys from row -1 on; there are 9 rows");
  equal(message({{0, 2, 0}, {1, 1, 0}}, 4, 9), "sequence 1 has queries 1 to 1; allowed: 2 to 3");
  equal(message({{3, 2, 0}}, 4, 9), "sequence 0 has queries 3 to 4; allowed: 0 to 3");
  equal(message({{0, -1, 0}}, 4, 9), "sequence 0 has -1 queries");
  equal(message({{0, 1, -7}}, 4, 9), "sequence 0 has a prefix of -7 keys");
}

}  // namespace

void test_attention(const kt::Tiles& tiles, Report& report) {
  Random random(11);
  const kt::AttentionEngine engine{*tiles.attention, 2};
  const std::vector<Sizes> all_sizes = {{4, 4, 16, 16}, {8, 2, 32, 32}, {6, 1, 24, 16, true}, {3, 3, 1, 1},
                                        {5, 1, 33, 47}, {2, 1, 64, 96}, {17, 1, 72, 64, true}};
  for (const int variant : {0, 1, 2, 3, 7}) {
    const Dtypes bf16{(variant & 1) != 0, (variant & 2) != 0, (variant & 4) != 0};
    for (const Sizes& sizes : all_sizes) {
      if (!report.takes()) continue;
      Batch batch(sizes, bf16, {{0, 1}, {3, 9}, {40, 1}, {0, 34}}, random);
      test_values(engine, batch, report);
      batch.cap = 2;
      test_values(engine, batch, report);
    }
    const Batch cut({8, 2, 32, 48}, bf16, {{530, 1}, {500, 20}, {0, 0}, {1020, 9}, {0, 70}}, random);
    test_values(engine, cut, report);
    test_cuts(engine, cut, report);
    test_threads(engine, cut, report);
    const Batch odd({9, 3, 20, 24}, bf16, {{505, 19}, {0, 33}}, random);
    test_cuts(engine, odd, report);
    const Batch many({70, 1, 40, 32, true}, bf16, {{1500, 1}, {0, 5}}, random);
    test_cuts(engine, many, report);
    test_threads(engine, many, report);
    Batch spoiled({6, 3, 34, 35}, bf16, {{30, 5}, {510, 7}, {0, 3}}, random);
    test_not_finite(engine, spoiled, report);
    spoiled.window = 2;
    test_not_finite(engine, spoiled, report);
    test_windows(engine, bf16, random, report);
  }
  test_infinite_scores(engine, random, report);
  test_memory(tiles, random, report);
  test_refusals(report);
}

}  // namespace kt_test
