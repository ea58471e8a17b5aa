// float16 <-> float32: every float16 is kept, and what lies between two goes to the nearer one, halfway to the even
// one.
#include "base/fp16.h"

#include "checks.h"

namespace kt_test {
namespace {

constexpr uint16_t kInfinity = 0x7c00;

void test_value(float value, uint16_t wanted, Report& report) {
  const auto what = [&] { return "float_to_fp16(" + std::to_string(value) + ")"; };
  report.equal(what, kt::float_to_fp16(value) == wanted);
  report.equal([&] { return "-" + what(); }, kt::float_to_fp16(-value) == (wanted | 0x8000));
}

}  // namespace

void test_fp16(Report& report) {
  for (uint16_t bits = 0; bits < kInfinity; ++bits) {
    // IEEE 754: 10 bits of mantissa, exponents from 2^-14 on, below them multiples of 2^-24.
    const int exponent = bits >> 10, mantissa = bits & 0x3ff;
    const double value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    const double step = std::ldexp(1.0, std::max(exponent, 1) - 25);
    report.equal("fp16_to_float", kt::fp16_to_float(bits) == static_cast<float>(value));
    report.equal("-fp16_to_float", kt::fp16_to_float(bits | 0x8000) == static_cast<float>(-value));
    test_value(static_cast<float>(value), bits, report);
    const auto halfway = static_cast<float>(value + step / 2);  // exact: float32 has 13 bits more
    test_value(halfway, static_cast<uint16_t>(bits + (bits & 1)), report);
    test_value(std::nextafter(halfway, 0.0f), bits, report);
    test_value(std::nextafter(halfway, INFINITY), static_cast<uint16_t>(bits + 1), report);
  }
  for (const float value : {65536.0f, 1e30f, INFINITY}) test_value(value, kInfinity, report);
  report.equal("fp16_to_float of infinity", kt::fp16_to_float(kInfinity) == INFINITY);
  for (const float value : {NAN, -NAN}) {
    const uint16_t bits = kt::float_to_fp16(value);
    report.equal("NaN stays NaN", (bits & 0x7fff) > kInfinity && std::isnan(kt::fp16_to_float(bits)));
  }
}

}  // namespace kt_test
