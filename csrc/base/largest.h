// The largest values of a row, sorted: the choice of experts, of groups of experts. `static inline`: see bf16.h.
#pragma once

#include <cstdint>

namespace kt {

// Puts `value` with its index into the sorted list of the `count` (above 0) largest values of a row, larger ones first.
// `seen`: how many values of the row came before; of equal values the one that came first is larger. NaN is never
// larger, so that `count` values or more fill the list with valid indices, whatever they are.
static inline void insert_by_size(float value, int32_t index, int64_t seen, int64_t count, float* values,
                                  int32_t* indices) {
  if (seen >= count && !(value > values[count - 1])) return;
  int64_t place = seen < count ? seen : count - 1;
  for (; place > 0 && value > values[place - 1]; --place) {
    values[place] = values[place - 1];
    indices[place] = indices[place - 1];
  }
  values[place] = value;
  indices[place] = index;
}

}  // namespace kt
