#include "kernels/peaks.h"

#include <cstring>

namespace kt {

extern const Peaks kPortablePeaks;
#if defined(KT_HAVE_X86_KERNELS)
extern const Peaks kAvx2Peaks;
extern const Peaks kAvx512BasePeaks, kAvx512VnniPeaks;
extern const Peaks kAvx512Peaks;
extern const Peaks kAmxPeaks;
#endif

const Peaks& peaks_of(const Tiles& tiles) {
#if defined(KT_HAVE_X86_KERNELS)
  for (const Peaks* peaks : {&kAvx2Peaks, &kAvx512BasePeaks, &kAvx512VnniPeaks, &kAvx512Peaks, &kAmxPeaks}) {
    if (std::strcmp(peaks->isa, tiles.name) == 0) return *peaks;
  }
#else
  (void)tiles;
#endif
  return kPortablePeaks;
}

}  // namespace kt
