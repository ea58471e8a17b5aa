// Plain loops like the portable kernels, compiled with the baseline's instructions. The 48 float32 sums are enough to
// hide latencies with vectors of 16 bytes.
#include "kernels/generic/reading.h"
#include "kernels/peaks.h"

namespace kt {
namespace {

// The compiler must assume that memory was read and written here.
inline void forget(void* pointer) { __asm__ volatile("" : : "r"(pointer) : "memory"); }

int64_t bf16(int64_t rounds) {
  constexpr int kSums = 48;
  float sums[kSums] = {}, factor = 0.5f, term = 1.0f;
  forget(&factor);
  forget(&term);
  const float by = factor, plus = term;
  for (int64_t round = 0; round < rounds; ++round) {
    for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * by + plus;
  }
  forget(sums);
  return rounds * kSums * 2;
}

int64_t int8(int64_t rounds) {
  constexpr int kTerms = 1024;  // as the kernels: codes widened to int16, in the L1 cache
  int16_t a[kTerms], b[kTerms];
  for (int i = 0; i < kTerms; ++i) {
    a[i] = static_cast<int16_t>(i % 251 - 125);
    b[i] = static_cast<int16_t>(i % 13 - 6);
  }
  int32_t sum = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    forget(a);
    for (int i = 0; i < kTerms; ++i) sum += a[i] * b[i];
  }
  forget(&sum);
  return rounds * kTerms * 2;
}

struct Word {
  using Vector = uint64_t;
  static constexpr int64_t kBytes = 8;
  static Vector load(const uint8_t* from) { return *reinterpret_cast<const uint64_t*>(from); }
  static Vector mix(Vector a, Vector b) { return a ^ b; }
};

void read(const uint8_t* data, int64_t bytes, int streams) {
  uint64_t mixed = read_memory<Word>(data, bytes, streams);
  forget(&mixed);
}

}  // namespace

extern const Peaks kPortablePeaks;
const Peaks kPortablePeaks = {"portable", bf16, int8, read};

}  // namespace kt
