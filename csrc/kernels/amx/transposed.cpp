// Transposed products in bf16: TDPBF16PS on the transposed result.
//
// Step: A = 16 columns k of W x 32 rows n (pairs of n, from two blocks), B = 16 pairs of n x up to 16 tokens of the
// activations as they lie, C = 16 k x tokens. Blocking: 2 tiles of k x 2 of tokens.
//
// Panel: up to 8 blocks (128 n) x 64 k, [pair of blocks][k][32 n] on the stack (16 KiB, so that it fits the
// L1 cache beside activations and sums of 48 tokens, 24 KiB); two packed lines of bf16 are two rows of it by two
// permutations, other encodings are scaled in float32 and rounded to bf16. A panel serves up to 8 tiles of tokens.
// Their sums (32 KiB) stay on the stack until the next n, so that each sum is one chain in the order of n, wherever the
// matrix is split into pieces. An odd last block is paired with zeros.
#include <cstring>

#include "kernels/amx/columns.h"
#include "kernels/amx/tile_registers.h"
#include "kernels/amx/transpose.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

constexpr int64_t kPanelBlocks = 8, kPanelCols = 64, kTokenTiles = 8;
constexpr int64_t kPairs = kBlockRows;  // of n in a step
constexpr int64_t kPairBytes = 4;

using Panel = uint8_t[kPanelBlocks / 2][kPanelCols][kLineBytes];

// Two lines: 16 n x 2 k each. Their even elements are row k of a panel, the odd ones row k + 1.
inline void interleave_lines(const uint8_t* first, const uint8_t* second, uint8_t* out) {
  using Line = uint16_t __attribute__((vector_size(64)));
  const auto x = load<Line>(first), y = load<Line>(second);
  const Line even = __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36,
                                            38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62);
  const Line odd = __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37,
                                           39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
  store(even, out);
  store(odd, out + kLineBytes);
}

class TransposedTiles {
 public:
  explicit TransposedTiles(const TransposedProduct<uint16_t>& p) : p_(p), shape_(p.pieces[0].shape), tokens_(p.rows) {
    for (int64_t i = 0; i < p.num_pieces; ++i) blocks_ += p.pieces[i].blocks;
  }

  void run() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, tokens_.height * kPairBytes);
    for (const int a : {4, 5}) config.set(a, 16, kLineBytes);
    const TileSession session(config);
    const int64_t shares = (tokens_.count + kTokenTiles - 1) / kTokenTiles;
    for (int64_t i = 0; i < shares; ++i) {
      const int64_t first = tokens_.count * i / shares, end = tokens_.count * (i + 1) / shares;
      for (int64_t col = 0; col < p_.cols; col += kPanelCols) run_columns(first, end, col);
    }
  }

 private:
  using Sums = float[kTokenTiles][kPanelCols / 16][16 * 16];  // of a tile 16 k x 16 tokens

  int64_t panel_cols(int64_t col) const { return p_.cols - col < kPanelCols ? p_.cols - col : kPanelCols; }

  using Fetch = FetchEachStep<1>;

  // The lines of the panel that begins at `block` and `col`, as far as its blocks lie in one piece, in equal shares of
  // `steps` steps.
  Fetch fetch_panel(int64_t block, int64_t col, int64_t steps) const {
    const Place place = place_of(block);
    const PackedBlocks& piece = p_.pieces[place.piece];
    const int64_t left = piece.blocks - place.block, cols = col < p_.cols ? panel_cols(col) : 0;
    const uint8_t* packed = piece.data + place.block * shape_.block_bytes();
    Fetch fetch{prefetch_columns(shape_, packed, left < kPanelBlocks ? left : kPanelBlocks, p_.first_col + col, cols)};
    fetch.lines = (shape_.lines(cols) * kPanelBlocks + steps - 1) / steps;
    return fetch;
  }

  // Token tiles [first, end).
  void run_columns(int64_t first, int64_t end, int64_t col) {
    alignas(64) Panel panel;
    alignas(64) Sums sums = {};
    const int64_t cols = panel_cols(col);
    for (int64_t tile = first; p_.resume && tile < end; ++tile) read(tile, col, cols, sums[tile - first]);
    for (int64_t block = 0; block < blocks_; block += kPanelBlocks) {
      const int64_t count = blocks_ - block < kPanelBlocks ? blocks_ - block : kPanelBlocks;
      for (int64_t i = 0; i < count; i += 2) {
        for (int64_t k = 0; k < cols; k += kDecodedCols) fill(block + i, i + 1 < count, col + k, &panel[i / 2][k]);
      }
      const bool more = block + kPanelBlocks < blocks_;
      const int64_t steps = (count + 1) / 2 * (cols / 32) * ((end - first + 1) / 2);
      Fetch fetch = fetch_panel(more ? block + kPanelBlocks : 0, more ? col : col + kPanelCols, steps);
      for (int64_t tile = first; tile < end; tile += 2) {
        for (int64_t k = 0; k < cols; k += 32) {
          if (tile + 1 < end) {
            add_panel<2>(panel, block, count, tile, k, &sums[tile - first], fetch);
          } else {
            add_panel<1>(panel, block, count, tile, k, &sums[tile - first], fetch);
          }
        }
      }
    }
    for (int64_t tile = first; tile < end; ++tile) write(tile, col, cols, sums[tile - first]);
  }

  struct Place {
    int64_t piece, block;
  };
  Place place_of(int64_t block) const {
    int64_t piece = 0;
    for (; block >= p_.pieces[piece].blocks; ++piece) block -= p_.pieces[piece].blocks;
    return {piece, block};
  }
  Block block_of(int64_t block) const {
    const Place place = place_of(block);
    return block_at(shape_, p_.pieces[place.piece].data, place.block);
  }

  // kDecodedCols columns of blocks `block` and the next one, which exists if `both`.
  void fill(int64_t block, bool both, int64_t col, uint8_t (*out)[kLineBytes]) const {
    col += p_.first_col;
    const Block first = block_of(block);
    if (shape_.format.encoding == Encoding::kBf16) {
      alignas(64) static constexpr uint8_t kZeros[kLineBytes] = {};
      const uint8_t* x = first.lines + col / 2 * kLineBytes;
      const uint8_t* y = both ? block_of(block + 1).lines + col / 2 * kLineBytes : kZeros;
      for (int64_t k = 0; k < kDecodedCols; k += 2)
        interleave_lines(x + k / 2 * kLineBytes, both ? y + k / 2 * kLineBytes : kZeros, out[k]);
      return;
    }
    constexpr int64_t kHalf = kLineBytes / 2;
    ColumnDecoder(shape_, first, col).decode(out[0], kLineBytes);
    if (both) {
      const Block second = block_of(block + 1);
      ColumnDecoder(shape_, second, col).decode(out[0] + kHalf, kLineBytes);
    } else {
      for (int64_t k = 0; k < kDecodedCols; ++k) std::memset(out[k] + kHalf, 0, kHalf);
    }
  }

  // 32 columns from k on with kB tiles of tokens.
  template <int kB>
  void add_panel(const Panel& panel, int64_t block, int64_t count, int64_t tile, int64_t k,
                 float (*sums)[kPanelCols / 16][16 * 16], Fetch& fetch) const {
    const int64_t stride = p_.ld * kPairBytes;
    const auto* in = reinterpret_cast<const uint8_t*>(p_.in) + block * kBlockRows / 2 * stride;
    TileRun a[2], b[kB];
    for (int i = 0; i < 2; ++i) a[i] = {panel[0][k + 16 * i], kLineBytes, kPanelCols * kLineBytes};
    for (int i = 0; i < kB; ++i) b[i] = {in + tokens_.start(tile + i) * kPairBytes, stride, kPairs * stride};
    const auto sum = [&](int r, int i) { return sums[i][k / 16 + r]; };
    for_each_sum<2, kB>(
        [&]<int kTile>(int r, int i) { load_tile<kTile>(reinterpret_cast<const uint8_t*>(sum(r, i)), kLineBytes); });
    accumulate<DotBf16, 2, kB>(a, b, count / 2, fetch);
    if (count % 2) add_last_block<kB>(a, b, count / 2);
    for_each_sum<2, kB>([&]<int kTile>(int r, int i) { store_tile<kTile>(sum(r, i), kLineBytes); });
  }

  // For the last block of the activations: its 8 pairs, and zeros for the tile's other 8.
  template <int kB>
  void add_last_block(const TileRun (&from_a)[2], const TileRun (&from_b)[kB], int64_t step) const {
    alignas(64) uint8_t pairs[kB][kPairs][kLineBytes] = {};
    TileRun a[2], b[kB];
    for (int i = 0; i < 2; ++i) a[i] = {from_a[i].at + step * from_a[i].step, kLineBytes, 0};
    for (int i = 0; i < kB; ++i) {
      const uint8_t* in = from_b[i].at + step * from_b[i].step;
      for (int64_t pair = 0; pair < kPairs / 2; ++pair)
        std::memcpy(pairs[i][pair], in + pair * from_b[i].stride, static_cast<size_t>(tokens_.height * kPairBytes));
      b[i] = {pairs[i][0], kLineBytes, 0};
    }
    accumulate<DotBf16, 2, kB>(a, b, 1);
  }

  // The opposite of `write`.
  void read(int64_t tile, int64_t col, int64_t cols, float (&sums)[kPanelCols / 16][16 * 16]) const {
    for (int64_t k = 0; k < cols; ++k) {
      for (int64_t i = 0; i < tokens_.height; ++i)
        sums[k / 16][k % 16 * 16 + i] = p_.out.row(tokens_.start(tile) + i)[col + k];
    }
  }

  void write(int64_t tile, int64_t col, int64_t cols, const float (&sums)[kPanelCols / 16][16 * 16]) const {
    for (int64_t k = 0; k < cols; k += 16) {
      Square square;
      square.read(sums[k / 16]);
      square.transpose();
      for (int64_t i = tokens_.repeated(tile); i < tokens_.height; ++i)
        square.give(i, p_.accumulate, p_.out.row(tokens_.start(tile) + i) + col + k);
    }
  }

  const TransposedProduct<uint16_t>& p_;
  const PackedShape& shape_;
  const RowTiles tokens_;
  int64_t blocks_ = 0;
};

}  // namespace

void multiply_transposed_bf16(const TransposedProduct<uint16_t>& p) {
  if (p.rows > 0 && p.num_pieces > 0) TransposedTiles(p).run();
}

}  // namespace kt::amx::inline KT_AMX_BUILD
