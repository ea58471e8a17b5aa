// bf16: TDPBF16PS, int8: TDPBSUD, on four sums (tiles 0 to 3) of two by two operands (4 and 5 against 6 and 7): four
// products of 16 x 16 x 64 bytes a round; the other three products (16 cycles each) hide a sum's latency (52 cycles).
// base/cpu.h requests the permission for tiles when it reads the processor's features.
#include "kernels/amx/tile_registers.h"
#include "kernels/generic/peak512.h"
#include "kernels/peaks.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

// Operands of zeros: their values change no rate.
template <class Dot>
void run(int64_t rounds) {
  alignas(64) static constexpr uint8_t kZeros[16 * kLineBytes] = {};
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, kLineBytes);
  const TileSession session(config);
  zero_sums<2, 2>();
  load_tile<4>(kZeros, kLineBytes);
  load_tile<5>(kZeros, kLineBytes);
  load_tile<6>(kZeros, kLineBytes);
  load_tile<7>(kZeros, kLineBytes);
  for (int64_t round = 0; round < rounds; ++round) {
    Dot::template run<0, 4, 6>();
    Dot::template run<1, 4, 7>();
    Dot::template run<2, 5, 6>();
    Dot::template run<3, 5, 7>();
  }
}

int64_t bf16(int64_t rounds) {
  run<DotBf16>(rounds);
  return rounds * 4 * (16 * 16 * 32) * 2;
}

int64_t int8(int64_t rounds) {
  run<DotS8U8>(rounds);
  return rounds * 4 * (16 * 16 * 64) * 2;
}

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD

namespace kt {

extern const Peaks kAmxPeaks;
const Peaks kAmxPeaks = {amx::kName, amx::bf16, amx::int8, read_avx512};

}  // namespace kt
