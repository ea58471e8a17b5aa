// Reads one expert matrix in strips of rows, as plain codes, scales and zeros; checks every value on the way.
#pragma once

#include <cstdint>
#include <vector>

#include "base/memory.h"
#include "weights/packed.h"
#include "weights/scheme.h"
#include "weights/source.h"

namespace kt {

class MatrixReader {
 public:
  // The source must outlive the reader.
  MatrixReader(const Scheme& scheme, const MatrixSource& source, int64_t rows, int64_t cols);

  // Reads what belongs to the whole matrix: scales, zeros, and the codes where rows are not contiguous (GPTQ, AWQ, and
  // fused tensors stored transposed).
  Status prepare();
  // Rows [first, first + count) in the scheme's format, first and count multiples of 16 (count up to the last row).
  // `strip` is valid until the next call.
  Status read(int64_t first, int64_t count, PlainMatrix* strip);

 private:
  Status read_part(const TensorPart& part, int64_t first, int64_t count, void* to) const;
  Status check_shape() const;
  Status check_group_index() const;
  Status read_scales();
  Status read_scale_bytes();
  Status read_factor();
  Status read_zeros();
  Status read_codes(int64_t first, int64_t count);
  Status read_plain(int64_t first, int64_t count, uint16_t* values);
  Status read_dense(int64_t first, int64_t count);
  Status read_fp8(int64_t first, int64_t count);
  Status read_fp4(int64_t first, int64_t count);
  Status read_transposed();

  const Scheme& scheme_;
  const MatrixSource& source_;
  const PackedShape shape_;
  const int64_t stored_groups_;       // in a row of the checkpoint
  std::vector<float> scales_;         // [rows, shape_.groups()]
  std::vector<uint8_t> zeros_;        // the same; empty without zero points
  std::vector<uint8_t> scale_bytes_;  // the same, of formats whose scales are bytes; then `scales_` is empty
  float factor_ = 1.0f;               // of the whole matrix
  AlignedBuffer raw_, codes_;
  AlignedBuffer stored_;  // rows of which others lie between; or the whole matrix, where the tensor is transposed
};

// `rows` biases, `step` elements apart, as float32. Refuses NaN and Inf.
Status read_bias(const TensorPart& part, int64_t rows, int64_t step, float* bias);

}  // namespace kt
