// What a processor can do at most: loops of the arithmetic that an instruction set's kernels rest on, on registers
// alone, and loops that only read memory. `kt-runtime bench` compares the kernels with them; no kernel uses them.
#pragma once

#include <cstdint>

#include "kernels/tiles.h"

namespace kt {

struct Peaks {
  const char* isa;  // the name of its Tiles

  // Each runs `rounds` rounds and returns the operations done, two for a multiply-add.
  int64_t (*bf16)(int64_t rounds);  // what bf16 and fp8 weights are multiplied with: float32 where there is no bf16 dot
  int64_t (*int8)(int64_t rounds);  // what integer weights are multiplied with

  // Reads every byte of [data, data + bytes) once, as `streams` (1, 2 or 4) runs side by side; `bytes` is a multiple of
  // 4096, `data` aligned to a cache line. How many runs are fastest depends on the processor's prefetchers.
  void (*read)(const uint8_t* data, int64_t bytes, int streams);
};

// Those of an available instruction set.
const Peaks& peaks_of(const Tiles& tiles);

}  // namespace kt
