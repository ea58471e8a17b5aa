// 16 x 16 floats, transposed in registers by four rounds of exchanges between rows.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/amx/kernels.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

class Square {
 public:
  void read(const float* from) {
    for (int i = 0; i < 16; ++i) rows_[i] = load<Floats>(from + i * 16);
  }

  void transpose() {
    exchange<1>();
    exchange<2>();
    exchange<4>();
    exchange<8>();
  }

  // Writes row i to `to`, or adds row i to the values there.
  void give(int64_t i, bool accumulate, float* to) const {
    store(accumulate ? load<Floats>(to) + rows_[i] : rows_[i], to);
  }

 private:
  // Rows i and i + D exchange elements: those of the first whose index has bit D for those of the second whose index
  // lacks it.
  template <int kD>
  void exchange() {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (!(i & kD)) trade<kD>(rows_[i], rows_[i + kD], std::make_integer_sequence<int, 16>{});
    }
  }

  template <int kD, int... kJ>
  static void trade(Floats& x, Floats& y, std::integer_sequence<int, kJ...>) {
    const Floats low = __builtin_shufflevector(x, y, (kJ & kD ? 16 + kJ - kD : kJ)...);
    const Floats high = __builtin_shufflevector(x, y, (kJ & kD ? 16 + kJ : kJ + kD)...);
    x = low;
    y = high;
  }

  Floats rows_[16];
};

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
