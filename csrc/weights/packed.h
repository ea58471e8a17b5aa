// Weight matrices in the packed layout (kernels/layout.h): one, that of a linear layer, and the experts of one layer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/memory.h"
#include "kernels/activation.h"
#include "kernels/layout.h"
#include "kernels/tiles.h"
#include "threads/plan.h"

namespace kt {

enum Projection { kGate = 0, kUp = 1, kDown = 2 };
inline constexpr int kNumProjections = 3;
inline constexpr const char* kProjectionNames[] = {"gate", "up", "down"};
inline constexpr Projection kProjections[] = {kGate, kUp, kDown};

// A matrix before it is packed, row by row without padding.
struct PlainMatrix {
  PackedShape shape;
  const void* codes;     // [rows, cols]: bf16 bits (uint16_t), else one byte an element: fp8 bits or the integer code
  const float* scales;   // [rows, groups]: W = scale * (code - zero); null for bf16. For fp8 all rows of a block agree
                         // where the format has a group
  const uint8_t* zeros;  // [rows, groups]: zeros, or minima; null where the format stores none
  // Formats whose scales are bytes, exponents or fp8, instead of `scales`: [rows, groups], and with bytes float16 bits
  // [rows, supers] of scales and minima (null without minima). `factor`: of the whole matrix.
  const uint8_t* scale_bytes = nullptr;
  const uint16_t *supers = nullptr, *min_supers = nullptr;
  float factor = 1.0f;
};

// Writes blocks [block, block + count) to `packed`, the place of the first of them. Integer group scales are kept as
// float16, where all of a row are such numbers; otherwise as float16 times a power of two for the row: exact for scales
// that the checkpoint stores as bfloat16 and that lie within a factor of 2^20 of the row's largest.
void pack_blocks(const PlainMatrix& matrix, int64_t block, int64_t count, uint8_t* packed);

// W[row, col] with the value that the kernels multiply. For tests, exports and errors; slow.
double decode(const PackedShape& shape, const uint8_t* packed, int64_t row, int64_t col);

// The matrix of a linear layer [rows, cols], in parts below each other. A fused layer has a part for each of its
// tensors, which may differ in format.
// Never changes after loading. A copy, also one of fewer parts, shares the memory.
class PackedMatrix {
 public:
  static constexpr int kMostParts = 3;

  struct Part {
    int64_t first_row;  // of the matrix
    PackedBlocks blocks;

    const PackedShape& shape() const { return blocks.shape; }
  };

  // Shapes of one number of columns, a multiple of kColumnUnit; at most kMostParts. Contents are undefined.
  explicit PackedMatrix(const std::vector<PackedShape>& shapes) {
    int64_t bytes = 0, row = 0;
    for (const PackedShape& shape : shapes) bytes += shape.bytes();
    memory_ = std::make_shared<AlignedBuffer>(static_cast<size_t>(bytes));
    const auto* data = static_cast<const uint8_t*>(memory_->data());
    for (const PackedShape& shape : shapes) {
      parts_.push_back({row, {.shape = shape, .data = data, .blocks = shape.blocks()}});
      row += shape.rows;
      data += shape.bytes();
    }
  }

  const std::vector<Part>& parts() const { return parts_; }
  int64_t rows() const { return parts_.back().first_row + parts_.back().shape().rows; }
  int64_t cols() const { return parts_.front().shape().cols; }
  // Of all parts, which are one run of memory.
  const uint8_t* data() const { return parts_.front().blocks.data; }
  int64_t bytes() const {
    const PackedBlocks& last = parts_.back().blocks;
    return last.data + last.shape.bytes() - data();
  }
  uint8_t* part_data(size_t part) {  // while loading
    return static_cast<uint8_t*>(memory_->data()) +
           (parts_[part].blocks.data - static_cast<const uint8_t*>(memory_->data()));
  }

  // Parts [first, first + count): at least one.
  PackedMatrix slice(size_t first, size_t count) const {
    PackedMatrix made = *this;
    const auto begin = parts_.begin() + static_cast<std::ptrdiff_t>(first);
    made.parts_.assign(begin, begin + static_cast<std::ptrdiff_t>(count));
    for (Part& part : made.parts_) part.first_row -= parts_[first].first_row;
    return made;
  }

 private:
  std::vector<Part> parts_;
  std::shared_ptr<AlignedBuffer> memory_;
};

struct ExpertShape {
  int64_t num_experts = 0, hidden = 0, intermediate = 0;
};

// What an expert computes beside its products: down(f(gate(x), up(x))), where each matrix may have a bias. Without a
// gate (activation.h) there is no such matrix.
struct ExpertMlp {
  Activation activation{};
  bool has_bias = false;  // of every matrix

  bool has_gate() const { return activation.has_gate(); }
  // The matrices that multiply x, and all.
  std::span<const Projection> inputs() const { return {kProjections + (has_gate() ? 0 : 1), kProjections + 2}; }
  std::span<const Projection> projections() const { return {kProjections + (has_gate() ? 0 : 1), kProjections + 3}; }
};

// The routed experts of one layer, packed. With several memory nodes each holds a range of every matrix's blocks, so
// that a thread of that node reads from its own memory. Ranges begin at even blocks, because AMX adds up the rows of
// two blocks before they join a sum. Never changes after loading: calls from several threads need no lock.
class ExpertLayer {
 public:
  // Blocks [first, first + blocks.blocks) of a matrix.
  struct Piece {
    int64_t first;
    PackedBlocks blocks;
  };

  ExpertLayer(ExpertShape shape, Format format, int num_nodes, ExpertMlp mlp = {})
      : ExpertLayer(shape, format, format, num_nodes, mlp) {}
  // `in`: of gate and up; `out`: of down. Both integer, or equal.
  ExpertLayer(ExpertShape shape, Format in, Format out, int num_nodes, ExpertMlp mlp = {});

  // Unique in this process, also among destroyed layers.
  uint64_t id() const { return id_; }
  const ExpertShape& shape() const { return shape_; }
  const ExpertMlp& mlp() const { return mlp_; }
  bool integer() const { return in_.integer(); }
  int num_nodes() const { return num_nodes_; }
  PackedShape in_shape() const { return {shape_.intermediate, shape_.hidden, in_}; }    // gate and up
  PackedShape out_shape() const { return {shape_.hidden, shape_.intermediate, out_}; }  // down
  PackedShape shape_of(Projection part) const { return part == kDown ? out_shape() : in_shape(); }

  Span span(Projection part, int node) const {
    return {first_block(part, node), first_block(part, node + 1) - first_block(part, node)};
  }
  Piece piece(int64_t expert, Projection part, int node) const;
  uint8_t* piece_data(int64_t expert, Projection part, int node);  // while loading
  // The bias of an expert's matrix: float32, with zeros from the last output to shape_of(part).padded_rows(). Null
  // where the experts have none.
  const float* bias(int64_t expert, Projection part) const;
  float* bias_data(int64_t expert, Projection part);  // while loading

  int64_t resident_bytes() const;
  // Packed matrices; biases are of no node.
  int64_t node_bytes(int node) const { return shape_.num_experts * node_expert_bytes(node); }
  // Bytes of the weights in this format without padding: codes, scales, zeros and biases as a checkpoint stores them
  // (biases: four bytes each).
  int64_t weight_bytes() const;

 private:
  int64_t first_block(Projection part, int node) const;
  int64_t node_expert_bytes(int node) const;
  int64_t offset(int64_t expert, Projection part, int node) const;
  int64_t bias_offset(int64_t expert, Projection part) const;

  uint64_t id_;
  ExpertShape shape_;
  ExpertMlp mlp_;
  Format in_, out_;
  int num_nodes_;
  std::vector<Pages> nodes_;
  std::vector<float> biases_;  // expert by expert, matrix by matrix
};

}  // namespace kt
