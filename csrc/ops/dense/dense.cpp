#include "ops/dense/dense.h"

#include <algorithm>

#include "base/scratch.h"
#include "threads/plan.h"

namespace kt {
namespace {

constexpr int kPrepare = 0, kMultiply = 1;

// Below this many multiply-adds, waking other threads takes longer than the work.
constexpr int64_t kAloneBelow = 1 << 20;

// Columns of the result in a unit of work: whole register tiles of every kernel and number of rows, but for the last.
constexpr int64_t kUnitCols = 48;
// Weights that a task reads again for each tile of rows stay in the L2 cache.
constexpr int64_t kTaskWeightBytes = 1 << 19;
constexpr int64_t kTaskRows = 128;
// Every task reads all its rows of x: many rows make fewer tasks.
constexpr int64_t kFewRows = 16, kTasksPerThread = 8, kTasksPerThreadOfManyRows = 4;

int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Items are blocks of rows, units are columns. Each thread has several tasks, so that a late thread costs little; rows
// are cut only where columns make too few tasks.
Plan linear_plan(const DenseProduct& product, int num_threads) {
  Plan plan;
  plan.num_threads = product.rows * product.cols * product.inner < kAloneBelow ? 1 : num_threads;
  const int64_t units = parts_of(product.cols, kUnitCols);
  const int64_t wanted = plan.num_threads * (product.rows > kFewRows ? kTasksPerThreadOfManyRows : kTasksPerThread);
  const int64_t unit_bytes = kUnitCols * std::max<int64_t>(product.inner, 1) * (product.w.bf16 ? 2 : 4);
  const int64_t most = std::max<int64_t>(kTaskWeightBytes / unit_bytes, 1);
  if (product.operand) plan.stages.push_back(stage_of(kPrepare, parts_of(product.rows, kDenseRowUnit)));
  Stage stage = stage_of(kMultiply, units * 2 < wanted ? parts_of(product.rows, kTaskRows) : 1);
  stage.spans[0] = {0, units};
  stage.at_once = plan.num_threads == 1 ? most : std::clamp<int64_t>(units / wanted, 1, most);
  plan.stages.push_back(stage);
  return plan;
}

// Of part `part` of `parts` about equal ones.
int64_t first_row(int64_t rows, int64_t part, int64_t parts) {
  return std::min(rows, parts_of(rows, kDenseRowUnit) * part / parts * kDenseRowUnit);
}

const float* bias_of(const Tiles& tiles, const TensorView& bias, Scratch& wide) {
  if (bias.dtype == DType::kF32) return bias.as<const float>();
  float* values = wide.reserve<float>(bias.shape[0]);
  tiles.widen(bias.as<const uint16_t>(), bias.shape[0], values);
  return values;
}

}  // namespace

void linear(const DenseEngine& engine, const TensorView& x, const TensorView& weight, const TensorView& bias,
            const TensorView& out) {
  DenseProduct whole{.first_row = 0,
                     .rows = x.shape[0],
                     .first_col = 0,
                     .cols = weight.shape[0],
                     .inner = x.shape[1],
                     .x = matrix_of(x),
                     .w = matrix_of(weight),
                     .y = matrix_of(out)};
  if (whole.rows == 0 || whole.cols == 0) return;
  static thread_local Scratch wide_bias, prepared;
  const OperationScope scope;
  if (bias.present()) whole.bias = bias_of(engine.tiles, bias, wide_bias);
  const int64_t operand_bytes = engine.kernels().operand_bytes ? engine.kernels().operand_bytes(whole) : 0;
  uint8_t* operand = operand_bytes ? prepared.reserve<uint8_t>(operand_bytes) : nullptr;
  whole.operand = operand;
  const Plan plan = linear_plan(whole, engine.num_threads);
  const int64_t items = plan.stages.back().items;
  run(plan, [&](int step, const Range& range) {
    if (step == kPrepare) return engine.kernels().prepare(whole, range.item, operand);
    DenseProduct part = whole;
    part.first_row = first_row(whole.rows, range.item, items);
    part.rows = first_row(whole.rows, range.item + 1, items) - part.first_row;
    part.first_col = range.first * kUnitCols;
    part.cols = std::min(range.count * kUnitCols, whole.cols - part.first_col);
    engine.kernels().multiply(part);
  });
}

void multiply_here(const DenseEngine& engine, DenseProduct product) {
  static thread_local Scratch prepared;
  const int64_t bytes = engine.kernels().operand_bytes ? engine.kernels().operand_bytes(product) : 0;
  uint8_t* operand = bytes ? prepared.reserve<uint8_t>(bytes) : nullptr;
  product.operand = operand;
  for (int64_t unit = 0; operand && unit * kDenseRowUnit < product.rows; ++unit)
    engine.kernels().prepare(product, unit, operand);
  engine.kernels().multiply(product);
}

void rms_norm(const DenseEngine& engine, const NormViews& views) {
  const NormRows whole{.first_row = 0,
                       .rows = views.x.shape[0],
                       .cols = views.x.shape[1],
                       .x = matrix_of(views.x),
                       .residual = matrix_of(views.residual),
                       .total = matrix_of(views.total),
                       .y = matrix_of(views.out),
                       .weight = views.weight.data,
                       .epsilon = views.epsilon,
                       .inverse = views.inverse.present() ? views.inverse.as<float>() : nullptr,
                       .offset = views.offset};
  if (whole.rows == 0) return;
  constexpr int64_t kTaskElements = 1 << 16;
  const int64_t at_once = std::max<int64_t>(kTaskElements / std::max<int64_t>(whole.cols, 1), 1);
  run_ranges(whole.rows, at_once, engine.num_threads, [&](int64_t first, int64_t count) {
    NormRows part = whole;
    part.first_row = first;
    part.rows = count;
    engine.kernels().normalise(part);
  });
}

}  // namespace kt
