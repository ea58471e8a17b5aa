// Packed weights as rows of bf16: every format, shapes around the tiles, and ranges of experts on several memory nodes.
// The bits are those of decode(), rounded once.
#include "ops/experts/unpack.h"

#include <algorithm>

#include "packed_case.h"

namespace kt_test {
namespace {

constexpr uint16_t kUntouched = 0x7fa5;  // a NaN that no weight has

uint16_t rounded(double value) { return kt::float_to_bf16(static_cast<float>(value)); }

std::string text_of(const kt::PackedShape& shape) {
  return kt::format_name(shape.format) + " [" + std::to_string(shape.rows) + ", " + std::to_string(shape.cols) + "]";
}

// All rows, then those from the second block on, into rows that lie 3 columns further apart than they are long.
void test_matrix(const kt::Tiles& tiles, const PackedCase& matrix, Report& report) {
  const auto& [rows, cols, format] = matrix.shape;
  const int64_t stride = cols + 3;
  for (int64_t block = 0; block < std::min<int64_t>(2, matrix.shape.blocks()); ++block) {
    const int64_t first = block * kt::kBlockRows, count = rows - first;
    std::vector<uint16_t> out(static_cast<size_t>((count + 1) * stride), kUntouched);
    tiles.unpack(
        {.weights = {matrix.shape, matrix.data() + block * matrix.shape.block_bytes(), matrix.shape.blocks() - block},
         .rows = count,
         .out = {out.data(), stride}});
    bool same = true, bounded = true;
    for (int64_t r = 0; r <= count; ++r) {
      for (int64_t c = 0; c < stride; ++c) {
        const uint16_t found = out[static_cast<size_t>(r * stride + c)];
        if (r < count && c < cols) {
          same = same && found == rounded(matrix.at(first + r, c));
        } else {
          bounded = bounded && found == kUntouched;
        }
      }
    }
    report.equal("unpacked " + text_of(matrix.shape) + " has other bits", same);
    report.equal("unpacking " + text_of(matrix.shape) + " writes beyond its rows", bounded);
  }
}

struct LayerCase {
  kt::ExpertShape shape;
  kt::Format format;
  std::vector<std::vector<uint16_t>> wanted[3];  // of a projection: each expert's matrix

  LayerCase(kt::ExpertShape size, kt::Format encoding, std::vector<kt::ExpertLayer*> layers, Random& random)
      : shape(size), format(encoding) {
    for (int part = 0; part < 3; ++part) {
      const kt::PackedShape packed = layers[0]->shape_of(static_cast<kt::Projection>(part));
      for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
        const PackedCase& matrix = packed_case(packed.rows, packed.cols, format, random);
        for (kt::ExpertLayer* layer : layers) pack_into(layer, matrix, expert, static_cast<kt::Projection>(part));
        auto& values = wanted[part].emplace_back();
        for (int64_t r = 0; r < packed.rows; ++r) {
          for (int64_t c = 0; c < packed.cols; ++c) values.push_back(rounded(matrix.at(r, c)));
        }
      }
    }
  }

  // Rows of gate, rows of up; expert by expert.
  std::vector<uint16_t> gate_up(kt::ExpertRange range) const {
    std::vector<uint16_t> all;
    for (int64_t expert = range.first; expert < range.first + range.count; ++expert) {
      for (const int part : {0, 1}) {
        const auto& matrix = wanted[part][static_cast<size_t>(expert)];
        all.insert(all.end(), matrix.begin(), matrix.end());
      }
    }
    return all;
  }
  std::vector<uint16_t> down(kt::ExpertRange range) const {
    std::vector<uint16_t> all;
    for (int64_t expert = range.first; expert < range.first + range.count; ++expert)
      all.insert(all.end(), wanted[2][static_cast<size_t>(expert)].begin(),
                 wanted[2][static_cast<size_t>(expert)].end());
    return all;
  }
};

void test_layers(const kt::Tiles& tiles, kt::Format format, Random& random, Report& report) {
  const kt::ExpertShape shape{5, 70, 50};
  kt::ExpertLayer one(shape, format, 1), two(shape, format, 2), four(shape, format, 4);
  const LayerCase expected(shape, format, {&one, &two, &four}, random);
  for (const kt::ExpertLayer* layer : {&one, &two, &four}) {
    for (const int threads : {1, 3}) {
      for (const kt::ExpertRange range : {kt::ExpertRange{0, 5}, {2, 1}, {3, 2}}) {
        std::vector<uint16_t> gate_up(static_cast<size_t>(range.count * 2 * 50 * 70), kUntouched);
        std::vector<uint16_t> down(static_cast<size_t>(range.count * 70 * 50), kUntouched);
        kt::unpack({*layer, tiles, threads}, range,
                   {.gate_up = tensor_view(gate_up.data(), kt::DType::kBf16, {range.count, 100, 70}),
                    .down = tensor_view(down.data(), kt::DType::kBf16, {range.count, 70, 50})});
        const std::string what = kt::format_name(format) + " on " + std::to_string(layer->num_nodes()) + " nodes";
        report.equal("gate and up of a range, " + what, gate_up == expected.gate_up(range));
        report.equal("down of a range, " + what, down == expected.down(range));
      }
    }
  }
}

// Each block is one task's, on the node that holds it.
void test_plan_of(const kt::ExpertLayer& layer, Report& report) {
  const kt::Plan plan = kt::unpacking_plan(layer, {1, 2}, 3);
  report.equal("stages of unpacking", plan.stages.size() == 2 && plan.num_threads == 3);
  for (int index = 0; index < 2; ++index) {
    const kt::Stage& stage = plan.stages[index];
    const kt::Projection part = index == 0 ? kt::kGate : kt::kDown;
    std::vector<int> seen(static_cast<size_t>(stage.items * layer.shape_of(part).blocks()), 0);
    for (int node = 0; node < stage.num_nodes; ++node) {
      const kt::Span span = layer.span(part, node);
      for (int64_t task = 0; task < stage.num_tasks(node); ++task) {
        const kt::Range range = stage.range(node, task);
        report.equal("a task reads its own node",
                     range.first >= span.first && range.first + range.count <= span.first + span.size);
        for (int64_t block = range.first; block < range.first + range.count; ++block)
          ++seen[static_cast<size_t>(range.item * layer.shape_of(part).blocks() + block)];
      }
    }
    report.equal("every block is unpacked once", std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
  }
}

}  // namespace

void test_unpack(const kt::Tiles& tiles, Report& report) {
  Random random(23);
  for (const kt::Format& format : all_formats()) {
    for (const int64_t rows : {1, 15, 16, 33}) {
      for (const int64_t cols : {1, 31, 32, 100, 255, 256, 300, 600}) {
        if (report.takes()) test_matrix(tiles, packed_case(rows, cols, format, random), report);
      }
    }
    test_layers(tiles, format, random, report);
    for (const int nodes : {1, 2, 4}) test_plan_of(kt::ExpertLayer({4, 1024, 200}, format, nodes), report);
  }
}

}  // namespace kt_test
