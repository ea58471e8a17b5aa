// The instruction sets built into this library, best first.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/tiles.h"

namespace kt {

// The instruction sets that this machine can run, best first; the last is always "portable".
std::vector<const Tiles*> available_tiles();

// Finds the instruction set `name`, or the best one when `name` is empty. An unknown or unavailable name is an error
// that lists the available ones.
Status find_tiles(const std::string& name, const Tiles** tiles);

}  // namespace kt
