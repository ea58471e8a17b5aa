// AVX-512. bf16 activations: vdpbf16ps takes a pair of columns for 16 rows of weights, straight from a packed bf16
// line; fp8 lines become two bf16 lines. float32 activations: fma on widened weights, exact products.
//
// Register tile 12 x 32: 24 accumulators, two vectors of weights, one activation; 6 x 64 and flatter for few rows of
// bf16. Per pair of columns 24 vdpbf16ps, 12 broadcasts, 2 loads: one vdpbf16ps a cycle. Layout: kernels/layout.h.
#include "kernels/avx2/vector.h"
#include "kernels/avx512/kernels.h"
#include "kernels/avx512/products/float_tile.h"
#include "kernels/generic/fp8_bytes.h"

namespace kt {
namespace {

// Lines unchanged: 16 rows x a pair of bf16.
template <class V>
struct PairLines {
  static constexpr int kColumns = 2, kUnitLines = 1, kSums = V::kSums, kBlocks = 4, kFewRows = V::kFewRows;
  using Group = NoGroup;
  static Group group(const Parts&, const uint8_t*, int64_t, int) { return {}; }
  static __m512bh weights(const uint8_t* line, int, int, Group) { return (__m512bh)_mm512_loadu_si512(line); }
};

struct PairTile : Vec16 {
  using Element = uint16_t;
  using Unpacked = PairLines<PairTile>;
  static constexpr int kDepth = 2, kTileRows = 12, kFewRows = 12, kDecodeRows = 12, kSums = 24, kDecodeSums = 16;
  static constexpr int64_t kPanelBlocks = 2, kPanelColumns = 256, kAheadBytes = 4096;

  static __m512bh broadcast(const uint16_t* from) {
    int pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Reg dot(__m512bh a, __m512bh b, Reg sum) { return _mm512_dpbf16_ps(sum, a, b); }
};

inline __m512i look_up(__m512i codes, const uint8_t* table) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
}

// Two bf16 lines from an fp8 line: interleaving the low bytes with the high ones puts them in order.
template <class V>
struct Fp8PairLines {
  static constexpr int kColumns = 4, kUnitLines = 1, kSums = V::kDecodeSums, kBlocks = 4, kFewRows = V::kDecodeRows;
  using Group = NoGroup;
  static Group group(const Parts&, const uint8_t*, int64_t, int) { return {}; }
  static __m512bh weights(const uint8_t* line, int step, int, Group) {
    constexpr int kSignOrValue = 0xea;  // (a & b) | c
    const __m512i codes = _mm512_loadu_si512(line), low = look_up(codes, kFp8Bytes.low);
    const __m512i high = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(static_cast<char>(0x80)),
                                                   look_up(codes, kFp8Bytes.high), kSignOrValue);
    return (__m512bh)(step == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high));
  }
};

}  // namespace

void avx512::multiply(const PackedProduct<float>& p) { multiply_any<FloatTile, Vec8>(p); }

void avx512::multiply_bf16(const PackedProduct<uint16_t>& p) {
  if (p.weights.shape.format.encoding == Encoding::kBf16) return multiply_source<PairTile, PairLines<PairTile>>(p);
  multiply_source<PairTile, Fp8PairLines<PairTile>>(p);
}

}  // namespace kt
