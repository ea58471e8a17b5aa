// Float rows -> integer codes, while loading. Scales are rounded to their stored precision before the codes are
// computed.
#pragma once

#include <cstdint>
#include <vector>

#include "weights/packed.h"

namespace kt {

// One scale: largest magnitude / 127. Codes have 128 added. A row of zeros has scale 0. `cols`: a multiple of 32.
void quantize_int8(const float* row, int64_t cols, uint8_t* codes, float* scale);

// A scale for each 32 columns, with 11 significant bits: the candidate with the least squared error. Codes have 8
// added. A group of zeros has scale 0. `cols`: a multiple of 32.
void quantize_int4(const float* row, int64_t cols, uint8_t* codes, float* scales);

inline constexpr int64_t kInt4Group = 32;

// Strips of a bf16 or fp8 matrix -> the same rows in int8 without groups or int4 in groups of 32.
class StripQuantizer {
 public:
  explicit StripQuantizer(Format format) : format_(format) {}
  // The result is valid until the next call.
  PlainMatrix quantized(const PlainMatrix& strip);

 private:
  const Format format_;
  std::vector<float> row_, scales_;
  std::vector<uint8_t> codes_;
};

}  // namespace kt
