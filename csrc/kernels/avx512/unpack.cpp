// Packed weights to row-major bf16 with AVX-512, in 8 x 8 words: 16 take more shuffles a word.
#include "kernels/avx2/vector.h"
#include "kernels/avx512/kernels.h"
#include "kernels/generic/unpack_bf16.h"

namespace kt {

void avx512::unpack(const UnpackedRows& u) { unpack_to_bf16<Vec8>(u); }

}  // namespace kt
