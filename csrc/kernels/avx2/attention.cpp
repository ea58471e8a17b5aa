// Attention with AVX2. Register tile 4 rows x 2 vectors: 8 sums, two operands, one broadcast. Per unit 8 fma and 6
// loads.
#include "kernels/attention.h"

#include "kernels/avx2/vector.h"
#include "kernels/generic/rows/attention_blocks.h"

namespace kt {

const Attention avx2::kAttention = AttentionKernels<Vec8, WideScores<Vec8, uint16_t>, 4>::table();

}  // namespace kt
