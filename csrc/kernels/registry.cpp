#include "kernels/registry.h"

#include "base/cpu.h"

namespace kt {

extern const Tiles kPortableTiles;
#if defined(KT_HAVE_X86_KERNELS)
extern const Tiles kAvx2Tiles;
extern const Tiles kAvx512BaseTiles, kAvx512VnniTiles;
extern const Tiles kAvx512Tiles;
namespace amx::inline hardware {
extern const Tiles kTiles;
}
#endif

namespace {

const Tiles* const kBuiltIn[] = {
#if defined(KT_HAVE_X86_KERNELS)
    &amx::kTiles,    &kAvx512Tiles, &kAvx512VnniTiles, &kAvx512BaseTiles, &kAvx2Tiles,
#endif
    &kPortableTiles,
};

}  // namespace

std::vector<const Tiles*> available_tiles() {
  std::vector<const Tiles*> available;
  for (const Tiles* tiles : kBuiltIn) {
    if ((tiles->required & ~cpu_features()) == 0) available.push_back(tiles);
  }
  return available;
}

Status find_tiles(const std::string& name, const Tiles** tiles) {
  const auto available = available_tiles();
  std::string names;
  for (const Tiles* candidate : available) {
    if (name.empty() || name == candidate->name) {
      *tiles = candidate;
      return {};
    }
    names += (names.empty() ? "" : ", ") + std::string(candidate->name);
  }
  bool built_in = false;
  for (const Tiles* candidate : kBuiltIn) built_in |= name == candidate->name;
  return {StatusCode::kUnknownName, "instruction set '" + name + "' is " +
                                        (built_in ? "not available on this machine" : "unknown") +
                                        "; available: " + names};
}

}  // namespace kt
