// Products of activations with packed weights in float arithmetic, once for all instruction sets.
//
// Arithmetic, the same in every path: by group of columns a chain sum = dot(a[k], code[k] - zero, sum) in the order of
// k from +0; total = fma(group_scale, sum, total); result = total * row_scale. A factor that the format lacks is left
// out.
//
// Few rows (one register tile): weights are decoded in registers in the inner loop, each once; several blocks at a
// time, so that there are enough independent chains. Bound by memory: the loop prefetches ahead of its streams.
// Many rows: a panel (some blocks x some columns) is unpacked to the stack once, then a register tile iterates over all
// rows; partial sums lie in c between panels. Meanwhile the packed bytes of the next panel are prefetched.
//
// Units of nibbles (nibbles.h), which bf16 activations never meet here, are unpacked with their scales, and multiplied
// as they are: one chain in the order of k.
//
// V is an ISA's vector of floats (portable/vector.h) and in addition
//   Element, kDepth      type of the activations, columns per dot (1, or 2: a pair of bf16)
//   Unpacked             the source (decoders.h) of an unpacked panel
//   kTileRows, kSums     rows of a register tile at most, accumulators at most (kDecodeSums: while decoding)
//   kFewRows, kDecodeRows        rows up to which weights are decoded in registers: bf16, others
//   kPanelBlocks, kPanelColumns  of an unpacked panel; kAheadBytes: how far few rows prefetch
//   broadcast(a), dot(broadcast, weights, sum)
//
// Include only in a kernel's own translation unit, with V in an unnamed namespace: then nothing compiled with that
// unit's flags can be linked into others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/generic/decoders.h"
#include "kernels/generic/prefetch.h"
#include "kernels/generic/unpack.h"
#include "kernels/layout.h"
#include "kernels/tiles.h"

namespace kt {
namespace {

template <class V>
struct Job {
  explicit Job(const PackedProduct<typename V::Element>& product) : p(product), parts(product.weights.shape) {}
  const uint8_t* block(int64_t index) const { return p.weights.data + index * parts.block_bytes; }

  const PackedProduct<typename V::Element>& p;
  const Parts parts;
};

// Columns [first_col, end_col) of some blocks for some rows. first_col is a multiple of the format's group.
struct Part {
  int64_t row, block, first_col, end_col;
  const uint8_t* lines;  // of first_col in the first block
  int64_t stride;        // from block to block
};

// Adds finished sums, times the scales of group g, to the totals of earlier groups in c; after the last column,
// multiplies by the scales of the rows.
template <class V, int kRows, int kVectors>
__attribute__((noinline)) void finish(const Job<V>& job, const Part& part, int64_t g, bool last,
                                      const typename V::Reg (&sums)[kRows][kVectors]) {
  constexpr int kPerBlock = 16 / V::kLanes;
  const int64_t ldc = job.p.c.ld;
  const uint8_t* block = job.block(part.block);
  float* c = job.p.c.row(part.row) + part.block * kBlockRows;
  const bool grouped = job.parts.group != 0, row_scaled = last && job.parts.row_scaled;
  for (int v = 0; v < kVectors; ++v, c += V::kLanes) {
    if (v > 0 && v % kPerBlock == 0) block += job.parts.block_bytes;
    typename V::Reg sum[kRows];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) sum[m] = sums[m][v];
    if (grouped) {
      const typename V::Reg scale = group_scales<V>(job.parts, block, g, v % kPerBlock);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) sum[m] = V::fma(scale, sum[m], g ? V::load(c + m * ldc) : V::zero());
    }
    if (row_scaled) {
      const typename V::Reg scale = V::load(reinterpret_cast<const float*>(block) + v % kPerBlock * V::kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) sum[m] = sum[m] * scale;
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) V::store(c + m * ldc, sum[m]);
  }
}

// Rows of activations, three to a base register: base, base + ld, base + 2 * ld are forms of one address.
template <class V, int kRows>
struct RowPointers {
  static constexpr int kBases = (kRows + 2) / 3;

  explicit RowPointers(Rows<const typename V::Element> a) : ld(a.ld * static_cast<int64_t>(sizeof *a.data)) {
    for (int i = 0; i < kBases; ++i) {
      base[i] = reinterpret_cast<const char*>(a.row(3 * i));
      hide(base[i]);
    }
  }
  const typename V::Element* at(int m, int step) const {
    constexpr auto kStepBytes = static_cast<int64_t>(V::kDepth * sizeof(typename V::Element));
    return reinterpret_cast<const typename V::Element*>(base[m / 3] + m % 3 * ld + step * kStepBytes);
  }
  void advance(int64_t columns) {
#pragma GCC unroll 16
    for (int i = 0; i < kBases; ++i) base[i] += columns * static_cast<int64_t>(sizeof(typename V::Element));
  }

 private:
  // Otherwise the compiler keeps one address for every row and step, more than there are registers.
  static void hide(const char*& pointer) { __asm__("" : "+r"(pointer)); }

  const char* base[kBases];
  int64_t ld;
};

// One unit of lines. Two steps share what they decode; with few rows a vector of weights at a time takes both steps.
template <class V, class Source, int kRows, int kBlocks>
inline void unit(const RowPointers<V, kRows>& a, const uint8_t* lines, int64_t stride,
                 const typename Source::Group* group, typename V::Reg (&sum)[kRows][kBlocks * 16 / V::kLanes]) {
  constexpr int kPerBlock = 16 / V::kLanes, kVectors = kBlocks * kPerBlock, kLineSteps = Source::kColumns / V::kDepth;
  constexpr int kSteps = Source::kUnitLines * kLineSteps, kAtOnce = kRows < kVectors && kSteps % 2 == 0 ? 2 : 1;
  const auto weights = [&](int step, int v) {
    return Source::weights(lines + v / kPerBlock * stride + step / kLineSteps * kLineBytes, step % kLineSteps,
                           v % kPerBlock, group[v]);
  };
#pragma GCC unroll 16
  for (int step = 0; step < kSteps; step += kAtOnce) {
    if constexpr (kRows < kVectors) {
      decltype(V::broadcast(a.at(0, 0))) x[kAtOnce][kRows];
#pragma GCC unroll 16
      for (int i = 0; i < kAtOnce; ++i) {
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) x[i][m] = V::broadcast(a.at(m, step + i));
      }
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 16
        for (int i = 0; i < kAtOnce; ++i) {
          const auto w = weights(step + i, v);
#pragma GCC unroll 16
          for (int m = 0; m < kRows; ++m) sum[m][v] = V::dot(x[i][m], w, sum[m][v]);
        }
      }
    } else {
      decltype(weights(0, 0)) w[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) w[v] = weights(step, v);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const auto x = V::broadcast(a.at(m, step));
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sum[m][v] = V::dot(x, w[v], sum[m][v]);
      }
    }
  }
}

template <class V, class Source, int kRows, int kBlocks>
__attribute__((noinline)) void tile(const Job<V>& job, const Part& part, PrefetchCursor& prefetch) {
  constexpr int kPerBlock = 16 / V::kLanes, kVectors = kBlocks * kPerBlock;
  constexpr int64_t kUnitColumns = Source::kColumns * Source::kUnitLines;
  const int64_t group_cols = job.parts.group, stride = part.stride, end_col = part.end_col;
  RowPointers<V, kRows> a(job.p.a.from(part.row, part.first_col));
  const uint8_t* lines = part.lines;
  PrefetchCursor ahead = prefetch;
  int64_t g = group_cols ? part.first_col / group_cols : 0;
  for (int64_t col = part.first_col; col < end_col; ++g) {
    const int64_t end = group_cols ? std::min(col + group_cols, end_col) : end_col;
    const float* c = job.p.c.row(part.row) + part.block * kBlockRows;
    const bool resume = !group_cols && col > 0;
    typename V::Reg sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[m][v] = resume ? V::load(c + m * job.p.c.ld + v * V::kLanes) : V::zero();
    }
    typename Source::Group group[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
      group[v] = Source::group(job.parts, job.block(part.block + v / kPerBlock), g, v % kPerBlock);
    for (; col < end; col += kUnitColumns) {
      unit<V, Source, kRows, kBlocks>(a, lines, stride, group, sum);
      a.advance(kUnitColumns);
      lines += Source::kUnitLines * kLineBytes;
      ahead.fetch<kBlocks>();
    }
    typename V::Reg sums[kRows][kVectors];  // a copy: the accumulators must not have an address
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[m][v] = sum[m][v];
    }
    finish<V, kRows, kVectors>(job, part, g, end == job.parts.cols, sums);
  }
  prefetch = ahead;
}

template <class V, class Source, int kRows>
constexpr int tile_blocks() {
  constexpr int kFit = std::min(Source::kBlocks, Source::kSums / (kRows * (16 / V::kLanes)));
  return kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
}

// Blocks [part.block, end_block) of an unpacked panel for kRows rows.
template <class V, int kRows>
void panel_tiles(const Job<V>& job, Part part, int64_t end_block, PrefetchCursor& prefetch) {
  using Source = typename V::Unpacked;
  constexpr int kBlocks = std::min<int>(tile_blocks<V, Source, kRows>(), V::kPanelBlocks);
  for (; part.block + kBlocks <= end_block; part.block += kBlocks, part.lines += kBlocks * part.stride)
    tile<V, Source, kRows, kBlocks>(job, part, prefetch);
  if constexpr (kBlocks > 1) {
    for (; part.block < end_block; ++part.block, part.lines += part.stride)
      tile<V, Source, kRows, 1>(job, part, prefetch);
  }
}

// All columns of packed blocks for kRows rows: prefetches ahead, and on into the blocks of the next tile.
template <class V, class Source, int kRows, int kBlocks>
void stream_blocks(const Job<V>& job, Part& part) {
  constexpr int64_t kAhead = V::kAheadBytes / kBlocks / kLineBytes;
  for (; part.block + kBlocks <= job.p.weights.blocks; part.block += kBlocks, part.lines += kBlocks * part.stride) {
    PrefetchCursor prefetch = prefetch_ahead(job.p.weights.shape, part.lines, kBlocks, kAhead, 0);
    const bool more = part.block + 2 * kBlocks <= job.p.weights.blocks;
    if (!more) prefetch.left = prefetch.until_jump;
    tile<V, Source, kRows, kBlocks>(job, part, prefetch);
  }
}

template <class V, class Source, int kRows>
void stream_tiles(const Job<V>& job, Part part) {
  constexpr int kBlocks = tile_blocks<V, Source, kRows>();
  stream_blocks<V, Source, kRows, kBlocks>(job, part);
  if constexpr (kBlocks > 1) stream_blocks<V, Source, kRows, 1>(job, part);
}

template <class V, class Source, int... kRows>
void stream_rows(int64_t rows, const Job<V>& job, const Part& part, std::integer_sequence<int, kRows...>) {
  static constexpr void (*kTiles[])(const Job<V>&, Part) = {stream_tiles<V, Source, kRows + 1>...};
  kTiles[rows - 1](job, part);
}

// More rows than one tile has, in equal shares, are at least half a tile each.
template <class V>
constexpr int kLeastRows = std::max(1, V::kTileRows / 2);

template <class V, int... kMore>
void panel_rows(int64_t rows, const Job<V>& job, const Part& part, int64_t end_block, PrefetchCursor& prefetch,
                std::integer_sequence<int, kMore...>) {
  static constexpr void (*kTiles[])(const Job<V>&, Part, int64_t,
                                    PrefetchCursor&) = {panel_tiles<V, kLeastRows<V> + kMore>...};
  kTiles[rows - kLeastRows<V>](job, part, end_block, prefetch);
}

// Calls do_rows(first, count) for equal shares of at most `limit` rows.
template <class DoRows>
inline void share_rows(int64_t rows, int64_t limit, DoRows&& do_rows) {
  const int64_t shares = (rows + limit - 1) / limit;
  for (int64_t i = 0; i < shares; ++i) {
    const int64_t first = rows * i / shares;
    do_rows(first, rows * (i + 1) / shares - first);
  }
}

template <class V, class Source>
void multiply_few(const Job<V>& job) {
  share_rows(job.p.rows, Source::kFewRows, [&](int64_t row, int64_t count) {
    const Part part{row, 0, 0, job.parts.cols, job.block(0) + job.parts.lines, job.parts.block_bytes};
    stream_rows<V, Source>(count, job, part, std::make_integer_sequence<int, Source::kFewRows>());
  });
}

// Columns [first, end) of a block, decoded, as lines of V::Unpacked.
template <class V, class Source>
__attribute__((noinline)) void unpack(const Parts& parts, const uint8_t* block, int64_t first, int64_t end,
                                      uint8_t* out) {
  constexpr int kPerBlock = 16 / V::kLanes;
  const uint8_t* lines = block + parts.lines + first / Source::kColumns * kLineBytes;
  int64_t g = parts.group ? first / parts.group : 0;
  for (int64_t col = first; col < end; ++g) {
    const int64_t group_end = parts.group ? std::min(col + parts.group, end) : end;
    typename Source::Group group[kPerBlock];
    for (int v = 0; v < kPerBlock; ++v) group[v] = Source::group(parts, block, g, v);
    for (; col < group_end; col += Source::kColumns, lines += kLineBytes) {
#pragma GCC unroll 16
      for (int step = 0; step < Source::kColumns / V::kDepth; ++step) {
#pragma GCC unroll 16
        for (int v = 0; v < kPerBlock; ++v, out += kLineBytes / kPerBlock) {
          const auto w = Source::weights(lines, step, v, group[v]);
          __builtin_memcpy(out, &w, sizeof w);
        }
      }
    }
  }
}

template <class V, class Source>
void multiply_many(const Job<V>& job) {
  constexpr bool kInPlace = std::is_same_v<Source, typename V::Unpacked>;
  constexpr int64_t kColumnBytes = kLineBytes / V::kDepth;  // of an unpacked block
  const Parts& parts = job.parts;
  const int64_t width = parts.group ? V::kPanelColumns / parts.group * parts.group : V::kPanelColumns;
  if (width == 0) return multiply_few<V, Source>(job);  // groups longer than a panel: only registers hold their sums
  alignas(64) uint8_t panel[kInPlace ? 1 : V::kPanelBlocks * V::kPanelColumns * kColumnBytes];
  const int64_t stride = kInPlace ? parts.block_bytes : width * kColumnBytes, blocks = job.p.weights.blocks;
  for (int64_t block = 0; block < blocks; block += V::kPanelBlocks) {
    const int64_t end_block = std::min(block + V::kPanelBlocks, blocks);
    for (int64_t first = 0; first < parts.cols; first += width) {
      const int64_t end = std::min(first + width, parts.cols);
      const uint8_t* lines = job.block(block) + parts.lines + first / Source::kColumns * kLineBytes;
      if constexpr (!kInPlace) {
        for (int64_t b = block; b < end_block; ++b)
          unpack<V, Source>(parts, job.block(b), first, end, panel + (b - block) * stride);
      }
      // The next panel reads the following columns of these blocks, or the beginning of the following blocks.
      PrefetchCursor prefetch{.at = lines + (end - first) / Source::kColumns * kLineBytes,
                              .stride = parts.block_bytes,
                              .left = std::min(width, parts.cols - end) / Source::kColumns};
      if (end == parts.cols && end_block < blocks) {
        prefetch.at = job.block(end_block);
        prefetch.left = parts.lines / kLineBytes + std::min(width, parts.cols) / Source::kColumns;
      }
      Part part{0, block, first, end, kInPlace ? lines : panel, stride};
      share_rows(job.p.rows, V::kTileRows, [&](int64_t row, int64_t count) {
        part.row = row;
        panel_rows<V>(count, job, part, end_block, prefetch,
                      std::make_integer_sequence<int, V::kTileRows - kLeastRows<V> + 1>());
      });
    }
  }
}

template <class V, class Source>
void multiply_source(const PackedProduct<typename V::Element>& p) {
  const Job<V> job(p);
  if (p.rows > Source::kFewRows) {
    multiply_many<V, Source>(job);
  } else if (p.rows > 0) {
    multiply_few<V, Source>(job);
  }
}

// `U`: the vectors that unpack.
template <class V, class U>
void multiply_unpacked(const PackedProduct<float>& p) {
  constexpr int64_t kStrip = 256;
  constexpr int kVectors = kBlockRows / V::kLanes;
  const Parts parts(p.weights.shape);
  alignas(64) float rows[kBlockRows * kStrip], turned[kStrip * kBlockRows];
  for (int64_t b = 0; b < p.weights.blocks; ++b) {
    for (int64_t col = 0; col < parts.cols; col += kStrip) {
      const int64_t cols = std::min(kStrip, parts.cols - col);
      unpack_rows<U>(parts, p.weights.data + b * parts.block_bytes, {col, cols}, {rows, kStrip});
      for (int64_t k = 0; k < cols; ++k) {
        for (int64_t r = 0; r < kBlockRows; ++r) turned[k * kBlockRows + r] = rows[r * kStrip + k];
      }
      for (int64_t m = 0; m < p.rows; ++m) {
        const float* a = p.a.row(m) + col;
        float* c = p.c.row(m) + b * kBlockRows;
        typename V::Reg sum[kVectors];
        for (int v = 0; v < kVectors; ++v) sum[v] = col ? V::load(c + v * V::kLanes) : V::zero();
        for (int64_t k = 0; k < cols; ++k) {
          const auto x = V::broadcast(a + k);
          for (int v = 0; v < kVectors; ++v)
            sum[v] = V::dot(x, V::load(turned + k * kBlockRows + v * V::kLanes), sum[v]);
        }
        for (int v = 0; v < kVectors; ++v) V::store(c + v * V::kLanes, sum[v]);
      }
    }
  }
}

template <class V, class U = V>
void multiply_any(const PackedProduct<float>& p) {
  if (decoded_by_unit(p.weights.shape.format)) return multiply_unpacked<V, U>(p);
  switch (p.weights.shape.format.encoding) {
    case Encoding::kBf16:
      return multiply_source<V, Bf16Lines<V>>(p);
    case Encoding::kFp8:
      return multiply_source<V, Fp8Lines<V>>(p);
    case Encoding::kInt8:
      return multiply_source<V, Int8Lines<V>>(p);
    default:
      return multiply_source<V, Int4Lines<V>>(p);
  }
}

}  // namespace
}  // namespace kt
