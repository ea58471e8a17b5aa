#include "kernels/attention.h"

#include <cstring>

namespace kt {

const Attention& attention_of(const Tiles& tiles) {
#if defined(KT_HAVE_X86_KERNELS)
  if (std::strcmp(tiles.name, "avx2") == 0) return avx2::kAttention;
  if (std::strcmp(tiles.name, "avx512") == 0 || std::strcmp(tiles.name, "amx") == 0) return avx512::kAttention;
#else
  (void)tiles;
#endif
  return portable::kAttention;
}

}  // namespace kt
