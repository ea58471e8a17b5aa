#include "weights/packed.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/bf16.h"
#include "base/fp16.h"
#include "base/fp8.h"
#include "kernels/generic/group_factors.h"
#include "kernels/generic/nibbles.h"
#include "threads/topology.h"

namespace kt {
namespace {

// Byte of W[r, col] within the lines of its block, for encodings of whole bytes.
int64_t byte_in_lines(Encoding encoding, int64_t r, int64_t col) {
  switch (encoding) {
    case Encoding::kBf16:
      return col / 2 * kLineBytes + (2 * r + col % 2) * 2;
    case Encoding::kFp8:
      return col / 4 * kLineBytes + 16 * (r / 4) + 8 * (col % 4 / 2) + 2 * (r % 4) + col % 2;
    default:
      return col / 4 * kLineBytes + 4 * r + col % 4;
  }
}

// The code of W[r, col] in units of nibbles.
template <Encoding kEncoding>
int code_in_nibbles(const uint8_t* lines, int64_t r, int64_t col) {
  using Unit = Nibbles<kEncoding>;
  const uint8_t* unit = lines + col / Unit::kColumns * Unit::kAllLines * kLineBytes;
  const int64_t step = col % Unit::kColumns / 4, byte = 4 * r + col % 4;
  const int both = unit[step / 2 * kLineBytes + byte], low = step % 2 ? both >> 4 : both & 15;
  if (Unit::kHighBits == 0) return low;
  return low | ((unit[Unit::kLines * kLineBytes + byte] >> (Unit::kHighBits * step)) << 4 & Unit::kHighMask);
}

int integer_level(Encoding encoding, const uint8_t* lines, int64_t r, int64_t col) {
  switch (encoding) {
    case Encoding::kInt4:
      return code_in_nibbles<Encoding::kInt4>(lines, r, col);
    case Encoding::kInt5:
      return code_in_nibbles<Encoding::kInt5>(lines, r, col);
    case Encoding::kInt6:
      return code_in_nibbles<Encoding::kInt6>(lines, r, col);
    case Encoding::kFp4:
    case Encoding::kFp4By16:
    case Encoding::kIq4:
      return levels_of_nibbles(encoding)[code_in_nibbles<Encoding::kInt4>(lines, r, col)];
    default:
      return lines[byte_in_lines(encoding, r, col)];
  }
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
  if (encoding == Encoding::kBf16) {
    uint16_t bits;
    std::memcpy(&bits, block.lines + byte_in_lines(encoding, r, col), sizeof bits);
    return bf16_to_float(bits);
  }
  double scale = block.row_scales[r];
  if (encoding == Encoding::kFp8) {
    if (shape.format.block_scales() && block.group_scales) scale *= static_cast<const float*>(block.group_scales)[g];
    if (!shape.format.block_scales()) scale *= group_scale(shape.format, block, g, r);
    return scale * fp8_to_float(block.lines[byte_in_lines(encoding, r, col)]);
  }
  const int64_t zero = block.zeros ? block.zeros[g * kBlockRows + r] : shape.format.default_zero();
  const int64_t level = integer_level(encoding, block.lines, r, col) - zero;
  const double factor = block.group_scales ? group_scale(shape.format, block, g, r) : 1.0f;
  const double value = factor * static_cast<double>(level);
  if (block.mins == nullptr) return scale * value;
  return scale * static_cast<double>(static_cast<float>(value) - group_min(shape.format, block, g, r));
}

ExpertLayer::ExpertLayer(ExpertShape shape, Format in, Format out, int num_nodes, ExpertMlp mlp)
    : id_(next_layer_id()), shape_(shape), mlp_(mlp), in_(in), out_(out), num_nodes_(num_nodes) {
  if (mlp.has_bias) biases_.resize(static_cast<size_t>(bias_offset(shape.num_experts, mlp.projections().front())));
  const auto& system_nodes = topology().nodes;
  for (int node = 0; node < num_nodes; ++node) {
    const bool placed = num_nodes > 1 && static_cast<size_t>(node) < system_nodes.size();
    nodes_.emplace_back(static_cast<size_t>(node_bytes(node)),
                        placed ? system_nodes[static_cast<size_t>(node)].id : -1);
  }
}

int64_t ExpertLayer::first_block(Projection part, int node) const {
  if (part == kGate && !mlp_.has_gate()) return 0;
  const int64_t blocks = shape_of(part).blocks();
  return std::min(blocks, (blocks + 1) / 2 * node / num_nodes_ * 2);
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

// Floats before the bias of a matrix.
int64_t ExpertLayer::bias_offset(int64_t expert, Projection part) const {
  int64_t of_expert = 0, before = 0;
  for (const Projection each : mlp_.projections()) {
    if (each == part) before = of_expert;
    of_expert += shape_of(each).padded_rows();
  }
  return expert * of_expert + before;
}

const float* ExpertLayer::bias(int64_t expert, Projection part) const {
  return mlp_.has_bias ? biases_.data() + bias_offset(expert, part) : nullptr;
}

float* ExpertLayer::bias_data(int64_t expert, Projection part) { return biases_.data() + bias_offset(expert, part); }

int64_t ExpertLayer::resident_bytes() const {
  auto bytes = static_cast<int64_t>(biases_.size() * sizeof(float));
  for (int node = 0; node < num_nodes(); ++node) bytes += node_bytes(node);
  return bytes;
}

int64_t ExpertLayer::weight_bytes() const {
  int64_t bits = 0;
  for (const Projection part : mlp_.projections()) {
    const PackedShape shape = shape_of(part);
    if (mlp_.has_bias) bits += shape.rows * 32;
    const int64_t elements = shape.rows * shape.cols;
    const Format& format = shape.format;
    const int64_t group = format.group ? format.group : shape.cols, groups = (shape.cols + group - 1) / group;
    switch (format.encoding) {
      case Encoding::kBf16:
        bits += elements * 16;
        break;
      case Encoding::kFp8:
        bits += elements * 8;
        if (format.block_scales()) bits += (format.group ? (shape.rows + 127) / 128 : shape.rows) * groups * 32;
        if (!format.block_scales()) bits += shape.rows * groups * 8;
        break;
      default: {
        static constexpr int64_t kCodeBits[] = {16, 8, 8, 4, 5, 6, 4, 4, 4};
        const int64_t code_bits = kCodeBits[static_cast<int>(format.encoding)];
        const int64_t scale_bits = format.scales == Scales::kHalf ? 16 : 8;
        const int64_t zero_bits = format.mins ? 8 : format.zero_points ? code_bits : 0;
        bits += elements * code_bits + shape.rows * groups * (scale_bits + zero_bits);
        if (format.scales == Scales::kByte) bits += shape.rows * shape.supers() * (format.mins ? 32 : 16);
      }
    }
  }
  return shape_.num_experts * bits / 8;
}

}  // namespace kt
