// Upper limits of a processor: loops of the arithmetic of an instruction set's kernels on registers alone, and loops
// that only read memory. `kt-runtime bench` compares the kernels with these limits; no kernel uses the loops.
#pragma once

#include <cstdint>

#include "kernels/tiles.h"

namespace kt {

struct Peaks {
  const char* isa;  // the name of its Tiles

  // Each runs `rounds` rounds and returns the operations done, two for a multiply-add.
  int64_t (*bf16)(int64_t rounds);  // the arithmetic of bf16 and fp8 weights: float32 without a bf16 dot product
  int64_t (*int8)(int64_t rounds);  // the arithmetic of integer weights

  // Reads every byte of [data, data + bytes) once, as `streams` (1, 2 or 4) runs side by side; `bytes` is a multiple of
  // 4096, `data` aligned to a cache line. How many runs are fastest depends on the processor's prefetchers.
  void (*read)(const uint8_t* data, int64_t bytes, int streams);
};

// The peaks of an available instruction set.
const Peaks& peaks_of(const Tiles& tiles);

}  // namespace kt
