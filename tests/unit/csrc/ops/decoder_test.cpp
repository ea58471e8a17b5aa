// Rotary embedding, the choice of experts, LoRA: against plain loops and double precision, bits that do not depend on
// the instruction set, ties, rows that are not finite.
#include <type_traits>

#include "checks.h"
#include "kernels/registry.h"
#include "ops/dense/low_rank.h"
#include "ops/experts/lora.h"
#include "ops/router/router.h"
#include "reference.h"

namespace kt_test {
namespace {

float value_of(float value) { return value; }
float value_of(uint16_t bits) { return kt::bf16_to_float(bits); }
template <class T>
T rounded_to(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return kt::float_to_bf16(value);
  }
}

template <class T>
std::vector<T> drawn(int64_t count, Random& random) {
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) value = rounded_to<T>(random.normal());
  return values;
}

// Every product and sum rounded to T. A float32 product of two bf16 is exact, so that it is rounded once.
template <class T>
void test_rotary(const kt::Dense& kernels, int64_t heads, int64_t size, int64_t half, bool interleaved, Random& random,
                 Report& report) {
  const int64_t stride = size + 3;
  auto x = drawn<T>(heads * stride, random);
  const auto angles = drawn<T>(2 * half, random);
  auto expected = x;
  const auto product = [&](int64_t at, int64_t angle) {
    const volatile float exact = value_of(x[static_cast<size_t>(at)]) * value_of(angles[static_cast<size_t>(angle)]);
    return value_of(rounded_to<T>(exact));
  };
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < half; ++i) {
      const int64_t a = h * stride + (interleaved ? 2 * i : i), b = a + (interleaved ? 1 : half);
      expected[static_cast<size_t>(a)] = rounded_to<T>(product(a, i) - product(b, half + i));
      expected[static_cast<size_t>(b)] = rounded_to<T>(product(b, i) + product(a, half + i));
    }
  }
  kernels.rotate({.heads = heads,
                  .half = half,
                  .x = {.data = x.data(), .stride = stride, .bf16 = sizeof(T) == 2},
                  .angles = angles.data(),
                  .interleaved = interleaved});
  report.equal("rotary " + std::to_string(heads) + " x " + std::to_string(size) + ", half " + std::to_string(half) +
                   (interleaved ? ", interleaved" : ""),
               std::memcmp(x.data(), expected.data(), x.size() * sizeof(T)) == 0);
}

struct Choice {
  std::vector<float> weights;
  std::vector<int32_t> ids;
  bool operator==(const Choice& other) const {
    return ids == other.ids && std::memcmp(weights.data(), other.weights.data(), weights.size() * sizeof(float)) == 0;
  }
};

template <class T>
struct Logits {
  int64_t rows, experts, stride;
  std::vector<T> values;

  Logits(int64_t rows, int64_t experts, Random& random)
      : rows(rows), experts(experts), stride(experts + 5), values(drawn<T>(rows * stride, random)) {}
  T& at(int64_t row, int64_t expert) { return values[static_cast<size_t>(row * stride + expert)]; }

  Choice chosen(const kt::DenseEngine& engine, int64_t first, int64_t count, int64_t top_k, bool normalises) const {
    Choice choice;
    choice.weights.resize(static_cast<size_t>(count * top_k));
    choice.ids.resize(choice.weights.size());
    const auto dtype = sizeof(T) == 2 ? kt::DType::kBf16 : kt::DType::kF32;
    kt::choose_experts(engine, matrix_view(values.data() + first * stride, dtype, count, experts, stride), normalises,
                       matrix_view(choice.weights.data(), kt::DType::kF32, count, top_k, top_k),
                       matrix_view(choice.ids.data(), kt::DType::kI32, count, top_k, top_k));
    return choice;
  }
};

template <class T>
void compare_row(Logits<T>& logits, int64_t row, const Choice& choice, int64_t top_k, bool normalises, Report& report) {
  Row of_row;
  for (int64_t e = 0; e < logits.experts; ++e) of_row.push_back(value_of(logits.at(row, e)));
  const Chosen wanted = chosen_by_softmax(of_row, top_k, normalises);
  for (size_t k = 0; k < wanted.experts.size(); ++k) {
    const size_t at = static_cast<size_t>(row * top_k) + k;
    report.equal("router's expert", choice.ids[at] == static_cast<int32_t>(wanted.experts[k]));
    // 13 roundings measured.
    report.close("router's weight", choice.weights[at], wanted.weights[k], 16 * kFloatRounding, wanted.weights[k]);
  }
}

template <class T>
void test_router(const kt::DenseEngine& engine, int64_t rows, int64_t experts, int64_t top_k, bool normalises,
                 Random& random, Report& report) {
  Logits<T> logits(rows, experts, random);
  for (int64_t e = 0; e + 1 < experts; e += 3) logits.at(rows / 2, e + 1) = logits.at(rows / 2, e);  // ties
  const Choice whole = logits.chosen(engine, 0, rows, top_k, normalises);
  for (int64_t row = 0; row < rows; ++row) compare_row(logits, row, whole, top_k, normalises, report);

  const kt::DenseEngine portable{*kt::available_tiles().back(), 1};
  report.equal("router on the portable instructions", logits.chosen(portable, 0, rows, top_k, normalises) == whole);
  Choice alone;
  for (int64_t row = 0; row < rows; ++row) {
    const Choice one = logits.chosen(engine, row, 1, top_k, normalises);
    alone.weights.insert(alone.weights.end(), one.weights.begin(), one.weights.end());
    alone.ids.insert(alone.ids.end(), one.ids.begin(), one.ids.end());
  }
  report.equal("router of one row at a time", alone == whole);

  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInf}) {
    for (const int64_t place : {int64_t{0}, experts - 1}) {
      Logits<T> poisoned = logits;
      poisoned.at(0, place) = rounded_to<T>(bad);
      const Choice choice = poisoned.chosen(engine, 0, rows, top_k, normalises);
      bool fits = true;
      for (int64_t k = 0; k < top_k; ++k) {
        const auto at = static_cast<size_t>(k);
        fits &= std::isnan(choice.weights[at]) && choice.ids[at] >= 0 && choice.ids[at] < experts;
      }
      fits &= std::equal(whole.weights.begin() + top_k, whole.weights.end(), choice.weights.begin() + top_k);
      report.equal("router of a row that is not finite", fits);
    }
  }
  Logits<T> hidden = logits;
  hidden.at(0, experts - 1) = rounded_to<T>(-kInf);
  compare_row(hidden, 0, hidden.chosen(engine, 0, 1, top_k, normalises), top_k, normalises, report);
}

// The adapters of a layer of some parts: in each slot one of a rank. What an adapter does not use holds NaN.
template <class T>
struct Pool {
  static constexpr int64_t kSlots = 3, kRank = 20, kInner = 40;
  static constexpr kt::DType kDtype = sizeof(T) == 2 ? kt::DType::kBf16 : kt::DType::kF32;

  std::vector<int64_t> ends;
  std::vector<T> a, b;

  explicit Pool(std::vector<int64_t> given) : ends(std::move(given)) {
    const T none = rounded_to<T>(std::numeric_limits<float>::quiet_NaN());
    a.assign(static_cast<size_t>(kSlots * parts() * kRank * kInner), none);
    b.assign(static_cast<size_t>(kSlots * ends.back() * kRank), none);
  }
  int64_t parts() const { return static_cast<int64_t>(ends.size()); }
  T* row_of_a(int64_t slot, int64_t row) { return &a[static_cast<size_t>((slot * parts() * kRank + row) * kInner)]; }
  T* row_of_b(int64_t slot, int64_t row) { return &b[static_cast<size_t>((slot * ends.back() + row) * kRank)]; }

  void fill(int64_t slot, int64_t rank, Random& random) {
    for (int64_t row = 0; row < parts() * rank; ++row)
      std::generate_n(row_of_a(slot, row), kInner, [&] { return rounded_to<T>(random.normal()); });
    for (int64_t row = 0; row < ends.back(); ++row)
      std::generate_n(row_of_b(slot, row), rank, [&] { return rounded_to<T>(random.normal()); });
  }

  kt::LowRankPool view() const {
    kt::LowRankPool pool;
    pool.a = stack(a, parts() * kRank, kInner);
    pool.b = stack(b, ends.back(), kRank);
    pool.parts = static_cast<int>(parts());
    std::copy(ends.begin(), ends.end(), pool.ends);
    return pool;
  }

 private:
  static kt::TensorView stack(const std::vector<T>& values, int64_t rows, int64_t cols) {
    kt::TensorView view = matrix_view(values.data(), kDtype, rows, cols, cols);
    view.ndim = 3;
    std::copy_backward(view.shape, view.shape + 2, view.shape + 3);
    std::copy_backward(view.strides, view.strides + 2, view.strides + 3);
    view.shape[0] = kSlots;
    view.strides[0] = rows * cols;
    return view;
  }
};

// Two products for each part of each adapter's rows.
template <class T>
void add_by_parts(const kt::DenseEngine& engine, Pool<T>& pool, const kt::LowRankRows& rows, const std::vector<T>& x,
                  std::vector<T>& out) {
  constexpr kt::DType dtype = Pool<T>::kDtype;
  constexpr int64_t inner = Pool<T>::kInner;
  const int64_t cols = pool.ends.back();
  const kt::TensorView from = matrix_view(x.data() + rows.first * inner, dtype, rows.rows, inner, inner);
  int64_t begin = 0;
  for (int64_t part = 0; part < pool.parts(); begin = pool.ends[static_cast<size_t>(part++)]) {
    const int64_t size = pool.ends[static_cast<size_t>(part)] - begin;
    std::vector<T> low(static_cast<size_t>(rows.rows * rows.rank));
    const kt::TensorView lows = matrix_view(low.data(), dtype, rows.rows, rows.rank, rows.rank);
    const kt::TensorView place = matrix_view(out.data() + rows.first * cols + begin, dtype, rows.rows, size, cols);
    kt::linear_added(engine, from,
                     matrix_view(pool.row_of_a(rows.slot, part * rows.rank), dtype, rows.rank, inner, inner),
                     rows.scaling, {}, lows);
    kt::linear_added(engine, lows, matrix_view(pool.row_of_b(rows.slot, begin), dtype, size, rows.rank, Pool<T>::kRank),
                     1.0f, place, place);
  }
}

template <class T>
void test_low_rank(const kt::Tiles& tiles, std::vector<int64_t> ends, const std::vector<kt::LowRankRows>& rows,
                   Random& random, Report& report) {
  Pool<T> pool(std::move(ends));
  int64_t highest = 0;
  for (const kt::LowRankRows& some : rows) {
    pool.fill(some.slot, some.rank, random);
    highest = std::max(highest, some.rank);
  }
  const int64_t tokens = rows.back().first + rows.back().rows + 2, cols = pool.ends.back(), inner = Pool<T>::kInner;
  const auto x = drawn<T>(tokens * inner, random), base = drawn<T>(tokens * cols, random);
  auto expected = base;
  for (const kt::LowRankRows& some : rows) add_by_parts<T>({tiles, 1}, pool, some, x, expected);
  for (const int threads : {1, 2, 3}) {
    auto found = base;
    const int64_t width = pool.parts() * highest;
    std::vector<T> low(static_cast<size_t>(tokens * width), rounded_to<T>(std::numeric_limits<float>::quiet_NaN()));
    kt::add_low_rank({tiles, threads}, matrix_view(x.data(), Pool<T>::kDtype, tokens, inner, inner), pool.view(), rows,
                     matrix_view(low.data(), Pool<T>::kDtype, tokens, width, width),
                     matrix_view(found.data(), Pool<T>::kDtype, tokens, cols, cols));
    report.equal("LoRA of " + std::to_string(rows.size()) + " adapters, " + std::to_string(threads) + " threads",
                 std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)) == 0);
  }
}

template <class T>
void test_low_ranks(const kt::Tiles& tiles, Random& random, Report& report) {
  const std::vector<kt::LowRankRows> one = {{.first = 0, .rows = 1, .slot = 1, .rank = 16, .scaling = 2.0f}};
  // Of several ranks, with rows between them that have no adapter; more than a task has.
  const std::vector<kt::LowRankRows> many = {{.first = 1, .rows = 1, .slot = 2, .rank = 16, .scaling = 0.25f},
                                             {.first = 2, .rows = 64, .slot = 0, .rank = 3, .scaling = 10.0f / 3},
                                             {.first = 66, .rows = 5, .slot = 2, .rank = 16, .scaling = 0.25f},
                                             {.first = 73, .rows = 30, .slot = 1, .rank = 20, .scaling = -1.5f}};
  for (const auto* rows : {&one, &many}) {
    test_low_rank<T>(tiles, {9}, *rows, random, report);
    test_low_rank<T>(tiles, {1030}, *rows, random, report);
    test_low_rank<T>(tiles, {600, 650, 700}, *rows, random, report);  // a task has columns of several parts
  }
}

// LoRA on the heads of latent attention, against products of one head after the other with transposed copies.
template <class T>
class HeadLora {
 public:
  static constexpr kt::DType kDtype = Pool<T>::kDtype;
  static constexpr int64_t kSlots = 2, kRank = 20, kHeads = 5, kNope = 24, kValue = 17, kLatent = 150;

  HeadLora(const kt::Tiles& tiles, std::vector<kt::LowRankRows> rows, int64_t tokens, Random& random)
      : tiles_(tiles),
        rows_(std::move(rows)),
        tokens_(tokens),
        a_(drawn<T>(kSlots * kRank * kLatent, random)),
        b_(drawn<T>(kSlots * kHeads * (kNope + kValue) * kRank, random)) {
    for (const kt::LowRankRows& some : rows_) highest_ = std::max(highest_, some.rank);
  }

  // Heads of `in` columns to heads of `out` columns, which lie 3 columns apart.
  void test(bool is_query, Random& random, Report& report) const {
    const int64_t in = is_query ? kNope : kLatent, out = is_query ? kLatent : kValue, distance = out + 3;
    const auto x = drawn<T>(tokens_ * kHeads * in, random), base = drawn<T>(tokens_ * kHeads * distance, random);
    auto expected = base;
    for (const kt::LowRankRows& some : rows_) {
      for (int64_t head = 0; head < kHeads; ++head) {
        const kt::TensorView from =
            matrix_view(x.data() + (some.first * kHeads + head) * in, kDtype, some.rows, in, kHeads * in);
        add_to_head(is_query, some, head, from,
                    matrix_view(expected.data() + (some.first * kHeads + head) * distance, kDtype, some.rows, out,
                                kHeads * distance));
      }
    }
    for (const int threads : {1, 3}) {
      auto found = base;
      std::vector<T> low(static_cast<size_t>(tokens_ * kHeads * highest_));
      const kt::DenseEngine engine{tiles_, threads};
      const kt::TensorView heads = heads_view(x.data(), in, in), to = heads_view(found.data(), out, distance);
      const auto add = is_query ? kt::add_low_rank_queries : kt::add_low_rank_outputs;
      add(engine, heads, pool(), rows_, heads_view(low.data(), highest_, highest_), to);
      report.equal(std::string("LoRA on heads, ") + (is_query ? "queries" : "outputs"),
                   std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)) == 0);
    }
  }

 private:
  kt::TensorView heads_view(const T* data, int64_t size, int64_t distance) const {
    kt::TensorView view = matrix_view(data, kDtype, tokens_, kHeads, kHeads * distance);
    view.ndim = 3;
    view.shape[2] = size;
    view.strides[1] = distance;
    view.strides[2] = 1;
    return view;
  }

  kt::LowRankPool pool() const {
    kt::LowRankPool pool;
    pool.a = matrix_view(a_.data(), kDtype, kSlots, kRank, kRank * kLatent);
    pool.b = matrix_view(b_.data(), kDtype, kSlots, kHeads * (kNope + kValue), kHeads * (kNope + kValue) * kRank);
    for (kt::TensorView* view : {&pool.a, &pool.b}) view->ndim = 3;
    pool.a.shape[2] = pool.a.strides[1] = kLatent;
    pool.b.shape[2] = pool.b.strides[1] = kRank;
    pool.a.strides[2] = pool.b.strides[2] = 1;
    pool.ends[0] = pool.b.shape[1];
    return pool;
  }

  void add_to_head(bool is_query, const kt::LowRankRows& some, int64_t head, const kt::TensorView& x,
                   const kt::TensorView& out) const {
    const kt::DenseEngine engine{tiles_, 1};
    const T* a = a_.data() + some.slot * kRank * kLatent;
    const T* b = b_.data() + (some.slot * kHeads + head) * (kNope + kValue) * kRank;
    std::vector<T> low(static_cast<size_t>(some.rows * some.rank));
    const kt::TensorView lows = matrix_view(low.data(), kDtype, some.rows, some.rank, some.rank);
    if (is_query) {
      const auto down = transposed(b, kNope, some.rank, kRank), up = transposed(a, some.rank, kLatent, kLatent);
      kt::linear_added(engine, x, matrix_view(down.data(), kDtype, some.rank, kNope, kNope), 1.0f, {}, lows);
      kt::linear_added(engine, lows, matrix_view(up.data(), kDtype, kLatent, some.rank, some.rank), some.scaling, out,
                       out);
    } else {
      kt::linear_added(engine, x, matrix_view(a, kDtype, some.rank, kLatent, kLatent), 1.0f, {}, lows);
      kt::linear_added(engine, lows, matrix_view(b + kNope * kRank, kDtype, kValue, some.rank, kRank), some.scaling,
                       out, out);
    }
  }

  static std::vector<T> transposed(const T* matrix, int64_t rows, int64_t cols, int64_t stride) {
    std::vector<T> values;
    for (int64_t col = 0; col < cols; ++col) {
      for (int64_t row = 0; row < rows; ++row) values.push_back(matrix[row * stride + col]);
    }
    return values;
  }

  const kt::Tiles& tiles_;
  const std::vector<kt::LowRankRows> rows_;
  const int64_t tokens_;
  const std::vector<T> a_, b_;
  int64_t highest_ = 0;
};

template <class T>
void test_head_lora(const kt::Tiles& tiles, Random& random, Report& report) {
  const HeadLora<T> one(tiles, {{.first = 0, .rows = 1, .slot = 1, .rank = 16, .scaling = 2.0f}}, 1, random);
  const HeadLora<T> many(tiles,
                         {{.first = 1, .rows = 1, .slot = 1, .rank = 3, .scaling = 10.0f / 3},
                          {.first = 2, .rows = 64, .slot = 0, .rank = 20, .scaling = 0.25f},
                          {.first = 68, .rows = 30, .slot = 1, .rank = 3, .scaling = -1.5f}},
                         100, random);
  for (const HeadLora<T>* each : {&one, &many}) {
    each->test(true, random, report);
    each->test(false, random, report);
  }
}

// B of an adapter on routed experts, for columns [first, first + count) of `out`.
template <class T>
void test_lora_up(const kt::Tiles& tiles, int64_t rank, kt::ColumnRange columns, Random& random, Report& report) {
  constexpr int64_t kExperts = 2, kPairs = 5, kExpert = 1;
  const int64_t out = columns.first + columns.count + 3, stride = rank + 3;
  const auto values = drawn<T>(kExperts * out * stride, random);
  kt::LoraSlot slot;
  kt::TensorView& b = slot.pairs[kt::kUp].b;
  b = matrix_view(values.data(), Pool<T>::kDtype, kExperts, out, out * stride);
  b.ndim = 3;
  b.shape[2] = rank;
  b.strides[1] = stride;
  b.strides[2] = 1;
  slot.pairs[kt::kUp].a = b;  // only its rank is used
  slot.pairs[kt::kUp].a.shape[1] = rank;
  const kt::LoraFactors factors{tiles, slot, kt::kUp, kExpert, kPairs};
  const auto low = random.floats(kPairs * rank), before = random.floats(kPairs * columns.count);
  auto y = before;
  kt::lora_up(factors, {low.data(), rank}, columns, {y.data(), columns.count});
  for (int64_t j = 0; j < columns.count; ++j) {
    float alone[kPairs];
    for (int64_t m = 0; m < kPairs; ++m) {
      const auto at = static_cast<size_t>(m * columns.count + j);
      const auto place = (kExpert * out + columns.first + j) * stride;
      const Sum sum = dot(
          rank, [&](int64_t r) { return low[static_cast<size_t>(m * rank + r)]; },
          [&](int64_t r) { return value_of(values[static_cast<size_t>(place + r)]); }, before[at]);
      report.close("B of LoRA", y[at], sum.value, kSumTolerance, sum.scale);
      alone[m] = before[at];
    }
    kt::lora_up(factors, {low.data(), rank}, {columns.first + j, 1}, {alone, 1});
    for (int64_t m = 0; m < kPairs; ++m)
      report.equal("B of LoRA depends on the other columns", alone[m] == y[static_cast<size_t>(m * columns.count + j)]);
  }
}

}  // namespace

void test_decoder(const kt::Tiles& tiles, Report& report) {
  Random random(11);
  const kt::Dense& kernels = *tiles.dense;
  for (const int64_t half : {1, 4, 16, 17, 32, 64}) {
    for (const bool interleaved : {false, true}) {
      test_rotary<float>(kernels, 3, 2 * half, half, interleaved, random, report);
      test_rotary<uint16_t>(kernels, 3, 2 * half, half, interleaved, random, report);
      test_rotary<uint16_t>(kernels, 2, 2 * half + 6, half, interleaved, random, report);
    }
  }
  for (const int64_t experts : {2, 8, 15, 64, 128, 257}) {
    for (const int64_t top_k : {int64_t{1}, std::min<int64_t>(experts, 8), experts}) {
      for (const bool normalises : {false, true}) {
        const kt::DenseEngine engine{tiles, 3};
        test_router<float>(engine, 5, experts, top_k, normalises, random, report);
        test_router<uint16_t>(engine, 5, experts, top_k, normalises, random, report);
      }
    }
  }
  const kt::DenseEngine engine{tiles, 3};
  test_router<uint16_t>(engine, 300, 128, 8, true, random, report);  // several tasks
  test_low_ranks<float>(tiles, random, report);
  test_low_ranks<uint16_t>(tiles, random, report);
  test_head_lora<float>(tiles, random, report);
  test_head_lora<uint16_t>(tiles, random, report);
  for (const int64_t rank : {1, 7, 16, 33}) {
    for (const int64_t count : {1, 15, 48, 257, 600}) {
      const kt::ColumnRange columns{count % 16, count};
      test_lora_up<float>(tiles, rank, columns, random, report);
      test_lora_up<uint16_t>(tiles, rank, columns, random, report);
    }
  }
}

}  // namespace kt_test
