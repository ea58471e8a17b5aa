// The matrix of a linear layer [rows, cols] in the packed layout (kernels/layout.h), in parts below each other. A fused
// layer has a part for each of its tensors, which may differ in format.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.h"
#include "kernels/tiles.h"

namespace kt {

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

}  // namespace kt
