// Instruction sets that the processor has and whose registers the operating system saves.
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
  kAvx512vnni = 1u << 8,
  kAvx512vbmi = 1u << 9,
  kAmxTile = 1u << 10,
  kAmxBf16 = 1u << 11,
  kAmxInt8 = 1u << 12,
};

// Bits of CpuFeature. Zero on anything but x86-64. The AMX bits are set only where the operating system, asked once for
// this process (arch_prctl(ARCH_REQ_XCOMP_PERM)), permits the tile registers.
uint32_t cpu_features();

}  // namespace kt
