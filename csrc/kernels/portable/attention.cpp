// Attention for any processor. Register tile: 4 rows x 2 vectors of sums.
#include "kernels/attention.h"

#include "kernels/generic/rows/attention_blocks.h"
#include "kernels/portable/vector.h"

namespace kt {

const Attention portable::kAttention = AttentionKernels<Vec4, WideScores<Vec4, uint16_t>, 4>::table();

}  // namespace kt
