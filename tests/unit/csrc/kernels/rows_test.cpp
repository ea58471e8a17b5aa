// LoRA products and elementwise kernels: sizes around the tiles' edges, misaligned pointers, NaN beside the operands,
// extreme values.
#include <algorithm>
#include <numeric>

#include "checks.h"
#include "kernels/registry.h"
#include "reference.h"

namespace kt_test {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }

void test_product(const kt::Tiles& tiles, int64_t rows, int64_t cols, int64_t inner, bool transposed, bool accumulate,
                  Random& random, Report& report) {
  if (!report.takes()) return;
  const int64_t a_row = transposed ? 1 : inner + 2, a_col = transposed ? rows + 3 : 1;
  const int64_t ldb = cols + 1, ldc = cols + 2;
  const auto a = random.floats(rows * a_row + inner * a_col + 1), b = random.floats(inner * ldb + 1);
  std::vector<float> c = random.floats(rows * ldc + 1);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = cols; n < ldc; ++n) c[static_cast<size_t>(1 + m * ldc + n)] = kPoison;
  }
  const std::vector<float> before = c;
  tiles.product({.rows = rows,
                 .cols = cols,
                 .inner = inner,
                 .a = a.data() + 1,
                 .a_row = a_row,
                 .a_col = a_col,
                 .b = {b.data() + 1, ldb},
                 .c = {c.data() + 1, ldc},
                 .accumulate = accumulate});
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < ldc; ++n) {
      const float got = c[static_cast<size_t>(1 + m * ldc + n)];
      if (n >= cols) {
        report.equal("product writes beyond its columns", std::isnan(got));
        continue;
      }
      const Sum sum = dot(
          inner, [&](int64_t i) { return a[static_cast<size_t>(1 + m * a_row + i * a_col)]; },
          [&](int64_t i) { return b[static_cast<size_t>(1 + i * ldb + n)]; },
          accumulate ? before[static_cast<size_t>(1 + m * ldc + n)] : 0.0);
      report.close("product", got, sum.value, kSumTolerance, sum.scale);
    }
  }
}

// Random rows with NaN between them, one element off any alignment.
std::vector<float> poisoned_rows(int64_t rows, int64_t width, int64_t ld, Random& random) {
  std::vector<float> values(static_cast<size_t>(1 + rows * ld), kPoison);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t i = 0; i < width; ++i) values[static_cast<size_t>(1 + m * ld + i)] = kt::bf16_to_float(random.bf16());
  }
  return values;
}

void test_row_product(const kt::Tiles& tiles, int64_t rows, int64_t cols, int64_t inner, bool bf16, Random& random,
                      Report& report) {
  if (!report.takes()) return;
  const int64_t lda = inner + 2, ldb = inner + 3, ldc = cols + 1;
  const std::vector<float> a = poisoned_rows(rows, inner, lda, random), b = poisoned_rows(cols, inner, ldb, random);
  std::vector<uint16_t> narrow;
  for (const float value : b) narrow.push_back(kt::float_to_bf16(value));
  std::vector<float> c(static_cast<size_t>(1 + rows * ldc), kPoison);
  const float factor = 0.75f;
  const auto product = [&](int64_t m, int64_t n, int64_t count_m, int64_t count_n, float* to, int64_t ld) {
    kt::RowProduct one{.rows = count_m,
                       .cols = count_n,
                       .inner = inner,
                       .a = {a.data() + 1 + m * lda, lda},
                       .factor = factor,
                       .c = {to, ld}};
    if (bf16) {
      one.b_bf16 = {narrow.data() + 1 + n * ldb, ldb};
    } else {
      one.b = {b.data() + 1 + n * ldb, ldb};
    }
    tiles.row_product(one);
  };
  product(0, 0, rows, cols, c.data() + 1, ldc);
  report.equal("row_product writes before", std::isnan(c[0]));
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < cols; ++n) {
      const float got = c[static_cast<size_t>(1 + m * ldc + n)];
      const Sum sum = dot(
          inner, [&](int64_t i) { return factor * static_cast<double>(a[static_cast<size_t>(1 + m * lda + i)]); },
          [&](int64_t i) { return b[static_cast<size_t>(1 + n * ldb + i)]; });
      report.close("row_product", got, sum.value, kSumTolerance, sum.scale);
      float alone = kPoison;
      product(m, n, 1, 1, &alone, 1);
      report.equal("row_product depends on the other rows", same_bits(alone, got));
    }
    report.equal("row_product writes beyond", std::isnan(c[static_cast<size_t>(1 + m * ldc + cols)]));
  }
}

void test_conversions(const kt::Tiles& tiles, Random& random, Report& report) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(all.size());
  tiles.widen(all.data(), 65536, wide.data());
  for (size_t i = 0; i < all.size(); ++i) report.equal("widen", same_bits(wide[i], kt::bf16_to_float(all[i])));

  std::vector<float> values = wide;
  for (int i = 0; i < 20000; ++i) {
    const auto bits = static_cast<uint32_t>(random.below(int64_t{1} << 32));
    values.push_back(0);
    std::memcpy(&values.back(), &bits, sizeof bits);
    // Halfway between two bf16, and one unit to either side.
    const uint32_t tie = (bits & 0xffff0000u) + 0x8000u + static_cast<uint32_t>(i % 3) - 1;
    values.push_back(0);
    std::memcpy(&values.back(), &tie, sizeof tie);
  }
  std::vector<uint16_t> narrow(values.size());
  tiles.narrow(values.data(), static_cast<int64_t>(values.size()), narrow.data());
  for (size_t i = 0; i < values.size(); ++i) report.equal("narrow", narrow[i] == kt::float_to_bf16(values[i]));

  for (int64_t count = 0; count <= 70; ++count) {
    const std::vector<float> from = random.floats(count + 1);
    std::vector<float> to(static_cast<size_t>(count + 2), 3.0f);
    std::vector<uint16_t> bits(static_cast<size_t>(count + 2), 7);
    tiles.narrow(from.data() + 1, count, bits.data() + 1);
    tiles.widen(bits.data() + 1, count, to.data() + 1);
    for (int64_t i = 1; i <= count; ++i) {
      const auto at = static_cast<size_t>(i);
      report.equal("narrow and widen", to[at] == kt::bf16_to_float(kt::float_to_bf16(from[at])));
    }
    report.equal("conversions write beside",
                 to.front() == 3.0f && to.back() == 3.0f && bits.front() == 7 && bits.back() == 7);
    std::vector<float> sum = random.floats(count + 2);
    const std::vector<float> before = sum;
    tiles.add_scaled(from.data() + 1, 0.3f, count, sum.data() + 1);
    for (int64_t i = 0; i < count + 2; ++i) {
      const auto at = static_cast<size_t>(i);
      const bool inside = i > 0 && i <= count;
      volatile float product = inside ? 0.3f * from[at] : 0.0f;  // rounded before it is added
      report.equal("add_scaled", sum[at] == (inside ? before[at] + product : before[at]));
    }
  }
}

// Gates over the whole range of float32, dense where SiLU bends.
std::vector<float> gates(Random& random) {
  std::vector<float> values = {0.0f,   -0.0f,   1e-45f,   -1e-45f, 1e-38f,  -1e-38f, 1e-20f,  -1e-20f, 1e38f,
                               -1e38f, 3.4e38f, -3.4e38f, 129.9f,  -129.9f, 130.1f,  -130.1f, 103.9f,  -103.9f};
  for (int i = 0; i < 4000; ++i) values.push_back(-140.0f + 0.07f * static_cast<float>(i) + 0.01f * random.normal());
  for (int i = 0; i < 2000; ++i) values.push_back(2.0f * random.normal());
  for (int i = -126; i < 128; ++i) {  // a mantissa below 2: all are finite
    values.push_back(std::ldexp(1.0f + 0x1p-23f * static_cast<float>(random.below(1 << 23)), i));
    values.push_back(-values.back());
  }
  return values;
}

// One unit in the last place of a float32 of this size.
double ulp(long double value) {
  int exponent;
  std::frexp(static_cast<double>(value), &exponent);
  return std::ldexp(1.0, std::max(exponent - 24, -149));
}

void test_swiglu(const kt::Tiles& tiles, Random& random, Report& report) {
  const std::vector<float> gate = gates(random);
  const auto count = static_cast<int64_t>(gate.size());
  const std::vector<float> one(gate.size(), 1.0f), up = random.floats(count);
  std::vector<float> silu(gate.size()), h(gate.size() + 1, kPoison);
  tiles.activate({}, gate.data(), one.data(), count, silu.data());
  tiles.activate({}, gate.data(), up.data(), count, h.data());
  report.equal("swiglu writes beyond", std::isnan(h.back()));
  for (size_t i = 0; i < gate.size(); ++i) {
    const long double wanted = gate[i] < -1000 ? 0.0L : kt_test::silu<long double>(gate[i]);
    report.close([&] { return "silu of " + std::to_string(gate[i]); }, silu[i], static_cast<double>(wanted),
                 3 * 0x1p-24, 0x1p24 * ulp(wanted));
    report.equal("silu has the sign of the gate", std::signbit(silu[i]) == std::signbit(gate[i]));
    volatile float product = silu[i] * up[i];
    report.equal("swiglu is silu times up", h[i] == product);
    float alone = kPoison;
    tiles.activate({}, &gate[i], &up[i], 1, &alone);
    report.equal("swiglu depends on the place", same_bits(alone, h[i]));
  }
}

void test_swiglu_at_infinity(const kt::Tiles& tiles, Report& report) {
  const float edge[] = {-kInf, kInf, kInf, kPoison, 1.0f, -kInf}, edge_up[] = {2.0f, 2.0f, -2.0f, 1.0f, kPoison, -2.0f};
  const float wanted[] = {-0.0f, kInf, -kInf, kPoison, kPoison, 0.0f};
  for (const int64_t repeat : {1, 5}) {  // in the rest and in vectors
    std::vector<float> g, u, out(static_cast<size_t>(6 * repeat));
    for (int64_t i = 0; i < 6 * repeat; ++i) {
      g.push_back(edge[i % 6]);
      u.push_back(edge_up[i % 6]);
    }
    tiles.activate({}, g.data(), u.data(), 6 * repeat, out.data());
    for (size_t i = 0; i < out.size(); ++i) report.equal("swiglu at infinity", same_bits(out[i], wanted[i % 6]));
  }
}

void test_router_functions(const kt::Tiles& tiles, Random& random, Report& report) {
  std::vector<float> from = gates(random);
  const auto count = static_cast<int64_t>(from.size());
  std::vector<float> found(from.size() + 1, kPoison);
  tiles.sigmoid(from.data(), count, found.data());
  report.equal("sigmoid writes beyond", std::isnan(found.back()));
  for (size_t i = 0; i < from.size(); ++i) {
    const long double wanted = from[i] < -1000 ? 0.0L : sigmoid<long double>(from[i]);
    report.close([&] { return "sigmoid(" + std::to_string(from[i]) + ")"; }, found[i], static_cast<double>(wanted),
                 3 * 0x1p-24, 0x1p24 * ulp(wanted));
    float alone = kPoison;
    tiles.sigmoid(&from[i], 1, &alone);
    report.equal("sigmoid depends on the place", same_bits(alone, found[i]));
  }
  for (float& value : from) value = -std::fabs(value);
  tiles.exponential(from.data(), 0.0f, count, found.data());
  for (size_t i = 0; i < from.size(); ++i) {
    const long double wanted = from[i] < -1000 ? 0.0L : std::exp(static_cast<long double>(from[i]));
    report.close([&] { return "e^" + std::to_string(from[i]); }, found[i], static_cast<double>(wanted), 3 * 0x1p-24,
                 0x1p24 * ulp(wanted));
    float alone = kPoison;
    tiles.exponential(&from[i], 0.0f, 1, &alone);
    report.equal("exponential depends on the place", same_bits(alone, found[i]));
  }
  const float edge[] = {-kInf, kPoison, 1.0f};
  float out[3];
  tiles.exponential(edge, 1.0f, 3, out);
  report.equal("exponential at its limits", out[0] == 0 && std::isnan(out[1]) && out[2] == 1);
}

void test_swiglu_backward(const kt::Tiles& tiles, int64_t count, const std::vector<float>& gate, Random& random,
                          Report& report) {
  const float weight = 0.37f;
  std::vector<float> up = random.floats(count + 2);
  for (float& value : up) value = std::clamp(value, -1.0f, 1.0f);  // h is finite for the largest gate
  const std::vector<float> dh = random.floats(count + 2);
  std::vector<float> dgate = gate, dup = up;
  const double dot = tiles.activate_backward({}, dgate.data() + 1, dup.data() + 1, dh.data() + 1, weight, count);
  long double wanted = 0, squares = 0;
  for (int64_t i = 1; i <= count; ++i) {
    const auto at = static_cast<size_t>(i);
    const long double g = std::max(gate[at], -1000.0f), s = sigmoid(g), h = g * s * up[at];
    wanted += h * dh[at];
    squares += h * dh[at] * (h * dh[at]);
    const long double outer = static_cast<long double>(weight) * dh[at];
    if (std::fabs(gate[at]) < 1000) {
      const double size = static_cast<double>(std::fabs(outer * up[at]) * s * (1 + std::fabs(g) * (1 - s)));
      report.close("gradient of gate", dgate[at], static_cast<double>(outer * up[at] * s * (1 + g * (1 - s))), 6e-7,
                   size + 1e-36);  // subnormal results have fewer digits
      report.close("gradient of up", dup[at], static_cast<double>(outer * g * s), 6e-7,
                   static_cast<double>(std::fabs(outer * g * s)) + 1e-36);
    }
    float g1 = gate[at], u1 = up[at];
    tiles.activate_backward({}, &g1, &u1, &dh[at], weight, 1);
    report.equal("swiglu_backward depends on the place", same_bits(g1, dgate[at]) && same_bits(u1, dup[at]));
  }
  // The sum is in double: its error is that of the terms, each with another sign. 1.4 roundings measured.
  report.close("<h, dh>", dot, static_cast<double>(wanted), 5 * kFloatRounding,
               static_cast<double>(std::sqrt(squares)));
  report.equal("swiglu_backward writes beside", dgate.front() == gate.front() && dgate.back() == gate.back() &&
                                                    dup.front() == up.front() && dup.back() == up.back());
}

// Values from -40 to 40, most near 0, and the clamps' borders with their neighbours.
std::vector<float> arguments(const kt::Activation& activation, Random& random) {
  std::vector<float> values = random.floats(600);
  for (float& value : values) value *= 2;
  for (int i = -80; i <= 80; ++i) values.push_back(0.5f * static_cast<float>(i));
  for (const float border : {activation.limit, -activation.limit, 0.0f}) {
    for (const float value : {border, std::nextafter(border, 100.0f), std::nextafter(border, -100.0f)})
      values.push_back(value);
  }
  return values;
}

// An element's h, and with dh = 1 and a weight of 1 its derivatives.
struct ActivatedElement {
  float h, by_gate, by_up;
  ActivatedElement(const kt::Tiles& tiles, const kt::Activation& activation, float gate, float up) {
    const float one = 1;
    tiles.activate(activation, &gate, &up, 1, &h);
    tiles.activate_backward(activation, &gate, &up, &one, 1.0f, 1);
    by_gate = gate, by_up = up;
  }
};

// The largest errors allowed, in roundings of float32; the comments have those measured, on every instruction set the
// same: the bits are compared below.
struct ActivationRoundings {
  double h, by_gate, by_up;
};
ActivationRoundings allowed_for(kt::ActivationKind kind) {
  using enum kt::ActivationKind;
  switch (kind) {
    case kSilu:
      return {4, 7, 4};  // measured: 1.8, 3.3, 1.8
    case kSiluClamped:
      return {1.5, 2, 1.5};  // 0.56, 0.94, 0.62
    case kSwigluOai:
      return {3, 4, 1.5};  // 1.4, 1.9, 0.69
    case kGelu:
      return {8, 6, 3};  // 4.4, 2.5, 1.4
    case kGeluTanh:
      return {5, 7, 5};  // 2.2, 3.4, 2.2
    case kReluSquared:
      return {2, 0, 5};  // 0.93, no gate, 2.5
  }
  return {};
}

void test_activation(const kt::Tiles& tiles, const kt::Activation& activation, Random& random, Report& report) {
  const std::string name = "activation " + std::to_string(static_cast<int>(activation.kind)),
                    of_place = name + " depends on the place", of_isa = name + " depends on the instruction set",
                    of_gate = name + ": gradient of gate", of_up = name + ": gradient of up",
                    of_dot = name + ": <h, dh>";
  const kt::Tiles* portable = nullptr;
  report.equal("there is always a portable set", kt::find_tiles("portable", &portable).ok());
  std::vector<float> gate = arguments(activation, random), up = arguments(activation, random);
  for (size_t i = up.size() - 1; i > 0; --i)
    std::swap(up[i], up[static_cast<size_t>(random.below(static_cast<int64_t>(i + 1)))]);
  const auto count = static_cast<int64_t>(gate.size());
  const bool has_gate = activation.has_gate();
  const std::vector<float> dh = random.floats(count);
  std::vector<float> h(gate.size() + 1, kPoison), dgate = gate, dup = up;
  tiles.activate(activation, has_gate ? gate.data() : nullptr, up.data(), count, h.data());
  report.equal(name + " writes beyond", std::isnan(h.back()));
  const float weight = 0.37f;
  tiles.activate_backward(activation, has_gate ? dgate.data() : nullptr, dup.data(), dh.data(), weight, count);
  const ActivationRoundings allowed = allowed_for(activation.kind);
  Row terms, scales;
  for (size_t i = 0; i < gate.size(); ++i) {
    const long double g = gate[i], u = up[i], size = 1 + std::fabs(u);
    const auto of = [&](long double a, long double b) { return activated<long double>(activation, a, b); };
    // Rounding of gelu's distribution function, which is at most 1, is the largest error.
    const double scale = static_cast<double>(1e-30L + std::fabs(of(g, u))) +
                         (has_gate ? 0.5 * static_cast<double>(std::fabs(g) * std::fmin(size, 2.5L)) : 0);
    report.close(name, h[i], static_cast<double>(of(g, u)), allowed.h * kFloatRounding, scale);
    terms.push_back(static_cast<double>(of(g, u) * dh[i]));
    scales.push_back(scale * static_cast<double>(dh[i]));
    const ActivatedElement alone(tiles, activation, gate[i], up[i]);
    report.equal(of_place, same_bits(alone.h, h[i]));
    const ActivatedElement again(*portable, activation, gate[i], up[i]);
    report.equal(of_isa, same_bits(alone.h, again.h) && same_bits(alone.by_gate, again.by_gate) &&
                             same_bits(alone.by_up, again.by_up));
    const auto slope = [&](auto&& at) {  // of the side on which the clamp passes, at its border
      constexpr long double kStep = 1e-7L;
      return (at(kStep) - at(-kStep)) / (2 * kStep);
    };
    const long double outer = static_cast<long double>(weight) * dh[i];
    const auto is_border = [&](long double x) { return std::fabs(std::fabs(x) - activation.limit) < 1e-5L; };
    if (has_gate && !is_border(g)) {
      const long double wanted = outer * slope([&](long double step) { return of(g + step, u); });
      report.close(of_gate, dgate[i], static_cast<double>(wanted), allowed.by_gate * kFloatRounding,
                   static_cast<double>(std::fabs(outer) * size));
    }
    if (!is_border(u)) {
      const long double wanted = outer * slope([&](long double step) { return of(g, u + step); });
      report.close(of_up, dup[i], static_cast<double>(wanted), allowed.by_up * kFloatRounding,
                   static_cast<double>(std::fabs(outer) * (1 + std::fabs(has_gate ? g : u))));
    }
  }
  // The sum is in double, so its error is that of h, each element's with another sign: relative to the norm of what
  // these may be, whatever the length. Measured: 1.8 roundings (gelu) at most, 0.36 (clamped silu) at least. Parts: in
  // the whole sum the largest terms hide the errors of the others.
  for (const int64_t part : {count, int64_t{12}}) {
    for (int64_t first = 0; first < count; first += part) {
      const auto end = std::min(first + part, count);
      const auto within = [&](const auto& values) { return std::vector(values.begin() + first, values.begin() + end); };
      dgate = within(gate);
      dup = within(up);
      const double dot = tiles.activate_backward(activation, has_gate ? dgate.data() : nullptr, dup.data(),
                                                 dh.data() + first, weight, end - first);
      const Row of = within(terms);
      report.close(of_dot, dot, std::accumulate(of.begin(), of.end(), 0.0), allowed.h * kFloatRounding,
                   norm(within(scales)));
    }
  }
}

// PyTorch's clamp has the derivative 1 inside, and 0 at its borders and beyond.
void test_clamp_borders(const kt::Tiles& tiles, Report& report) {
  for (const kt::Activation& activation : all_activations()) {
    const float limit = activation.limit, below = std::nextafter(limit, 0.0f), inside = 0.5f * limit;
    if (limit == 0) continue;
    const auto at = [&](float gate, float up) { return ActivatedElement(tiles, activation, gate, up); };
    report.equal("a gate just below the limit has a gradient", at(below, inside).by_gate > 0);
    report.equal("a gate at the limit or above has none",
                 at(limit, inside).by_gate == 0 && at(2 * limit, inside).by_gate == 0);
    report.equal("a gate far below has one", at(-2 * limit, inside).by_gate != 0);
    report.equal("up within the limits has a gradient", at(inside, below).by_up > 0 && at(inside, -below).by_up > 0);
    report.equal("up at the limits or beyond has none",
                 at(inside, limit).by_up == 0 && at(inside, -limit).by_up == 0 && at(inside, 2 * limit).by_up == 0);
  }
}

void test_activation_limits(const kt::Tiles& tiles, Report& report) {
  for (const kt::Activation& activation : all_activations()) {
    const auto at = [&](float gate, float up) { return ActivatedElement(tiles, activation, gate, up); };
    report.equal("NaN of up stays", std::isnan(at(0.5f, kPoison).h));
    if (!activation.has_gate()) {
      report.equal("relu2 at its limits", at(0, -kInf).h == 0 && at(0, -kInf).by_up == 0 && at(0, kInf).h == kInf);
      continue;
    }
    report.equal("NaN of gate stays", std::isnan(at(kPoison, 0.5f).h) && std::isnan(at(kPoison, 0.5f).by_gate));
    report.equal("a gate of -infinity", at(-kInf, 0.5f).h == 0 && at(-kInf, 0.5f).by_gate == 0);
    const float top = activation.limit == 0 ? kInf : at(activation.limit, 0.5f).h;
    report.equal("a gate of infinity", at(kInf, 0.5f).h == top);
    report.equal("zeros give zero", at(0, 0).h == 0);
  }
}

void test_activation_names(Report& report) {
  kt::Activation found;
  const kt::Status unknown = kt::parse_activation("swish", 0, 0, &found);
  report.equal(
      "an unknown activation is told the known ones",
      unknown.code() == kt::StatusCode::kUnknownName && unknown.message().find("'swish'") != std::string::npos &&
          unknown.message().find("silu, silu_clamped, swigluoai, gelu, gelu_pytorch_tanh, relu2") != std::string::npos);
  report.equal("limit and alpha", kt::parse_activation("swigluoai", 7.0f, 1.702f, &found).ok() &&
                                      found.kind == kt::ActivationKind::kSwigluOai && found.limit == 7.0f &&
                                      found.alpha == 1.702f);
  for (const float bad : {0.0f, -1.0f, kInf, kPoison})
    report.equal("a limit that is none", !kt::parse_activation("silu_clamped", bad, 0, &found).ok());
  report.equal("a limit too many", !kt::parse_activation("silu", 7.0f, 0, &found).ok());
}

void test_gradient_limits(const kt::Tiles& tiles, Report& report) {
  float gate[] = {-kInf, kInf, -3e38f, 3e38f, kPoison}, up[] = {2, 2, 2, 2, 2};
  const float dh[] = {1, 1, 1, 1, 1}, wanted[] = {0, 1, 0, 1, kPoison};
  tiles.activate_backward({}, gate, up, dh, 0.5f, 5);
  for (int i = 0; i < 5; ++i)
    report.equal("gradient of gate at its limits", gate[i] == wanted[i] || same_bits(gate[i], wanted[i]));
}

}  // namespace

void test_rows(const kt::Tiles& tiles, Report& report) {
  Random random(4);
  for (const int64_t rows : {1, 2, 5, 6, 7, 12, 13, 29}) {
    for (const int64_t cols : {1, 3, 8, 15, 16, 17, 33, 64}) {
      for (const int64_t inner : {0, 1, 7, 33}) {
        for (const int variant : {0, 1, 2, 3})
          test_product(tiles, rows, cols, inner, variant & 1, variant & 2, random, report);
      }
    }
  }
  for (const int64_t rows : {1, 2, 3, 4, 5, 9, 11}) {
    for (const int64_t cols : {1, 2, 3, 4, 5, 7, 8, 13}) {
      for (const int64_t inner : {0, 1, 7, 8, 15, 16, 17, 33, 100}) {
        for (const bool bf16 : {false, true}) test_row_product(tiles, rows, cols, inner, bf16, random, report);
      }
    }
  }
  test_conversions(tiles, random, report);
  test_swiglu(tiles, random, report);
  test_swiglu_at_infinity(tiles, report);
  for (const int64_t count : {0, 1, 3, 7, 8, 9, 17, 40, 513, 1030})
    test_swiglu_backward(tiles, count, random.floats(count + 2), random, report);
  const std::vector<float> wide = gates(random);
  test_swiglu_backward(tiles, static_cast<int64_t>(wide.size()) - 2, wide, random, report);
  test_gradient_limits(tiles, report);
  for (const kt::Activation& activation : all_activations()) test_activation(tiles, activation, random, report);
  test_clamp_borders(tiles, report);
  test_activation_limits(tiles, report);
  test_activation_names(report);
  test_router_functions(tiles, random, report);
}

}  // namespace kt_test
