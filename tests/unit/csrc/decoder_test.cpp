// Rotary embedding and the choice of experts: against plain loops and double precision, bits that do not depend on the
// instruction set, ties, rows that are not finite.
#include <numeric>
#include <type_traits>

#include "checks.h"
#include "ops/router.h"

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
void test_rotary(const kt::Dense& kernels, int64_t heads, int64_t size, int64_t half, Random& random, Report& report) {
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
      const int64_t a = h * stride + i, b = a + half;
      expected[static_cast<size_t>(a)] = rounded_to<T>(product(a, i) - product(b, half + i));
      expected[static_cast<size_t>(b)] = rounded_to<T>(product(b, i) + product(a, half + i));
    }
  }
  kernels.rotate({.heads = heads,
                  .half = half,
                  .x = {.data = x.data(), .stride = stride, .bf16 = sizeof(T) == 2},
                  .angles = angles.data()});
  report.equal("rotary " + std::to_string(heads) + " x " + std::to_string(size) + ", half " + std::to_string(half),
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
  std::vector<int32_t> order(static_cast<size_t>(logits.experts));
  std::iota(order.begin(), order.end(), 0);
  const auto logit = [&](int32_t e) { return static_cast<double>(value_of(logits.at(row, e))); };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
  double all = 0, chosen = 0;
  for (const int32_t e : order) all += std::exp(logit(e) - logit(order[0]));
  for (int64_t k = 0; k < top_k; ++k) chosen += std::exp(logit(order[static_cast<size_t>(k)]) - logit(order[0]));
  for (int64_t k = 0; k < top_k; ++k) {
    const auto at = static_cast<size_t>(row * top_k + k);
    const int32_t expert = order[static_cast<size_t>(k)];
    report.equal("router's expert", choice.ids[at] == expert);
    const double expected = std::exp(logit(expert) - logit(order[0])) / (normalises ? chosen : all);
    report.close("router's weight", choice.weights[at], expected, 16 * kFloatRounding, expected);  // 13 measured
  }
}

template <class T>
void test_router(const kt::DenseEngine& engine, int64_t rows, int64_t experts, int64_t top_k, bool normalises,
                 Random& random, Report& report) {
  Logits<T> logits(rows, experts, random);
  for (int64_t e = 0; e + 1 < experts; e += 3) logits.at(rows / 2, e + 1) = logits.at(rows / 2, e);  // ties
  const Choice whole = logits.chosen(engine, 0, rows, top_k, normalises);
  for (int64_t row = 0; row < rows; ++row) compare_row(logits, row, whole, top_k, normalises, report);

  const kt::Tiles& tiles = engine.tiles;
  const kt::DenseEngine portable{kt::portable::kDense, tiles, 1};
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

}  // namespace

void test_decoder(const kt::Tiles& tiles, Report& report) {
  Random random(11);
  const kt::Dense& kernels = kt::dense_of(tiles);
  for (const int64_t half : {1, 4, 16, 17, 32, 64}) {
    test_rotary<float>(kernels, 3, 2 * half, half, random, report);
    test_rotary<uint16_t>(kernels, 3, 2 * half, half, random, report);
    test_rotary<uint16_t>(kernels, 2, 2 * half + 6, half, random, report);
  }
  for (const int64_t experts : {2, 8, 15, 64, 128, 257}) {
    for (const int64_t top_k : {int64_t{1}, std::min<int64_t>(experts, 8), experts}) {
      for (const bool normalises : {false, true}) {
        const kt::DenseEngine engine{kernels, tiles, 3};
        test_router<float>(engine, 5, experts, top_k, normalises, random, report);
        test_router<uint16_t>(engine, 5, experts, top_k, normalises, random, report);
      }
    }
  }
  const kt::DenseEngine engine{kernels, tiles, 3};
  test_router<uint16_t>(engine, 300, 128, 8, true, random, report);  // several tasks
}

}  // namespace kt_test
