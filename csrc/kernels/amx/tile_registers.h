// The eight tile registers, as these kernels use them, and the one inner loop of all of them.
//
//   tiles 0..3   C[r][b] = tile 2 * r + b     float32 or int32 sums
//   tiles 4, 5   A[r]                         rows x (pairs of bf16 or quads of int8) along the inner index
//   tiles 6, 7   B[b]                         pairs or quads along the inner index x 16 columns
//
// Rate of the full 2 x 2: 4 products of 16 cycles for 4 tile loads of about 8, so that products bound it; each of the
// four chains waits 52 cycles for its last product, less than the 64 of a step. (Intel 64 and IA-32 Architectures
// Optimization Reference Manual, chapter 20.)
//
// The instructions are written as assembler rather than through GCC's intrinsics, which take literal tile numbers only
// and do not tell the compiler that a tile load reads memory: plain stores to its source could be delayed past it.
//
// With KT_AMX_MODEL the same kernels run on a software model of the registers (tests only), on any processor.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/amx/kernels.h"
#if defined(KT_AMX_MODEL)
#include "tile_model.h"
#endif

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

#if defined(KT_AMX_MODEL)

inline void load_config(const void* config) { kt_test::tile_model::load_config(config); }
inline void release_tiles() { kt_test::tile_model::release(); }

template <int kTile>
inline void zero_tile() {
  kt_test::tile_model::zero(kTile);
}
template <int kTile>
inline void load_tile(const uint8_t* base, int64_t stride) {
  kt_test::tile_model::load(kTile, base, stride);
}
template <int kTile>
inline void store_tile(void* base, int64_t stride) {
  kt_test::tile_model::store(kTile, base, stride);
}

struct DotBf16 {
  template <int kC, int kA, int kB>
  static void run() {
    kt_test::tile_model::dot_bf16(kC, kA, kB);
  }
};
struct DotS8U8 {
  template <int kC, int kA, int kB>
  static void run() {
    kt_test::tile_model::dot_s8u8(kC, kA, kB);
  }
};
struct DotS8S8 {
  template <int kC, int kA, int kB>
  static void run() {
    kt_test::tile_model::dot_s8s8(kC, kA, kB);
  }
};

#else

inline void load_config(const void* config) { __asm__ volatile("ldtilecfg (%0)" ::"r"(config) : "memory"); }
inline void release_tiles() { __asm__ volatile("tilerelease" ::: "memory"); }

template <int kTile>
inline void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void load_tile(const uint8_t* base, int64_t stride) {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(base), "r"(stride) : "memory");
}
template <int kTile>
inline void store_tile(void* base, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(base), "r"(stride) : "memory");
}

struct DotBf16 {  // bf16 pairs, float32 sums
  template <int kC, int kA, int kB>
  static void run() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};
struct DotS8U8 {  // signed times unsigned bytes, int32 sums
  template <int kC, int kA, int kB>
  static void run() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};
struct DotS8S8 {  // signed bytes, int32 sums
  template <int kC, int kA, int kB>
  static void run() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

#endif

// Rows and bytes a row of each register: the operand of LDTILECFG (palette 1).
class TileConfig {
 public:
  TileConfig() { bytes_[0] = 1; }
  void set(int tile, int64_t rows, int64_t row_bytes) {
    bytes_[16 + 2 * tile] = static_cast<uint8_t>(row_bytes);
    bytes_[48 + tile] = static_cast<uint8_t>(rows);
  }
  const void* bytes() const { return bytes_; }

 private:
  alignas(64) uint8_t bytes_[64] = {};
};

// The registers of this thread, from here to the end of the scope. Released after each call: tile data in use would
// make every task switch save 8 KiB.
class TileSession {
 public:
  TileSession() = default;
  explicit TileSession(const TileConfig& config) { configure(config); }
  ~TileSession() { release_tiles(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
  void configure(const TileConfig& config) { load_config(config.bytes()); }
};

// Rows of a call in tiles of equal height, so that one configuration serves all: tile t holds rows [start, start +
// height).
// The last may begin among rows of the one before it, whose results need not be given again.
struct RowTiles {
  explicit RowTiles(int64_t num_rows)
      : rows(num_rows), count((num_rows + 15) / 16), height((num_rows + count - 1) / count) {}
  int64_t start(int64_t tile) const { return tile * height < rows - height ? tile * height : rows - height; }
  int64_t repeated(int64_t tile) const { return tile * height - start(tile); }  // rows that an earlier tile holds too

  const int64_t rows, count, height;
};

// For activations in A, `step_bytes` of a row at a time, and packed lines of weights in B.
inline TileConfig config_of(const RowTiles& rows, int64_t step_bytes) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, rows.height, kLineBytes);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, rows.height, step_bytes);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, step_bytes / 4, kLineBytes);
  return config;
}

// The same for one tile of rows against up to four blocks: C[b] = tile b, A = tile 4, B = tiles 5, 6, 7 in turn.
inline TileConfig config_of_few(int64_t rows, int64_t step_bytes) {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, rows, kLineBytes);
  config.set(4, rows, step_bytes);
  for (int tile = 5; tile < 8; ++tile) config.set(tile, step_bytes / 4, kLineBytes);
  return config;
}

// Tiles along the inner index: rows of one are `stride` bytes apart, tiles `step` bytes.
struct TileRun {
  const uint8_t* at;
  int64_t stride, step;
};

// How far ahead of a stream of weights to prefetch: memory's latency times its bandwidth, some times over.
constexpr int64_t kStreamAhead = 2048;

// How far ahead of several blocks that are read side by side: beyond their ends lie the next ones, not what follows in
// memory, which is read already.
struct Ahead {
  int64_t block_bytes, blocks;
  int64_t until_end;  // from the first line of a block

  int64_t distance(int64_t offset) const {
    return kStreamAhead + (offset + kStreamAhead < until_end ? 0 : (blocks - 1) * block_bytes);
  }
};

// What `accumulate` prefetches with every step.
struct NoFetch {
  void step() {}
};

// Weights that later calls of it will read, of four blocks: some lines of each a step, to the second-level cache.
struct Fetch {
  static constexpr int kBlocks = 4;

  void step() {
    for (int64_t i = 0; i < lines; ++i, at += kLineBytes) {
      for (int b = 0; b < kBlocks; ++b) __builtin_prefetch(at + b * stride, 0, 2);
    }
  }

  const uint8_t* at = nullptr;
  int64_t stride = 0, lines = 0;
};

// C[r][b] += A[r] * B[b] over `steps` tiles of the inner index.
template <class Dot, int kR, int kB, class Fetching = NoFetch>
inline void accumulate(const TileRun* a, const TileRun* b, int64_t steps, Fetching& fetch) {
  const uint8_t *a0 = a[0].at, *a1 = a[kR - 1].at, *b0 = b[0].at, *b1 = b[kB - 1].at;
  for (int64_t step = 0; step < steps; ++step) {
    fetch.step();
    load_tile<6>(b0, b[0].stride);
    load_tile<4>(a0, a[0].stride);
    Dot::template run<0, 4, 6>();
    if constexpr (kB == 2) {
      load_tile<7>(b1, b[1].stride);
      Dot::template run<1, 4, 7>();
      b1 += b[1].step;
    }
    if constexpr (kR == 2) {
      load_tile<5>(a1, a[1].stride);
      Dot::template run<2, 5, 6>();
      if constexpr (kB == 2) Dot::template run<3, 5, 7>();
      a1 += a[1].step;
    }
    a0 += a[0].step;
    b0 += b[0].step;
  }
}

template <class Dot, int kR, int kB>
inline void accumulate(const TileRun* a, const TileRun* b, int64_t steps) {
  NoFetch none;
  accumulate<Dot, kR, kB>(a, b, steps, none);
}

// C[b] += A * B[b] over `steps` tiles of the inner index, with the registers of config_of_few. Several blocks side by
// side, as one stream of weights is not enough to keep memory busy. Fetching: Ahead, where B are weights read for the
// first time, or NoFetch.
template <class Dot, int kB, class Fetching>
inline void accumulate_few(TileRun a, const TileRun* b, int64_t steps, const Fetching& fetch) {
  const uint8_t* at[kB];
  for (int i = 0; i < kB; ++i) at[i] = b[i].at;
  const int64_t stride = b[0].stride, step_bytes = b[0].step;
  for (int64_t step = 0; step < steps; ++step) {
    if constexpr (!std::is_same_v<Fetching, NoFetch>) {
      const int64_t distance = fetch.distance(step * step_bytes);
      for (int64_t line = 0; line < step_bytes; line += kLineBytes) {
        for (int i = 0; i < kB; ++i) __builtin_prefetch(at[i] + distance + line);
      }
    }
    load_tile<4>(a.at, a.stride);
    const auto multiply = [&]<int kTile, int kBlock>() {
      load_tile<kTile>(at[kBlock], stride);
      Dot::template run<kBlock, 4, kTile>();
      at[kBlock] += step_bytes;
    };
    multiply.template operator()<5, 0>();
    if constexpr (kB > 1) multiply.template operator()<6, 1>();
    if constexpr (kB > 2) multiply.template operator()<7, 2>();
    if constexpr (kB > 3) multiply.template operator()<5, 3>();
    a.at += a.step;
  }
}

// each.template operator()<tile>() for the C[b] in use.
template <int kB, class Each>
inline void for_each_few(Each each) {
  each.template operator()<0>();
  if constexpr (kB > 1) each.template operator()<1>();
  if constexpr (kB > 2) each.template operator()<2>();
  if constexpr (kB > 3) each.template operator()<3>();
}

// work.template operator()<blocks>(block) for blocks [0, count), four at a time.
template <class Work>
inline void by_four(int64_t count, Work work) {
  int64_t block = 0;
  for (; count - block >= 4; block += 4) work.template operator()<4>(block);
  if (count - block == 3) work.template operator()<3>(block);
  if (count - block == 2) work.template operator()<2>(block);
  if (count - block == 1) work.template operator()<1>(block);
}

// each.template operator()<tile>(r, b) for the C[r][b] in use.
template <int kR, int kB, class Each>
inline void for_each_sum(Each each) {
  each.template operator()<0>(0, 0);
  if constexpr (kB == 2) each.template operator()<1>(0, 1);
  if constexpr (kR == 2) each.template operator()<2>(1, 0);
  if constexpr (kR == 2 && kB == 2) each.template operator()<3>(1, 1);
}

template <int kR, int kB>
inline void zero_sums() {
  for_each_sum<kR, kB>([]<int kTile>(int, int) { zero_tile<kTile>(); });
}

// work.template operator()<R, B>() for the tiles and blocks that are left.
template <class Work>
inline void with_blocking(int64_t row_tiles, int64_t blocks, Work work) {
  if (row_tiles > 1 && blocks > 1)
    work.template operator()<2, 2>();
  else if (row_tiles > 1)
    work.template operator()<2, 1>();
  else if (blocks > 1)
    work.template operator()<1, 2>();
  else
    work.template operator()<1, 1>();
}

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
