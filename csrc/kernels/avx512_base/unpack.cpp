// Packed weights to row-major bf16 with AVX-512, in 8 x 8 words.
#include "kernels/avx2/vector.h"
#include "kernels/avx512_base/kernels.h"
#include "kernels/generic/unpack_bf16.h"

namespace kt {

void avx512_base::unpack(const UnpackedRows& u) { unpack_to_bf16<Vec8>(u); }

}  // namespace kt
