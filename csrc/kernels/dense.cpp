#include "kernels/dense.h"

#include <cstring>

namespace kt {

namespace amx::inline hardware {
extern const Dense kDense;
}

const Dense& dense_of(const Tiles& tiles) {
#if defined(KT_HAVE_X86_KERNELS)
  for (const Dense* dense : {&avx2::kDense, &avx512::kDense, &amx::kDense}) {
    if (std::strcmp(dense->isa, tiles.name) == 0) return *dense;
  }
#else
  (void)tiles;
#endif
  return portable::kDense;
}

}  // namespace kt
