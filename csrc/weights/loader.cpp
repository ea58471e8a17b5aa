#include "weights/loader.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

#include "threads/pool.h"
#include "weights/gguf_layer.h"
#include "weights/quantize.h"
#include "weights/reader.h"
#include "weights/scheme.h"
#include "weights/source.h"

namespace kt {
namespace {

// Codes that are read, checked and packed at a time: they stay in the L2 cache.
constexpr int64_t kStripBytes = 256 << 10;

// The packed format: the scheme's own, or the requested one.
Status choose_format(const Scheme& scheme, const std::string& prefix, const std::string& wanted, Format* format) {
  *format = scheme.format();
  if (wanted.empty()) return {};
  const bool int8 = wanted == "int8";
  if (!int8 && wanted != "int4")
    return {StatusCode::kUnknownName, "unknown expert format '" + wanted + "'; known: int4, int8"};
  if (scheme.integer())
    return invalid_value("expert format '" + wanted + "' quantizes bf16 and fp8 checkpoints, but the experts under '" +
                         prefix + "' are " + format_name(*format) + " already: leave the expert format out");
  *format = int8 ? Format{.encoding = Encoding::kInt8} : Format{.encoding = Encoding::kInt4, .group = kInt4Group};
  return {};
}

// Reads the part of the matrix that lies on a node, strip by strip, into its piece.
Status load_piece(const Scheme& scheme, const MatrixSource& source, int64_t expert, Projection part, int node,
                  ExpertLayer& layer) {
  const PackedShape shape = layer.shape_of(part);
  MatrixReader reader(scheme, source, shape.rows, shape.cols);
  KT_RETURN_IF_ERROR(reader.prepare());
  std::optional<StripQuantizer> quantizer;
  if (!(scheme.format() == shape.format)) quantizer.emplace(shape.format);
  const int64_t row_bytes = shape.cols * (scheme.storage == Storage::kDense ? 2 : 1);
  const int64_t strip_blocks = std::max<int64_t>(1, kStripBytes / (row_bytes * kBlockRows));
  if (node == 0 && layer.mlp().has_bias)
    KT_RETURN_IF_ERROR(read_bias(source.bias, shape.rows, source.row_step, layer.bias_data(expert, part)));
  const ExpertLayer::Piece piece = layer.piece(expert, part, node);
  for (int64_t block = 0; block < piece.blocks.blocks; block += strip_blocks) {
    const int64_t count = std::min(strip_blocks, piece.blocks.blocks - block);
    const int64_t first_row = (piece.first + block) * kBlockRows;
    PlainMatrix strip;
    KT_RETURN_IF_ERROR(reader.read(first_row, std::min(count * kBlockRows, shape.rows - first_row), &strip));
    if (quantizer) strip = quantizer->quantized(strip);
    pack_blocks(strip, 0, count, layer.piece_data(expert, part, node) + block * shape.block_bytes());
  }
  return {};
}

// The error of the first matrix in order, regardless of which thread failed first.
class FirstError {
 public:
  bool skips(int64_t task) {
    std::lock_guard lock(mutex_);
    return !error_.ok() && task > task_;
  }
  void add(int64_t task, Status error) {
    std::lock_guard lock(mutex_);
    if (!error_.ok() && task > task_) return;
    task_ = task;
    error_ = std::move(error);
  }
  const Status& error() const { return error_; }

 private:
  std::mutex mutex_;
  int64_t task_ = 0;
  Status error_;
};

// The shape of the layer, which may have a part of the table's experts.
Status shape_of_layer(const ExpertShape& table, const LoadOptions& options, ExpertShape* shape) {
  *shape = table;
  if (options.num_experts == 0) return {};
  const int64_t end = options.first_expert + options.num_experts;
  if (options.first_expert < 0 || options.num_experts < 0 || end > table.num_experts)
    return invalid_value("experts " + std::to_string(options.first_expert) + " to " + std::to_string(end - 1) +
                         " are no part of " + std::to_string(table.num_experts));
  shape->num_experts = options.num_experts;
  return {};
}

// load(expert, part, node, layer) for every piece of the layer.
template <class Load>
Status load_pieces(const LoadOptions& options, std::shared_ptr<ExpertLayer> loaded, Load load,
                   std::shared_ptr<ExpertLayer>* layer) {
  FirstError first_error;
  run(loading_plan(loaded->shape().num_experts, options), [&](int, const Range& range) {
    const int64_t matrix = range.item, order = matrix * options.num_nodes + range.node;
    if (first_error.skips(order)) return;
    const auto part = static_cast<Projection>(matrix % kNumProjections);
    if (part == kGate && !loaded->mlp().has_gate()) return;
    Status status = load(matrix / kNumProjections, part, range.node, *loaded);
    if (!status.ok()) first_error.add(order, std::move(status));
  });
  KT_RETURN_IF_ERROR(first_error.error());
  *layer = std::move(loaded);
  return {};
}

Status load_gguf_layer(const Checkpoint& checkpoint, const std::string& prefix, const ExpertTable& table,
                       const LoadOptions& options, std::shared_ptr<ExpertLayer>* layer) {
  GgufLayer source;
  KT_RETURN_IF_ERROR(GgufLayer::open(checkpoint, prefix, table, &source));
  if (!options.format.empty())
    return invalid_value("expert format '" + options.format +
                         "' quantizes bf16 and fp8 checkpoints, but the experts "
                         "under '" +
                         prefix + "' are served as the GGUF file has them: leave the expert format out");
  ExpertShape shape;
  KT_RETURN_IF_ERROR(shape_of_layer(table.shape, options, &shape));
  return load_pieces(
      options,
      std::make_shared<ExpertLayer>(shape, source.in_format(), source.out_format(), options.num_nodes, table.mlp),
      [&](int64_t expert, Projection part, int node, ExpertLayer& into) {
        return source.load_piece(options.first_expert + expert, expert, part, node, into);
      },
      layer);
}

}  // namespace

Plan loading_plan(int64_t num_experts, const LoadOptions& options) {
  Stage stage = stage_of(0, num_experts * kNumProjections);
  stage.num_nodes = options.num_nodes;
  for (int node = 0; node < options.num_nodes; ++node) stage.spans[node] = {node, 1};
  stage.bound = options.num_nodes > 1;
  Plan plan;
  plan.num_threads = options.num_threads;
  plan.stages.push_back(stage);
  return plan;
}

Status load_layer(const Checkpoint& checkpoint, const std::string& prefix, const ExpertTable& table,
                  const LoadOptions& options, std::shared_ptr<ExpertLayer>* layer) {
  if (GgufLayer::is_there(checkpoint, prefix)) return load_gguf_layer(checkpoint, prefix, table, options, layer);
  Scheme scheme;
  Format format;
  KT_RETURN_IF_ERROR(find_scheme(checkpoint, prefix, table, &scheme));
  KT_RETURN_IF_ERROR(choose_format(scheme, prefix, options.format, &format));
  ExpertShape shape;
  KT_RETURN_IF_ERROR(shape_of_layer(table.shape, options, &shape));
  std::vector<MatrixSource> sources(static_cast<size_t>(shape.num_experts * kNumProjections));
  const auto source_of = [&](int64_t expert, Projection part) -> MatrixSource& {
    return sources[static_cast<size_t>(expert * kNumProjections + part)];
  };
  for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
    const int64_t stored = options.first_expert + expert;
    for (const Projection part : table.mlp.projections())
      KT_RETURN_IF_ERROR(locate(checkpoint, prefix, scheme, table, stored, part, &source_of(expert, part)));
  }
  return load_pieces(
      options, std::make_shared<ExpertLayer>(shape, format, options.num_nodes, table.mlp),
      [&](int64_t expert, Projection part, int node, ExpertLayer& into) {
        return load_piece(scheme, source_of(expert, part), expert, part, node, into);
      },
      layer);
}

}  // namespace kt
