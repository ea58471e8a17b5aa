// CPUID leaves 1 and 7 say what the processor has, XCR0 (XGETBV) what the operating system saves:
// Intel SDM volume 1, chapters 14.3 (AVX), 15.2 (AVX-512) and 18 (AMX). Linux lends the tile registers only to a
// process that asks for them: Documentation/arch/x86/xstate.rst.
#include "base/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kt {

#if defined(__x86_64__)
namespace {

uint64_t read_xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// May refuse: the kernel is too old, a policy forbids it, or a thread's alternate signal stack has no room for the
// tiles.
bool tile_registers_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

uint32_t detect() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const bool osxsave = c & (1u << 27);
  if (!osxsave) return 0;
  constexpr uint64_t kAvxState = 0x6, kAvx512State = 0xe6, kTileState = 0x60000;
  const uint64_t xcr0 = read_xcr0();
  uint32_t found = 0;
  if ((xcr0 & kAvxState) != kAvxState) return 0;
  if (c & (1u << 12)) found |= kFma;
  if (c & (1u << 29)) found |= kF16c;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const unsigned max_subleaf = a;
  if (b & (1u << 5)) found |= kAvx2;
  if ((xcr0 & kAvx512State) != kAvx512State) return found;
  if (b & (1u << 16)) found |= kAvx512f;
  if (b & (1u << 17)) found |= kAvx512dq;
  if (b & (1u << 30)) found |= kAvx512bw;
  if (b & (1u << 31)) found |= kAvx512vl;
  if (c & (1u << 1)) found |= kAvx512vbmi;
  if (c & (1u << 11)) found |= kAvx512vnni;
  if ((xcr0 & kTileState) == kTileState && (d & (1u << 24)) && tile_registers_permitted()) {
    found |= kAmxTile;
    if (d & (1u << 22)) found |= kAmxBf16;
    if (d & (1u << 25)) found |= kAmxInt8;
  }
  if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5))) found |= kAvx512bf16;
  return found;
}

}  // namespace

uint32_t cpu_features() {
  static const uint32_t features = detect();
  return features;
}
#else
uint32_t cpu_features() { return 0; }
#endif

}  // namespace kt
