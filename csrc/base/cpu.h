// Instruction sets that both the processor has and the operating system saves the registers of.
#pragma once

#include <cstdint>

namespace kt {

enum CpuFeature : uint32_t {
  kAvx2 = 1u << 0,
  kFma = 1u << 1,
  kF16c = 1u << 2,
  kAvx512f = 1u << 3,
  kAvx512bw = 1u << 4,
  kAvx512vl = 1u << 5,
  kAvx512dq = 1u << 6,
  kAvx512bf16 = 1u << 7,
};

// Bits of CpuFeature. Zero on anything but x86-64.
uint32_t cpu_features();

}  // namespace kt
