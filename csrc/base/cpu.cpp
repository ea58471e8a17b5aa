// CPUID leaves 1 and 7 say what the processor has, XCR0 (XGETBV) what the operating system saves:
// Intel SDM volume 1, chapters 14.3 (AVX) and 15.2 (AVX-512).
#include "base/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kt {

#if defined(__x86_64__)
namespace {

uint64_t read_xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

uint32_t detect() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const bool osxsave = c & (1u << 27);
  if (!osxsave) return 0;
  constexpr uint64_t kAvxState = 0x6, kAvx512State = 0xe6;
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
