#include "kernels/dense.h"

#include <cstring>

namespace kt {

const Dense& dense_of(const Tiles& tiles) {
#if defined(KT_HAVE_X86_KERNELS)
  if (std::strcmp(tiles.name, avx2::kDense.isa) == 0) return avx2::kDense;
  // AMX's processors have AVX-512.
  if (std::strcmp(tiles.name, avx512::kDense.isa) == 0 || std::strcmp(tiles.name, "amx") == 0) return avx512::kDense;
#else
  (void)tiles;
#endif
  return portable::kDense;
}

}  // namespace kt
