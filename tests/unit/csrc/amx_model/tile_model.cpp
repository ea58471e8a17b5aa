// The software model of AMX's tile instructions (tile_model.h).
#include "tile_model.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kt_test::tile_model {

void abort_on_fault(Fault fault, const char* what) {
  std::fprintf(stderr, "tile model: %s: %s\n", fault == Fault::kGeneralProtection ? "#GP" : "#UD", what);
  std::abort();
}

FaultHandler& fault_handler() {
  static FaultHandler handler = abort_on_fault;
  return handler;
}

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct TileState {
  bool configured;
  uint8_t rows[kTiles];
  uint16_t row_bytes[kTiles];
  alignas(64) uint8_t data[kTiles][kRows][kRowBytes];
};

TileState& state() {
  static thread_local TileState current{};
  return current;
}

// Always false.
bool fault(Fault kind, const char* what) {
  fault_handler()(kind, what);
  return false;
}

bool reserved_bytes_clear(const uint8_t* config) {
  const auto clear = [config](int from, int to) {
    for (int i = from; i < to; ++i) {
      if (config[i]) return false;
    }
    return true;
  };
  return clear(2, 16) && clear(32, 48) && clear(56, 64);
}

bool usable(int tile, const char* instruction) {
  const TileState& s = state();
  return (s.configured && tile >= 0 && tile < kTiles && s.rows[tile]) || fault(Fault::kInvalidOpcode, instruction);
}

bool shapes_match(int c, int a, int b) {
  const auto refuse = [](const char* what) { return fault(Fault::kInvalidOpcode, what); };
  if (c == a || c == b || a == b) return refuse("TDP: tiles must differ");
  for (const int tile : {c, a, b}) {
    if (!usable(tile, "TDP: tile not configured")) return false;
    if (state().row_bytes[tile] % 4) return refuse("TDP: bytes of a row not a multiple of 4");
  }
  const TileState& s = state();
  if (s.row_bytes[c] != s.row_bytes[b] || s.rows[c] != s.rows[a] || s.row_bytes[a] / 4 != s.rows[b])
    return refuse("TDP: tile shapes do not match");
  return true;
}

// -- Without a fused multiply-add: every step is exact in double, then rounded once.

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }
uint32_t without_denormal(uint32_t bits) { return (bits & 0x7f800000u) ? bits : bits & 0x80000000u; }

// high + low is the exact value, |low| <= ulp(high) / 2. Rounds to odd in double, so that the rounding to float32 is
// the only one that counts; then flushes to zero.
uint32_t round_once(double high, double low) {
  if (low != 0) {
    int64_t bits;
    std::memcpy(&bits, &high, sizeof bits);
    if (!(bits & 1)) bits += ((high > 0) == (low > 0)) ? 1 : -1;
    std::memcpy(&high, &bits, sizeof high);
  }
  if (high > -0x1p-126 && high < 0x1p-126 && high != 0) {
    const auto scaled = static_cast<float>(high * 0x1p64);
    if (scaled > -0x1p-62f && scaled < 0x1p-62f) return high < 0 ? 0x80000000u : 0;
    return to_bits(scaled * 0x1p-64f);
  }
  const double limit = 0x1.ffffffp127;  // halfway between the largest float32 and the next power of two
  if (high >= limit || high <= -limit) return high < 0 ? 0xff800000u : 0x7f800000u;
  return to_bits(static_cast<float>(high));
}

uint32_t rounded_sum(double x, double y) {
  const double high = x + y, rest_x = high - y, rest_y = high - rest_x;
  const double low = (x - rest_x) + (y - rest_y);
  return round_once(high, high - high == 0 ? low : 0.0);
}

uint32_t plus(uint32_t x, uint32_t y) {
  x = without_denormal(x);
  y = without_denormal(y);
  if (is_nan(x) || is_nan(y)) return (is_nan(x) ? x : y) | 0x400000u;
  const double a = from_bits(x), b = from_bits(y);
  return a + b != a + b ? 0xffc00000u : rounded_sum(a, b);
}

uint32_t fused(uint32_t x, uint32_t y, uint32_t z) {
  x = without_denormal(x);
  y = without_denormal(y);
  z = without_denormal(z);
  if (is_nan(x) || is_nan(y) || is_nan(z)) return (is_nan(x) ? x : is_nan(y) ? y : z) | 0x400000u;
  const double product = static_cast<double>(from_bits(x)) * static_cast<double>(from_bits(y)), addend = from_bits(z);
  return product + addend != product + addend ? 0xffc00000u : rounded_sum(product, addend);
}

void dot_bf16_portable(TileState& s, int c, int a, int b) {
  for (int m = 0; m < s.rows[c]; ++m) {
    uint32_t sums[2 * kRows] = {}, x[kRows], y[kRows], total[kRows];
    std::memcpy(x, s.data[a][m], kRowBytes);
    for (int k = 0; k < s.rows[b]; ++k) {
      std::memcpy(y, s.data[b][k], kRowBytes);
      for (int n = 0; n < s.row_bytes[c] / 4; ++n) {
        sums[2 * n] = fused(x[k] << 16, y[n] << 16, sums[2 * n]);
        sums[2 * n + 1] = fused(x[k] & 0xffff0000u, y[n] & 0xffff0000u, sums[2 * n + 1]);
      }
    }
    std::memcpy(total, s.data[c][m], kRowBytes);
    for (int n = 0; n < s.row_bytes[c] / 4; ++n) total[n] = plus(total[n], plus(sums[2 * n], sums[2 * n + 1]));
    std::memcpy(s.data[c][m], total, kRowBytes);
  }
}

#if defined(__x86_64__)
// -- With the processor's own fused multiply-add, MXCSR set to flush denormals.

// Runs `work` with MXCSR at `mode`.
template <class Work>
void with_mxcsr(uint32_t mode, Work work) {
  uint32_t before;
  __asm__ volatile("stmxcsr %0" : "=m"(before)::"memory");
  __asm__ volatile("ldmxcsr %0" ::"m"(mode) : "memory");
  work();
  __asm__ volatile("ldmxcsr %0" ::"m"(before) : "memory");
}

struct Lanes {
  __m256 left, right;
};

// Two rows of c at a time: the additions of one wait for nothing of the other. `low` and `high`: the rows of b, even
// and odd members of its pairs as float32.
template <int kRowsAtOnce>
__attribute__((always_inline, target("avx2,fma"))) inline void dot_rows_fused(TileState* s, int c, int a, int m,
                                                                              int pairs, const Lanes* low,
                                                                              const Lanes* high) {
  Lanes even[kRowsAtOnce], odd[kRowsAtOnce];
  for (int r = 0; r < kRowsAtOnce; ++r) {
    even[r] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    odd[r] = even[r];
  }
  for (int k = 0; k < pairs; ++k) {
    for (int r = 0; r < kRowsAtOnce; ++r) {
      uint32_t x;
      std::memcpy(&x, s->data[a][m + r] + 4 * k, sizeof x);
      const __m256 x_low = _mm256_set1_ps(from_bits(x << 16)), x_high = _mm256_set1_ps(from_bits(x & 0xffff0000u));
      even[r] = {_mm256_fmadd_ps(x_low, low[k].left, even[r].left),
                 _mm256_fmadd_ps(x_low, low[k].right, even[r].right)};
      odd[r] = {_mm256_fmadd_ps(x_high, high[k].left, odd[r].left),
                _mm256_fmadd_ps(x_high, high[k].right, odd[r].right)};
    }
  }
  for (int r = 0; r < kRowsAtOnce; ++r) {
    auto* total = reinterpret_cast<float*>(s->data[c][m + r]);
    const __m256 left = _mm256_add_ps(even[r].left, odd[r].left), right = _mm256_add_ps(even[r].right, odd[r].right);
    _mm256_storeu_ps(total, _mm256_add_ps(_mm256_loadu_ps(total), left));
    _mm256_storeu_ps(total + 8, _mm256_add_ps(_mm256_loadu_ps(total + 8), right));
  }
}

__attribute__((target("avx2,fma"))) void dot_bf16_fused(TileState* s, int c, int a, int b) {
  const int rows = s->rows[c], pairs = s->rows[b];
  Lanes low[kRows], high[kRows];
  const __m256i upper_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const auto* from = reinterpret_cast<const __m256i*>(s->data[b]);
  for (int k = 0; k < pairs; ++k) {
    const __m256i left = _mm256_load_si256(from + 2 * k), right = _mm256_load_si256(from + 2 * k + 1);
    low[k] = {_mm256_castsi256_ps(_mm256_slli_epi32(left, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(right, 16))};
    high[k] = {_mm256_castsi256_ps(_mm256_and_si256(left, upper_half)),
               _mm256_castsi256_ps(_mm256_and_si256(right, upper_half))};
  }
  int m = 0;
  for (; m + 2 <= rows; m += 2) dot_rows_fused<2>(s, c, a, m, pairs, low, high);
  if (m < rows) dot_rows_fused<1>(s, c, a, m, pairs, low, high);
  _mm256_zeroupper();  // a compiler adds it where it optimizes; SSE instructions are slow without
}
#endif

template <bool kSignedA, bool kSignedB>
void dot_int8(int c, int a, int b) {
  if (!shapes_match(c, a, b)) return;
  TileState& s = state();
  for (int m = 0; m < s.rows[c]; ++m) {
    uint32_t total[kRows];
    std::memcpy(total, s.data[c][m], kRowBytes);
    for (int k = 0; k < s.rows[b]; ++k) {
      for (int n = 0; n < s.row_bytes[c] / 4; ++n) {
        int32_t sum = 0;
        for (int i = 0; i < 4; ++i) {
          const uint8_t x = s.data[a][m][4 * k + i], y = s.data[b][k][4 * n + i];
          sum += (kSignedA ? static_cast<int8_t>(x) : x) * (kSignedB ? static_cast<int8_t>(y) : y);
        }
        total[n] += static_cast<uint32_t>(sum);
      }
    }
    std::memcpy(s.data[c][m], total, kRowBytes);
  }
}

}  // namespace

// ---- Configuration

void release() { state() = TileState{}; }

void load_config(const void* memory) {
  uint8_t config[64];
  std::memcpy(config, memory, sizeof config);
  release();
  if (config[0] == 0) return;
  const auto refuse = [](const char* what) { fault(Fault::kGeneralProtection, what); };
  if (config[0] != 1) return refuse("LDTILECFG: unknown palette");
  if (config[1] != 0) return refuse("LDTILECFG: a restart row, which the model does not know");
  if (!reserved_bytes_clear(config)) return refuse("LDTILECFG: reserved byte set");
  TileState made{};
  made.configured = true;
  for (int tile = 0; tile < kTiles; ++tile) {
    std::memcpy(&made.row_bytes[tile], config + 16 + 2 * tile, 2);
    made.rows[tile] = config[48 + tile];
    if (made.row_bytes[tile] > kRowBytes) return refuse("LDTILECFG: more than 64 bytes a row");
    if (made.rows[tile] > kRows) return refuse("LDTILECFG: more than 16 rows");
    if ((made.rows[tile] == 0) != (made.row_bytes[tile] == 0)) return refuse("LDTILECFG: rows or bytes are zero");
  }
  state() = made;
}

// ---- Data movement

void load(int tile, const void* base, ptrdiff_t stride) {
  if (!usable(tile, "TILELOADD: tile not configured")) return;
  TileState& s = state();
  std::memset(s.data[tile], 0, sizeof s.data[tile]);
  for (int row = 0; row < s.rows[tile]; ++row)
    std::memcpy(s.data[tile][row], static_cast<const uint8_t*>(base) + row * stride, s.row_bytes[tile]);
}

void store(int tile, void* base, ptrdiff_t stride) {
  if (!usable(tile, "TILESTORED: tile not configured")) return;
  const TileState& s = state();
  for (int row = 0; row < s.rows[tile]; ++row)
    std::memcpy(static_cast<uint8_t*>(base) + row * stride, s.data[tile][row], s.row_bytes[tile]);
}

void zero(int tile) {
  if (usable(tile, "TILEZERO: tile not configured")) std::memset(state().data[tile], 0, sizeof state().data[tile]);
}

// ---- Products

bool& use_fused() {
  static bool use = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
  }();
  return use;
}

void dot_s8u8(int c, int a, int b) { dot_int8<true, false>(c, a, b); }
void dot_s8s8(int c, int a, int b) { dot_int8<true, true>(c, a, b); }

void dot_bf16(int c, int a, int b) {
  if (!shapes_match(c, a, b)) return;
#if defined(__x86_64__)
  constexpr uint32_t kDefaultMode = 0x1f80, kFlushDenormals = 0x9fc0;  // exceptions masked, round to nearest even
  if (use_fused())
    with_mxcsr(kFlushDenormals, [=] { dot_bf16_fused(&state(), c, a, b); });
  else
    with_mxcsr(kDefaultMode, [=] { dot_bf16_portable(state(), c, a, b); });
#else
  dot_bf16_portable(state(), c, a, b);
#endif
}

}  // namespace kt_test::tile_model
