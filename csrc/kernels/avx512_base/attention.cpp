// Attention with AVX-512 without a bf16 dot product. Register tile 8 rows x 2 vectors: 16 sums, two operands, one
// broadcast.
#include "kernels/attention.h"

#include "kernels/avx512/transpose.h"
#include "kernels/generic/rows/attention_blocks.h"

namespace kt {

const Attention avx512_base::kAttention =
    AttentionKernels<TransposingVec16, WideScores<TransposingVec16, uint16_t>, 8>::table();

}  // namespace kt
