// The same with VNNI, where a processor has it but no bf16 dot product (Cascade Lake, Ice Lake).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own header starts undefined vectors with themselves
#endif
#include "kernels/avx512/products/integer_few.h"
#include "kernels/avx512_base/kernels.h"

namespace kt {

void avx512_base::multiply_int8_vnni(const IntegerProduct& p) { multiply_integer<IntegerTiles<DotVnni>>(p); }

}  // namespace kt
