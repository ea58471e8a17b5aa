#include "ops/stages.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "ops/lora.h"

namespace kt {
namespace {

constexpr int64_t kTaskBlocks = 4;  // blocks of 16 columns in one task
constexpr int64_t kScratchBytes = int64_t{128} << 20;

// Tasks of (expert, range of blocks). `body` gets the index into routing.experts, the first block and their number.
template <class Body>
void for_each_block_range(const Engine& engine, const Routing& routing, int64_t num_blocks, int64_t inner,
                          Body&& body) {
  const int64_t ranges = (num_blocks + kTaskBlocks - 1) / kTaskBlocks;
  const int64_t num_experts = static_cast<int64_t>(routing.experts.size());
  for_each_task(engine, num_experts * ranges, routing.num_pairs() * num_blocks * kBlockRows * inner, [&](int64_t task) {
    const int64_t block = (task % ranges) * kTaskBlocks;
    body(task / ranges, block, std::min(kTaskBlocks, num_blocks - block));
  });
}

template <class Body>
void for_each_group_of(const Routing& routing, int64_t expert_index, Body&& body) {
  const auto at = static_cast<size_t>(expert_index);
  for (int64_t g = routing.first_group[at]; g < routing.first_group[at + 1]; ++g)
    body(routing.groups[static_cast<size_t>(g)]);
}

float silu(float value) { return value / (1.0f + std::exp(-value)); }

}  // namespace

void gather_rows(const Engine& engine, const Routing& routing, const TensorView& matrix, int64_t ld, float* rows) {
  const int64_t cols = matrix.shape[1];
  for_each_task(engine, routing.num_pairs(), routing.num_pairs() * cols, [&](int64_t pair) {
    const int64_t from = routing.token[static_cast<size_t>(pair)] * matrix.strides[0];
    float* to = rows + pair * ld;
    if (matrix.dtype == DType::kBf16) {
      const uint16_t* source = matrix.as<uint16_t>() + from;
      for (int64_t i = 0; i < cols; ++i) to[i] = bf16_to_float(source[i]);
    } else {
      std::memcpy(to, matrix.as<float>() + from, static_cast<size_t>(cols) * sizeof *to);
    }
    std::fill(to + cols, to + ld, 0.0f);
  });
}

void gather_bf16_rows(const Engine& engine, const Routing& routing, const TensorView& matrix, int64_t ld,
                      uint16_t* rows) {
  const int64_t cols = matrix.shape[1];
  for_each_task(engine, routing.num_pairs(), routing.num_pairs() * cols, [&](int64_t pair) {
    const uint16_t* from = matrix.as<uint16_t>() + routing.token[static_cast<size_t>(pair)] * matrix.strides[0];
    std::memcpy(rows + pair * ld, from, static_cast<size_t>(cols) * sizeof *rows);
    std::fill(rows + pair * ld + cols, rows + (pair + 1) * ld, uint16_t{0});
  });
}

void lora_low(const Engine& engine, const Routing& routing, const RoutedCall& call, Projection projection,
              const float* rows_in, int64_t ld_in, float* low, int64_t ld_low) {
  if (ld_low == 0) return;
  const int64_t num_groups = static_cast<int64_t>(routing.groups.size());
  for_each_task(engine, num_groups, routing.num_pairs() * ld_in * ld_low, [&](int64_t g) {
    const PairRange& group = routing.groups[static_cast<size_t>(g)];
    lora_down(engine.tiles, call.slots[static_cast<size_t>(group.slot)], projection, group.expert, group.size(),
              rows_in + group.begin * ld_in, ld_in, low + group.begin * ld_low, ld_low);
  });
}

void gate_up(const Engine& engine, const Routing& routing, const RoutedCall& call, const GateUpInput& input, float* h,
             float* keep_gate, float* keep_up) {
  const Strides strides(engine.layer);
  const PackedShape shape = engine.layer.in_shape();
  for_each_block_range(
      engine, routing, shape.blocks(), 2 * shape.cols, [&](int64_t index, int64_t block, int64_t blocks) {
        static thread_local AlignedBuffer scratch;
        const PairRange& run = routing.experts[static_cast<size_t>(index)];
        const int64_t width = blocks * kBlockRows, first = block * kBlockRows;
        const int64_t count = std::min(width, shape.rows - first);
        float* sums[2];
        sums[0] = scratch.reserve<float>(2 * run.size() * width);
        sums[1] = sums[0] + run.size() * width;
        for (const Projection part : {kGate, kUp}) {
          const PackedMatrix matrix = part == kGate ? engine.layer.gate(run.expert) : engine.layer.up(run.expert);
          if (input.x_bf16) {
            engine.tiles.multiply_bf16({run.size(), input.x_bf16 + run.begin * strides.hidden, strides.hidden,
                                        matrix.panel(block), shape.pairs(), blocks, sums[part], width});
          } else {
            engine.tiles.multiply({run.size(), input.x + run.begin * strides.hidden, strides.hidden,
                                   matrix.panel(block), shape.pairs(), blocks, sums[part], width});
          }
          for_each_group_of(routing, index, [&](const PairRange& group) {
            lora_up(engine.tiles, call.slots[static_cast<size_t>(group.slot)], part, run.expert, group.size(),
                    input.low[part] + group.begin * input.ld_low, input.ld_low, first, count,
                    sums[part] + (group.begin - run.begin) * width, width);
          });
        }
        const bool last = block + blocks == shape.blocks();
        for (int64_t m = 0; m < run.size(); ++m) {
          const float *gate = sums[0] + m * width, *up = sums[1] + m * width;
          const int64_t at = (run.begin + m) * strides.inner + first;
          for (int64_t i = 0; i < count; ++i) h[at + i] = silu(gate[i]) * up[i];
          if (last) std::fill(h + at + count, h + (run.begin + m + 1) * strides.inner, 0.0f);
          if (keep_gate) std::memcpy(keep_gate + at, gate, static_cast<size_t>(count) * sizeof *gate);
          if (keep_up) std::memcpy(keep_up + at, up, static_cast<size_t>(count) * sizeof *up);
        }
      });
}

void down(const Engine& engine, const Routing& routing, const RoutedCall& call, const float* h, const float* low,
          int64_t ld_low, float* y) {
  const Strides strides(engine.layer);
  const PackedShape shape = engine.layer.out_shape();
  for_each_block_range(engine, routing, shape.blocks(), shape.cols, [&](int64_t index, int64_t block, int64_t blocks) {
    const PairRange& run = routing.experts[static_cast<size_t>(index)];
    const int64_t first = block * kBlockRows, count = std::min(blocks * kBlockRows, shape.rows - first);
    const PackedMatrix matrix = engine.layer.down(run.expert);
    engine.tiles.multiply({run.size(), h + run.begin * strides.inner, strides.inner, matrix.panel(block), shape.pairs(),
                           blocks, y + run.begin * strides.hidden + first, strides.hidden});
    for_each_group_of(routing, index, [&](const PairRange& group) {
      lora_up(engine.tiles, call.slots[static_cast<size_t>(group.slot)], kDown, run.expert, group.size(),
              low + group.begin * ld_low, ld_low, first, count, y + group.begin * strides.hidden + first,
              strides.hidden);
    });
  });
}

void multiply_transposed(const Tiles& tiles, const PackedMatrix& matrix, int64_t rows, const float* in, int64_t ld_in,
                         int64_t first, int64_t count, float* out, int64_t ld_out, bool accumulate) {
  constexpr int64_t kRowBlocks = 8, kCols = 64;  // a panel of 128 x 64 floats, 32 KiB
  alignas(64) float panel[kRowBlocks * kBlockRows * kCols];
  for (int64_t block = 0; block < matrix.shape.blocks(); block += kRowBlocks) {
    const int64_t end_block = std::min(block + kRowBlocks, matrix.shape.blocks());
    for (int64_t col = 0; col < count; col += kCols) {
      const int64_t cols = std::min(kCols, count - col);
      for (int64_t b = block; b < end_block; ++b) {
        tiles.unpack_rows(matrix.panel(b), (first + col) / 2, cols / 2, panel + (b - block) * kBlockRows * kCols,
                          kCols);
      }
      const int64_t inner = std::min(end_block * kBlockRows, matrix.shape.rows) - block * kBlockRows;
      tiles.product({rows, cols, inner, in + block * kBlockRows, ld_in, 1, panel, kCols, out + col, ld_out,
                     accumulate || block > 0});
    }
  }
}

int64_t tokens_at_once(const RoutedCall& call, int64_t floats_per_pair) {
  const int64_t per_token =
      std::max<int64_t>(1, call.ids.shape[1]) * floats_per_pair * static_cast<int64_t>(sizeof(float));
  return std::max<int64_t>(1, kScratchBytes / per_token);
}

void combine(const Engine& engine, const Routing& routing, const float* rows, int64_t ld, bool weighted,
             const TensorView& out) {
  const int64_t cols = out.shape[1];
  for_each_task(engine, routing.num_tokens, routing.num_pairs() * cols, [&](int64_t token) {
    static thread_local AlignedBuffer scratch;
    float* sum = scratch.reserve<float>(cols);
    std::fill(sum, sum + cols, 0.0f);
    for (int64_t position = 0; position < routing.top_k; ++position) {
      const int64_t pair = routing.pair_of[static_cast<size_t>(token * routing.top_k + position)];
      if (pair < 0) continue;
      const float factor = weighted ? routing.weight[static_cast<size_t>(pair)] : 1.0f;
      const float* row = rows + pair * ld;
      for (int64_t i = 0; i < cols; ++i) sum[i] += factor * row[i];
    }
    const int64_t at = (routing.first_token + token) * out.strides[0];
    if (out.dtype == DType::kBf16) {
      uint16_t* to = out.as<uint16_t>() + at;
      for (int64_t i = 0; i < cols; ++i) to[i] = float_to_bf16(sum[i]);
    } else {
      std::memcpy(out.as<float>() + at, sum, static_cast<size_t>(cols) * sizeof *sum);
    }
  });
}

}  // namespace kt
