// One weight matrix in the packed layout, and the experts of one layer.
//
// A format that is stored otherwise (int4, fp8) differs only here: its `panel` unpacks into the caller's scratch what
// bf16 returns as it lies.
#pragma once

#include <cstdint>
#include <memory>

#include "base/memory.h"
#include "kernels/layout.h"

namespace kt {

struct PackedMatrix {
  PackedShape shape;
  const uint16_t* data;

  // The blocks from `block` on, in the layout of layout.h.
  const uint16_t* panel(int64_t block) const { return data + block * shape.block_elements(); }
};

// Copies rows of 16-bit values, `row_stride` apart, into the packed layout; padding becomes zero.
// Returns the index (row * cols + col) of the first value that is not finite, or -1.
int64_t pack_bf16(const uint16_t* rows, int64_t row_stride, PackedShape shape, uint16_t* packed);

// The inverse: plain rows, without padding.
void unpack_bf16(const PackedMatrix& matrix, uint16_t* rows);

struct ExpertShape {
  int64_t num_experts = 0, hidden = 0, intermediate = 0;
};

// The routed experts of one layer: per expert gate, up and down, one after another in one allocation. Never changes
// after loading, so calls from several threads need no lock.
class ExpertLayer {
 public:
  explicit ExpertLayer(ExpertShape shape);

  const ExpertShape& shape() const { return shape_; }
  PackedShape in_shape() const { return {shape_.intermediate, shape_.hidden}; }   // gate and up
  PackedShape out_shape() const { return {shape_.hidden, shape_.intermediate}; }  // down

  PackedMatrix gate(int64_t expert) const { return {in_shape(), gate_data(expert)}; }
  PackedMatrix up(int64_t expert) const { return {in_shape(), up_data(expert)}; }
  PackedMatrix down(int64_t expert) const { return {out_shape(), down_data(expert)}; }

  uint16_t* gate_data(int64_t expert) const { return base() + expert * expert_elements(); }
  uint16_t* up_data(int64_t expert) const { return gate_data(expert) + in_shape().elements(); }
  uint16_t* down_data(int64_t expert) const { return up_data(expert) + in_shape().elements(); }

  int64_t resident_bytes() const { return shape_.num_experts * expert_elements() * 2; }
  int64_t weight_bytes() const { return shape_.num_experts * shape_.hidden * shape_.intermediate * 3 * 2; }
  const void* bytes() const { return data_.data(); }

 private:
  int64_t expert_elements() const { return 2 * in_shape().elements() + out_shape().elements(); }
  uint16_t* base() const { return static_cast<uint16_t*>(data_.data()); }

  ExpertShape shape_;
  AlignedBuffer data_;
};

}  // namespace kt
