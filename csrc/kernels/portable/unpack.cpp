// Packed weights to row-major bf16 in vectors of four floats. The reference for the others.
#include "kernels/generic/unpack_bf16.h"
#include "kernels/portable/kernels.h"
#include "kernels/portable/vector.h"

namespace kt {

void portable::unpack(const UnpackedRows& u) { unpack_to_bf16<Vec4>(u); }

}  // namespace kt
