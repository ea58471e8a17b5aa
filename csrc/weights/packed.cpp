#include "weights/packed.h"

#include <atomic>
#include <cstring>

#include "base/bf16.h"
#include "base/fp16.h"
#include "base/fp8.h"
#include "threads/topology.h"

namespace kt {
namespace {

// Byte of W[r, col] within the lines of its block; for int4 the nibble is chosen by col % 8.
int64_t byte_in_lines(Encoding encoding, int64_t r, int64_t col) {
  switch (encoding) {
    case Encoding::kBf16:
      return col / 2 * kLineBytes + (2 * r + col % 2) * 2;
    case Encoding::kFp8:
      return col / 4 * kLineBytes + 16 * (r / 4) + 8 * (col % 4 / 2) + 2 * (r % 4) + col % 2;
    case Encoding::kInt8:
      return col / 4 * kLineBytes + 4 * r + col % 4;
    case Encoding::kInt4:
      return col / 8 * kLineBytes + 4 * r + col % 4;
  }
  return 0;
}

uint64_t next_layer_id() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1) + 1;
}

}  // namespace

double decode(const PackedShape& shape, const uint8_t* packed, int64_t row, int64_t col) {
  const Block block = block_at(shape, packed, row / kBlockRows);
  const int64_t r = row % kBlockRows, g = col / shape.group();
  const Encoding encoding = shape.format.encoding;
  const uint8_t* at = block.lines + byte_in_lines(encoding, r, col);
  if (encoding == Encoding::kBf16) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return bf16_to_float(bits);
  }
  double scale = block.row_scales[r];
  if (encoding == Encoding::kFp8) {
    if (block.group_scales) scale *= static_cast<const float*>(block.group_scales)[g];
    return scale * fp8_to_float(*at);
  }
  if (block.group_scales) scale *= fp16_to_float(static_cast<const uint16_t*>(block.group_scales)[g * kBlockRows + r]);
  const int code = encoding == Encoding::kInt4 ? (col % 8 < 4 ? *at & 15 : *at >> 4) : *at;
  const auto zero = block.zeros ? block.zeros[g * kBlockRows + r] : shape.format.default_zero();
  return scale * static_cast<double>(code - zero);
}

ExpertLayer::ExpertLayer(ExpertShape shape, Format format, int num_nodes)
    : id_(next_layer_id()), shape_(shape), format_(format), num_nodes_(num_nodes) {
  const auto& system_nodes = topology().nodes;
  for (int node = 0; node < num_nodes; ++node) {
    const bool placed = num_nodes > 1 && static_cast<size_t>(node) < system_nodes.size();
    nodes_.emplace_back(static_cast<size_t>(node_bytes(node)),
                        placed ? system_nodes[static_cast<size_t>(node)].id : -1);
  }
}

int64_t ExpertLayer::first_block(Projection part, int node) const {
  return shape_of(part).blocks() * node / num_nodes_;
}

int64_t ExpertLayer::node_expert_bytes(int node) const {
  int64_t bytes = 0;
  for (const Projection part : {kGate, kUp, kDown})
    bytes += (first_block(part, node + 1) - first_block(part, node)) * shape_of(part).block_bytes();
  return bytes;
}

int64_t ExpertLayer::offset(int64_t expert, Projection part, int node) const {
  int64_t at = expert * node_expert_bytes(node);
  for (const Projection before : {kGate, kUp}) {
    if (before < part)
      at += (first_block(before, node + 1) - first_block(before, node)) * shape_of(before).block_bytes();
  }
  return at;
}

ExpertLayer::Piece ExpertLayer::piece(int64_t expert, Projection part, int node) const {
  const auto* data = static_cast<const uint8_t*>(nodes_[static_cast<size_t>(node)].data());
  const int64_t first = first_block(part, node);
  return {first, {shape_of(part), data + offset(expert, part, node), first_block(part, node + 1) - first}};
}

uint8_t* ExpertLayer::piece_data(int64_t expert, Projection part, int node) {
  return static_cast<uint8_t*>(nodes_[static_cast<size_t>(node)].data()) + offset(expert, part, node);
}

int64_t ExpertLayer::resident_bytes() const {
  int64_t bytes = 0;
  for (int node = 0; node < num_nodes(); ++node) bytes += node_bytes(node);
  return bytes;
}

int64_t ExpertLayer::weight_bytes() const {
  int64_t bits = 0;
  for (const Projection part : {kGate, kUp, kDown}) {
    const PackedShape shape = shape_of(part);
    const int64_t elements = shape.rows * shape.cols;
    const int64_t group = format_.group ? format_.group : shape.cols, groups = (shape.cols + group - 1) / group;
    switch (format_.encoding) {
      case Encoding::kBf16:
        bits += elements * 16;
        break;
      case Encoding::kFp8:
        bits += elements * 8 + (format_.group ? (shape.rows + 127) / 128 : shape.rows) * groups * 32;
        break;
      default: {
        const int64_t code_bits = format_.encoding == Encoding::kInt4 ? 4 : 8;
        bits += elements * code_bits + shape.rows * groups * (16 + (format_.zero_points ? code_bits : 0));
      }
    }
  }
  return shape_.num_experts * bits / 8;
}

}  // namespace kt
