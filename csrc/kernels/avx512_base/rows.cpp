// LoRA products and elementwise kernels with AVX-512. Register tiles: 12 x 2 vectors; 4 x 4 row pairs.
#include "kernels/avx512/vector.h"
#include "kernels/avx512_base/kernels.h"
#include "kernels/generic/plain_products.h"
#include "kernels/generic/rows/activations.h"
#include "kernels/generic/rows/elementwise.h"
#include "kernels/generic/rows/row_products.h"

namespace kt::avx512_base {

void product(const PlainProduct& p) { multiply_plain<Vec16, 12, 2>(p); }
void row_product(const RowProduct& p) { multiply_rows<Vec16, 4, 4>(p); }

void widen(const uint16_t* from, int64_t count, float* to) { widen_all(from, count, to); }
void narrow(const float* from, int64_t count, uint16_t* to) { narrow_all(from, count, to); }
void activate(const Activation& activation, const float* gate, const float* up, int64_t count, float* h) {
  activate_all(activation, gate, up, count, h);
}
double activate_backward(const Activation& activation, float* gate, float* up, const float* dh, float weight,
                         int64_t count) {
  return activate_backward_all(activation, gate, up, dh, weight, count);
}
void add_scaled(const float* from, float factor, int64_t count, float* to) { add_scaled_all(from, factor, count, to); }
void sigmoid(const float* from, int64_t count, float* to) { sigmoid_all(from, count, to); }
void exponential(const float* from, float largest, int64_t count, float* to) {
  exponential_all(from, largest, count, to);
}

}  // namespace kt::avx512_base
