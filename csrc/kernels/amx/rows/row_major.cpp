// Row-major products of two bf16 matrices (kernels/dense.h): TDPBF16PS. Other dtypes are AVX-512's.
//
// Step: A = 16 rows of w x 32 columns as they lie in memory, B = the same 32 columns of 16 rows of x, C = 16 columns of
// the result x 16 rows. So w, the larger matrix, needs no other order; `prepare` writes B once a call:
//
//   operand: tile t of x (rows 16 t to 16 t + 15), step s, line i, row m of the tile: columns 32 s + 2 i and + 1
//
// with zeros beyond the last row and column. Blocking 2 x 2 (tile_registers.h). Two tiles of w are 32 adjacent rows,
// one run of memory; the next run is prefetched in its order. C is transposed in registers before it is written.
//
// An element's order: per step TDPBF16PS's, that is the even and the odd columns' sums, their sum, then the total.
//
// pair_product sums over the rows of the second matrix (PairProduct): A = 16 rows of a x 32 columns as they lie, B = 32
// rows of b x 16 columns, pairs of rows interleaved; the order of an element is the same.
#include "kernels/amx/kernels.h"
#include "kernels/amx/tile_registers.h"
#include "kernels/amx/transpose.h"
#include "kernels/dense.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

constexpr int64_t kStepCols = 32, kStepBytes = 64, kTileBytes = 16 * kStepBytes;

inline int64_t steps_of(const DenseProduct& p) { return (p.inner + kStepCols - 1) / kStepCols; }
inline bool is_bf16(const DenseProduct& p) { return p.x.bf16 && p.w.bf16; }

using Fetch = FetchEachStep<1>;

// Columns [col, col + kR * height) of the result for kB tiles of x.
class RowMajorTiles {
 public:
  RowMajorTiles(const DenseProduct& p, int64_t height) : p_(p), steps_(steps_of(p)), height_(height) {}

  template <int kR, int kB>
  void run(int64_t col, int64_t tile, Fetch& fetch) {
    const int64_t whole = p_.inner / kStepCols;
    TileRun a[kR], b[kB];
    for (int r = 0; r < kR; ++r) a[r] = {row_of_w(col + r * height_), p_.w.stride * 2, kStepBytes};
    for (int i = 0; i < kB; ++i) b[i] = {tile_of_x(tile + i), kStepBytes, kTileBytes};
    zero_sums<kR, kB>();
    accumulate<DotBf16, kR, kB>(a, b, whole, fetch);
    if (whole < steps_) {
      alignas(64) uint8_t rest[kR][kTileBytes] = {};
      for (int r = 0; r < kR; ++r) {
        for (int64_t i = 0; i < height_; ++i) {
          const uint8_t* from = row_of_w(col + r * height_ + i) + whole * kStepBytes;
          std::memcpy(rest[r] + i * kStepBytes, from, static_cast<size_t>(2 * (p_.inner - whole * kStepCols)));
        }
        a[r] = {rest[r], kStepBytes, kStepBytes};
      }
      for (int i = 0; i < kB; ++i) b[i].at += whole * kTileBytes;
      accumulate<DotBf16, kR, kB>(a, b, 1);
    }
    alignas(64) float sums[4][16 * 16];
    for_each_sum<kR, kB>([&]<int kTile>(int, int) { store_tile<kTile>(sums[kTile], kLineBytes); });
    for_each_sum<kR, kB>([&]<int kTile>(int r, int i) { write(col + r * height_, tile + i, sums[kTile]); });
  }

 private:
  const uint8_t* row_of_w(int64_t row) const { return reinterpret_cast<const uint8_t*>(p_.w.row<uint16_t>(row)); }
  const uint8_t* tile_of_x(int64_t tile) const {
    return static_cast<const uint8_t*>(p_.operand) + tile * steps_ * kTileBytes;
  }

  // sums: [height_][16], of the columns from `col` on and the rows of the tile.
  void write(int64_t col, int64_t tile, const float* sums) const {
    Square square;
    square.read(sums);
    square.transpose();
    alignas(64) float line[16], bias[16] = {};
    if (p_.bias) std::memcpy(bias, p_.bias + col, static_cast<size_t>(height_) * sizeof(float));
    const int64_t end = least(p_.first_row + p_.rows, (tile + 1) * 16);
    for (int64_t row = tile * 16; row < end; ++row) {
      square.give(row % 16, false, line);
      const Floats values = load<Floats>(line) + load<Floats>(bias);
      if (p_.y.bf16) {
        alignas(64) uint8_t narrow[32];
        narrow_to_bf16(values, narrow);
        std::memcpy(p_.y.row<uint16_t>(row) + col, narrow, static_cast<size_t>(2 * height_));
      } else {
        store(values, line);
        std::memcpy(p_.y.row<float>(row) + col, line, static_cast<size_t>(4 * height_));
      }
    }
  }

  static int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

  const DenseProduct& p_;
  const int64_t steps_, height_;
};

int64_t operand_bytes(const DenseProduct& p) {
  return is_bf16(p) ? (p.rows + kDenseRowUnit - 1) / kDenseRowUnit * steps_of(p) * kTileBytes : 0;
}

void prepare(const DenseProduct& p, int64_t unit, void* operand) {
  const int64_t steps = steps_of(p), first = unit * kDenseRowUnit;
  const int64_t rows = p.rows - first < kDenseRowUnit ? p.rows - first : kDenseRowUnit;
  float* to = static_cast<float*>(operand) + unit * steps * (kTileBytes / 4);
  for (int64_t step = 0; step < steps; ++step, to += kTileBytes / 4) {
    const int64_t left = p.inner - step * kStepCols, cols = left < kStepCols ? left : kStepCols;
    alignas(64) float block[16 * 16] = {};  // pairs of bf16
    for (int64_t m = 0; m < rows; ++m)
      std::memcpy(block + 16 * m, p.x.row<uint16_t>(first + m) + step * kStepCols, static_cast<size_t>(2 * cols));
    Square square;
    square.read(block);
    square.transpose();
    for (int64_t i = 0; i < 16; ++i) square.give(i, false, to + 16 * i);
  }
}

void multiply_columns(const DenseProduct& p, int64_t col, int64_t blocks, int64_t height) {
  const TileSession session(config_of(RowTiles(height), kStepBytes));
  RowMajorTiles tiles(p, height);
  const int64_t first = p.first_row / kDenseRowUnit, end = (p.first_row + p.rows + kDenseRowUnit - 1) / kDenseRowUnit;
  for (int64_t block = 0; block < blocks; block += 2, col += 2 * height) {
    for (int64_t tile = first; tile < end; tile += 2) {
      Fetch fetch;  // later tiles find the rows in the L2 cache
      if (tile == first && p.w.stride == p.inner) {
        fetch.lines = 2 * height;
        fetch.cursor.at = reinterpret_cast<const uint8_t*>(p.w.row<uint16_t>(col + 2 * height));
        fetch.cursor.left = fetch.lines * (p.inner / kStepCols);
      }
      with_blocking(blocks - block, end - tile, [&]<int kR, int kB> { tiles.run<kR, kB>(col, tile, fetch); });
    }
  }
}

void multiply(const DenseProduct& p) {
  if (!is_bf16(p)) return base::kDense.multiply(p);
  const int64_t blocks = p.cols / 16, rest = p.cols % 16;
  if (blocks) multiply_columns(p, p.first_col, blocks, 16);
  if (rest) multiply_columns(p, p.first_col + 16 * blocks, 1, rest);
}

void normalise(const NormRows& p) { base::kDense.normalise(p); }
void rotate(const RotaryRows& p) { base::kDense.rotate(p); }
void choose_experts(const RouterRows& p) { base::kDense.choose_experts(p); }
void delta_rule(const DeltaRule& p) { base::kDense.delta_rule(p); }
void delta_rule_backward(const DeltaGradient& g) { base::kDense.delta_rule_backward(g); }

// The strips of b, 32 rows after 32, each with a tile of B for 16 columns, and a tile's rows of a where they do not lie
// in memory as a whole.
class PairTiles {
 public:
  explicit PairTiles(const PairProduct& p) : p_(p), steps_((p.inner + kStepCols - 1) / kStepCols) {
    alignas(64) static constexpr uint16_t kZeros[kStepCols] = {};
    for (int64_t n = 0; n < steps_ * kStepCols; n += 2) {
      for (int64_t col = 0; col < p.cols; col += 32) {
        const int64_t cols = p.cols - col < 32 ? p.cols - col : 32;
        uint8_t* to = tile_of_b(n / kStepCols, col / 16) + n % kStepCols / 2 * kLineBytes;
        const uint16_t* first = n < p.inner ? p.b.row(n) + col : kZeros;
        const uint16_t* second = n + 1 < p.inner ? p.b.row(n + 1) + col : kZeros;
        interleave_rows(first, second, cols, to, to + kTileBytes);
      }
    }
  }

  // Rows [row, row + 16 kR) of the result, all columns.
  template <int kR>
  void run(int64_t row) {
    for (int64_t col = 0; col < p_.cols; col += 32) {
      if (p_.cols - col > 16) {
        columns<kR, 2>(row, col);
      } else {
        columns<kR, 1>(row, col);
      }
    }
  }

 private:
  static constexpr int64_t kBlocks = (kPairCols + 31) / 32 * 2, kSteps = kPairInner / kStepCols;

  uint8_t* tile_of_b(int64_t step, int64_t block) { return b_ + (step * kBlocks + block) * kTileBytes; }
  bool is_whole(int64_t row) const { return row + 16 <= p_.rows && p_.inner % kStepCols == 0; }
  int64_t rows_of(int64_t row) const { return p_.rows - row < 16 ? p_.rows - row : 16; }

  template <int kR, int kB>
  void columns(int64_t row, int64_t col) {
    TileRun a[kR], b[kB];
    for (int r = 0; r < kR; ++r) a[r] = rows_of_a(row + 16 * r, r);
    for (int i = 0; i < kB; ++i) b[i] = {tile_of_b(0, col / 16 + i), kLineBytes, kBlocks * kTileBytes};
    zero_sums<kR, kB>();
    alignas(64) float sums[4][16 * 16];
    if (p_.accumulate) {
      for_each_sum<kR, kB>([&]<int kTile>(int r, int i) {
        copy_sums(row + 16 * r, col + 16 * i, sums[kTile], true);
        load_tile<kTile>(reinterpret_cast<const uint8_t*>(sums[kTile]), kLineBytes);
      });
    }
    accumulate<DotBf16, kR, kB>(a, b, steps_);
    for_each_sum<kR, kB>([&]<int kTile>(int r, int i) {
      store_tile<kTile>(sums[kTile], kLineBytes);
      copy_sums(row + 16 * r, col + 16 * i, sums[kTile], false);
    });
  }

  TileRun rows_of_a(int64_t row, int place) {
    if (is_whole(row)) return {reinterpret_cast<const uint8_t*>(p_.a.row(row)), 2 * p_.a.ld, kStepBytes};
    uint16_t* to = a_[place];
    std::memset(to, 0, sizeof a_[place]);
    for (int64_t m = 0; m < rows_of(row); ++m)
      std::memcpy(to + m * kPairInner, p_.a.row(row + m), static_cast<size_t>(2 * p_.inner));
    return {reinterpret_cast<const uint8_t*>(to), 2 * kPairInner, kStepBytes};
  }

  // Between c and a tile, as far as c has rows and columns.
  void copy_sums(int64_t row, int64_t col, float* sums, bool from_c) const {
    const auto bytes = static_cast<size_t>(4 * (p_.cols - col < 16 ? p_.cols - col : 16));
    for (int64_t m = 0; m < rows_of(row); ++m) {
      float* c = p_.c.row(row + m) + col;
      std::memcpy(from_c ? sums + 16 * m : c, from_c ? c : sums + 16 * m, bytes);
    }
  }

  const PairProduct& p_;
  const int64_t steps_;
  alignas(64) uint8_t b_[kSteps * kBlocks * kTileBytes];
  alignas(64) uint16_t a_[2][16 * kPairInner];
};

}  // namespace

void pair_product(const PairProduct& p) {
  const TileSession session(config_of(RowTiles(16), kStepBytes));
  PairTiles tiles(p);
  int64_t row = 0;
  for (; row + 16 < p.rows; row += 32) tiles.run<2>(row);
  if (row < p.rows) tiles.run<1>(row);
}

const Dense kDense = {.multiply = multiply,
                      .normalise = normalise,
                      .rotate = rotate,
                      .choose_experts = choose_experts,
                      .operand_bytes = operand_bytes,
                      .prepare = prepare,
                      .delta_rule = delta_rule,
                      .delta_rule_backward = delta_rule_backward};

}  // namespace kt::amx::inline KT_AMX_BUILD
