#include "ops/packed/linear.h"

#include <algorithm>

#include "base/scratch.h"
#include "ops/experts/operand.h"
#include "threads/plan.h"

namespace kt {
namespace {

constexpr int kPrepare = 0, kMultiply = 1;

// Below this many multiply-adds, waking other threads takes longer than the work.
constexpr int64_t kAloneBelow = 1 << 20;
// Elements of x that the calling thread quantizes before it wakes the others.
constexpr int64_t kPreparedAlone = 1 << 15;

// A unit of work: blocks of a part. Few rows take as many as a register tile of one row; both are even, because AMX
// adds up the rows of two blocks.
constexpr int64_t kUnitBlocks = 4;
// Rows whose operand stays in the L2 cache while blocks pass.
constexpr int64_t kTaskRows = 256;
constexpr int64_t kFewRows = 16;
constexpr int64_t kMostUnitsOfFewRows = 16, kMostUnits = 2;
constexpr int64_t kTasksPerThread = 8;

int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
int64_t units_of(const PackedMatrix::Part& part) { return parts_of(part.blocks.blocks, kUnitBlocks); }

template <class T>
Rows<T> rows_of(const TensorView& view, int64_t row = 0, int64_t col = 0) {
  return Rows<T>{view.as<T>(), view.strides[0]}.from(row, col);
}

void write_row(const Tiles& tiles, const float* values, int64_t count, const TensorView& to, int64_t row, int64_t col) {
  if (to.dtype == DType::kBf16) return tiles.narrow(values, count, rows_of<uint16_t>(to, row, col).data);
  std::copy_n(values, count, rows_of<float>(to, row, col).data);
}

// Of one call.
class Forward {
 public:
  Forward(const DenseEngine& engine, const TensorView& x, const PackedMatrix& matrix, const TensorView& bias,
          const TensorView& out)
      : engine_(engine), x_(x), matrix_(matrix), bias_(bias), out_(out) {}

  void run() {
    static thread_local OperandBuffer buffers[PackedMatrix::kMostParts];
    const int64_t rows = x_.shape[0];
    if (x_.dtype == DType::kBf16) reserve(buffers);
    Plan plan;
    plan.num_threads = rows * matrix_.rows() * matrix_.cols() < kAloneBelow ? 1 : engine_.num_threads;
    const bool prepares = x_.dtype == DType::kBf16;
    const bool alone = rows * matrix_.cols() <= kPreparedAlone;
    for (int64_t row = 0; prepares && alone && row < rows; ++row) prepare(row);
    if (prepares && !alone) plan.stages.push_back(stage_of(kPrepare, rows));
    plan.stages.push_back(multiply_stage(rows, plan.num_threads));
    kt::run(plan, [&](int step, const Range& range) {
      if (step == kPrepare) return prepare(range.item);
      const int64_t first = range.item * kTaskRows;
      multiply(first, std::min(kTaskRows, rows - first), {range.first, range.count});
    });
  }

 private:
  // An operand for each format; parts of the same format share it.
  void reserve(OperandBuffer* buffers) {
    for (const PackedMatrix::Part& part : matrix_.parts()) {
      const size_t index = static_cast<size_t>(&part - matrix_.parts().data());
      size_t same = 0;
      while (!(matrix_.parts()[same].shape().format == part.shape().format)) ++same;
      operand_of_[index] = same;
      if (same == index)
        operands_[index] = buffers[index].reserve(engine_.tiles, part.shape(), Arithmetic::kInt8, x_.shape[0], false);
    }
  }

  void prepare(int64_t row) const {
    static thread_local Scratch scratch;
    float* values = scratch.reserve<float>(matrix_.cols());
    engine_.tiles.widen(rows_of<const uint16_t>(x_, row).data, matrix_.cols(), values);
    for (const PackedMatrix::Part& part : matrix_.parts()) {
      const size_t index = static_cast<size_t>(&part - matrix_.parts().data());
      if (operand_of_[index] == index) finish_row(engine_.tiles, part.shape(), operands_[index], row, values);
    }
  }

  // Items are runs of rows, units those of the parts one after the other.
  Stage multiply_stage(int64_t rows, int num_threads) const {
    Stage stage = stage_of(kMultiply, parts_of(rows, kTaskRows));
    int64_t units = 0;
    for (const PackedMatrix::Part& part : matrix_.parts()) units += units_of(part);
    stage.spans[0] = {0, units};
    const int64_t most = rows <= kFewRows ? kMostUnitsOfFewRows : kMostUnits;
    stage.at_once = num_threads == 1 ? most : std::clamp<int64_t>(units / (num_threads * kTasksPerThread), 1, most);
    return stage;
  }

  void multiply(int64_t first_row, int64_t rows, Span units) const {
    for (const PackedMatrix::Part& part : matrix_.parts()) {
      const int64_t of_part = units_of(part), begin = std::max<int64_t>(units.first, 0),
                    end = std::min(units.first + units.size, of_part);
      if (begin < end) multiply_part(part, first_row, rows, {begin * kUnitBlocks, (end - begin) * kUnitBlocks});
      units.first -= of_part;
    }
  }

  void multiply_part(const PackedMatrix::Part& part, int64_t first_row, int64_t rows, Span blocks) const {
    static thread_local Scratch scratch;
    const PackedShape& shape = part.shape();
    blocks.size = std::min(blocks.size, part.blocks.blocks - blocks.first);
    const int64_t first = blocks.first * kBlockRows, width = blocks.size * kBlockRows;
    const uint8_t* data = part.blocks.data + blocks.first * shape.block_bytes();
    const PackedBlocks weights{.shape = shape, .data = data, .blocks = blocks.size};
    const Rows<float> sums{scratch.reserve<float>(rows * width), width};
    if (x_.dtype == DType::kF32) {
      engine_.tiles.multiply({.rows = rows, .a = rows_of<const float>(x_, first_row), .weights = weights, .c = sums});
    } else {
      const size_t index = static_cast<size_t>(&part - matrix_.parts().data());
      multiply_rows(engine_.tiles, operands_[operand_of_[index]].from(first_row), rows, weights, sums);
    }
    const int64_t cols = std::min(width, shape.rows - first), col = part.first_row + first;
    for (int64_t m = 0; m < rows; ++m) {
      if (bias_.present()) add_bias(sums.row(m), col, cols);
      write_row(engine_.tiles, sums.row(m), cols, out_, first_row + m, col);
    }
  }

  void add_bias(float* sums, int64_t col, int64_t cols) const {
    if (bias_.dtype == DType::kF32) return engine_.tiles.add_scaled(bias_.as<const float>() + col, 1.0f, cols, sums);
    static thread_local Scratch scratch;
    float* wide = scratch.reserve<float>(cols);
    engine_.tiles.widen(bias_.as<const uint16_t>() + col, cols, wide);
    engine_.tiles.add_scaled(wide, 1.0f, cols, sums);
  }

  const DenseEngine& engine_;
  const TensorView& x_;
  const PackedMatrix& matrix_;
  const TensorView &bias_, &out_;
  Operand operands_[PackedMatrix::kMostParts];
  size_t operand_of_[PackedMatrix::kMostParts] = {};
};

// Rows of by_out that are transposed together, and columns of by_out and of by_x in a unit of work.
constexpr int64_t kTransposedRows = 240, kTransposedCols = 512, kGradientCols = 64, kMostGradientUnits = 4;
static_assert(kTransposedRows % kTokenUnit == 0);

// Of one call, with `T` the elements of the transposed rows: float, or uint16_t (bf16) where the instruction set
// multiplies those.
template <class T>
class Backward {
 public:
  Backward(const DenseEngine& engine, const TensorView& by_out, const PackedMatrix& matrix, const TensorView& by_x)
      : engine_(engine), by_out_(by_out), matrix_(matrix), by_x_(by_x) {
    for (const PackedMatrix::Part& part : matrix.parts()) padded_rows_ += part.shape().padded_rows();
  }

  void run() {
    static thread_local Scratch scratch;
    const int64_t rows = by_out_.shape[0], chunks = parts_of(rows, kTransposedRows);
    transposed_ = scratch.reserve<T>(round_up(rows, kTokenUnit) * padded_rows_);
    Plan plan;
    plan.num_threads = rows * matrix_.rows() * matrix_.cols() < kAloneBelow ? 1 : engine_.num_threads;
    Stage transposing = stage_of(kPrepare, chunks), stage = stage_of(kMultiply, chunks);
    int64_t strips = 0;
    for (const PackedMatrix::Part& part : matrix_.parts()) strips += parts_of(part.shape().rows, kTransposedCols);
    transposing.spans[0] = {0, strips};
    const int64_t units = parts_of(matrix_.cols(), kGradientCols);
    stage.spans[0] = {0, units};
    stage.at_once = std::clamp<int64_t>(units / (plan.num_threads * kTasksPerThread), 1, kMostGradientUnits);
    plan.stages.push_back(transposing);
    plan.stages.push_back(stage);
    kt::run(plan, [&](int step, const Range& range) {
      const int64_t first = range.item * kTransposedRows, count = std::min(kTransposedRows, rows - first);
      if (step == kPrepare) return transpose(first, count, range.first);
      multiply(first, count, {range.first * kGradientCols, range.count * kGradientCols});
    });
  }

 private:
  // Where the transposed rows [first_row, + rows) of a part begin, of which `before` padded columns come first.
  T* transposed(int64_t first_row, int64_t rows, int64_t before) const {
    return transposed_ + first_row * padded_rows_ + before * round_up(rows, kTokenUnit);
  }

  void transpose(int64_t first_row, int64_t rows, int64_t strip) const {
    static thread_local Scratch scratch;
    int64_t before = 0;
    for (const PackedMatrix::Part& part : matrix_.parts()) {
      const int64_t strips = parts_of(part.shape().rows, kTransposedCols);
      if (strip < strips) {
        const int64_t col = strip * kTransposedCols, cols = std::min(kTransposedCols, part.shape().rows - col);
        const int64_t ld = round_up(rows, kTokenUnit);
        Rows<const float> from = rows_of<const float>(by_out_, first_row, part.first_row + col);
        if (by_out_.dtype == DType::kBf16) from = widened(first_row, rows, part.first_row + col, cols, scratch);
        T* to = transposed(first_row, rows, before + col);
        if constexpr (sizeof(T) == sizeof(float)) {
          engine_.tiles.transpose_rows(from, rows, cols, to, ld);
        } else {
          engine_.tiles.transpose_rows_bf16(from, rows, cols, to, ld);
        }
        return;
      }
      strip -= strips;
      before += part.shape().padded_rows();
    }
  }

  Rows<const float> widened(int64_t first_row, int64_t rows, int64_t col, int64_t cols, Scratch& scratch) const {
    const Rows<float> wide{scratch.reserve<float>(rows * cols), cols};
    for (int64_t m = 0; m < rows; ++m)
      engine_.tiles.widen(rows_of<const uint16_t>(by_out_, first_row + m, col).data, cols, wide.row(m));
    return wide;
  }

  void multiply(int64_t first_row, int64_t rows, ColumnRange columns) const {
    static thread_local Scratch scratch;
    columns.count = std::min(columns.count, matrix_.cols() - columns.first);
    const Rows<float> sums{scratch.reserve<float>(rows * columns.count), columns.count};
    int64_t before = 0;
    for (const PackedMatrix::Part& part : matrix_.parts()) {
      const TransposedProduct<T> product{.rows = rows,
                                         .in = transposed(first_row, rows, before),
                                         .ld = round_up(rows, kTokenUnit),
                                         .pieces = &part.blocks,
                                         .num_pieces = 1,
                                         .first_col = columns.first,
                                         .cols = columns.count,
                                         .out = sums,
                                         .accumulate = before > 0};
      if constexpr (sizeof(T) == sizeof(float)) {
        engine_.tiles.multiply_transposed(product);
      } else {
        engine_.tiles.multiply_transposed_bf16(product);
      }
      before += part.shape().padded_rows();
    }
    for (int64_t m = 0; m < rows; ++m)
      write_row(engine_.tiles, sums.row(m), columns.count, by_x_, first_row + m, columns.first);
  }

  const DenseEngine& engine_;
  const TensorView& by_out_;
  const PackedMatrix& matrix_;
  const TensorView& by_x_;
  int64_t padded_rows_ = 0;
  T* transposed_ = nullptr;
};

}  // namespace

void linear(const DenseEngine& engine, const TensorView& x, const PackedMatrix& matrix, const TensorView& bias,
            const TensorView& out) {
  if (x.shape[0] == 0) return;
  const OperationScope scope;
  Forward(engine, x, matrix, bias, out).run();
}

void linear_backward(const DenseEngine& engine, const TensorView& by_out, const PackedMatrix& matrix,
                     const TensorView& by_x) {
  if (by_out.shape[0] == 0) return;
  const OperationScope scope;
  if (by_out.dtype == DType::kBf16 && engine.tiles.multiply_transposed_bf16) {
    Backward<uint16_t>(engine, by_out, matrix, by_x).run();
  } else {
    Backward<float>(engine, by_out, matrix, by_x).run();
  }
}

}  // namespace kt
