// pack_blocks: rows of a matrix -> blocks of 16 rows. A block's lines are transposed 32-bit words: word i of line l
// holds row i's codes in the columns of the line. Each row first becomes words (two bf16, four bytes or eight nibbles;
// of some encodings words of high bits), then 16 rows of words are transposed. For fp8 the halves of four neighbouring
// rows' words are exchanged in between.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/fp16.h"
#include "kernels/generic/nibbles.h"
#include "weights/packed.h"

namespace kt {
namespace {

// Four words, the most that any x86-64 or ARM handles at once.
using Quad = uint32_t __attribute__((vector_size(16)));

Quad load(const uint32_t* from) {
  Quad value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
void store(uint32_t* to, Quad value) { std::memcpy(to, &value, sizeof value); }

class BlockPacker {
 public:
  explicit BlockPacker(const PlainMatrix& matrix)
      : matrix_(matrix),
        shape_(matrix.shape),
        encoding_(shape_.format.encoding),
        num_lines_(shape_.lines(shape_.padded_cols())),
        stride_(num_lines_ + kLineBytes / 4),  // rows a power of two apart would share cache sets
        words_(static_cast<size_t>(kBlockRows * stride_)),
        padded_(static_cast<size_t>(shape_.padded_cols() * (encoding_ == Encoding::kBf16 ? 2 : 1))) {}

  void pack(int64_t block, uint8_t* base) {
    std::memset(base, 0, static_cast<size_t>(shape_.line_offset()));
    for (int64_t r = 0; r < kBlockRows; ++r) {
      const int64_t row = block * kBlockRows + r;
      if (row < shape_.rows) {
        if (matrix_.scales) pack_scales(row, r, base);
        if (matrix_.scale_bytes) pack_scale_bytes(row, r, base);
        if (matrix_.zeros) pack_zeros(row, r, base);
        if (matrix_.supers) pack_supers(row, r, base);
      }
      make_words(row, words_.data() + r * stride_);
    }
    if (encoding_ == Encoding::kFp8) exchange_halves();
    transpose(reinterpret_cast<uint32_t*>(base + shape_.line_offset()));
  }

 private:
  void make_words(int64_t row, uint32_t* words) {
    const int64_t element = encoding_ == Encoding::kBf16 ? 2 : 1;
    const auto* codes = static_cast<const uint8_t*>(matrix_.codes) + row * shape_.cols * element;
    if (row >= shape_.rows || shape_.cols < shape_.padded_cols()) codes = pad_row(row, codes, element);
    switch (encoding_) {
      case Encoding::kInt4:
      case Encoding::kFp4:
      case Encoding::kFp4By16:
      case Encoding::kIq4:
        return make_nibbles<Encoding::kInt4>(codes, words);
      case Encoding::kInt5:
        return make_nibbles<Encoding::kInt5>(codes, words);
      case Encoding::kInt6:
        return make_nibbles<Encoding::kInt6>(codes, words);
      default:
        std::memcpy(words, codes, static_cast<size_t>(num_lines_) * 4);
    }
  }

  template <Encoding kEncoding>
  void make_nibbles(const uint8_t* codes, uint32_t* words) const {
    using Unit = Nibbles<kEncoding>;
    const auto word_at = [](const uint8_t* from) {
      uint32_t word;
      std::memcpy(&word, from, sizeof word);
      return word;
    };
    const uint8_t* end = codes + shape_.padded_cols();
    for (; codes < end; codes += Unit::kColumns, words += Unit::kAllLines) {
      uint32_t high = 0;
      for (int step = 0; step < 2 * Unit::kLines; ++step) {
        const uint32_t four = word_at(codes + 4 * step);
        if (step % 2 == 0) words[step / 2] = four & 0x0f0f0f0fu;
        if (step % 2 == 1) words[step / 2] |= (four & 0x0f0f0f0fu) << 4;
        if (Unit::kHighBits)
          high |= (four >> 4 & (Unit::kHighBits == 1 ? 0x01010101u : 0x03030303u)) << (Unit::kHighBits * step);
      }
      if (Unit::kHighBits) words[Unit::kLines] = high;
    }
  }

  // Codes of columns beyond the matrix, and of rows beyond it, decode to zero.
  const uint8_t* pad_row(int64_t row, const uint8_t* codes, int64_t element) {
    const bool real = row < shape_.rows;
    const int64_t from = real ? shape_.cols : 0;
    if (real) std::memcpy(padded_.data(), codes, static_cast<size_t>(from * element));
    if (!shape_.format.integer()) {
      std::memset(padded_.data() + from * element, 0, padded_.size() - static_cast<size_t>(from * element));
      return padded_.data();
    }
    for (int64_t col = from; col < shape_.padded_cols(); ++col)
      padded_[static_cast<size_t>(col)] = zero_of(row, col / shape_.group());
    return padded_.data();
  }

  uint8_t zero_of(int64_t row, int64_t group) const {
    if (is_fp4(encoding_)) return 0;
    if (encoding_ == Encoding::kIq4) return 8;  // the value 1: there is no 0
    if (!shape_.format.zero_points) return static_cast<uint8_t>(shape_.format.default_zero());
    return row < shape_.rows ? matrix_.zeros[row * shape_.groups() + group] : 0;
  }

  // Words of rows 4 q ... 4 q + 3 -> low halves of the first and second, of the third and fourth, high halves likewise.
  void exchange_halves() {
    for (int64_t quarter = 0; quarter < kBlockRows / 4; ++quarter) {
      uint32_t* a = words_.data() + 4 * quarter * stride_;
      uint32_t *b = a + stride_, *c = b + stride_, *d = c + stride_;
      for (int64_t line = 0; line < num_lines_; ++line) {
        const uint32_t wa = a[line], wb = b[line], wc = c[line], wd = d[line];
        a[line] = (wa & 0xffffu) | wb << 16;
        b[line] = (wc & 0xffffu) | wd << 16;
        c[line] = wa >> 16 | (wb & 0xffff0000u);
        d[line] = wc >> 16 | (wd & 0xffff0000u);
      }
    }
  }

  void transpose(uint32_t* lines) const {
    constexpr int64_t kChunk = 64;  // lines that stay in the L1 cache for all four quarters
    for (int64_t begin = 0; begin < num_lines_; begin += kChunk) {
      const int64_t end = std::min(num_lines_, begin + kChunk);
      for (int64_t quarter = 0; quarter < kBlockRows / 4; ++quarter) {
        const uint32_t* rows = words_.data() + 4 * quarter * stride_;
        int64_t line = begin;
        for (; line + 4 <= end; line += 4) transpose_four(rows + line, lines + line * kBlockRows + 4 * quarter);
        for (; line < end; ++line) {
          for (int64_t r = 0; r < 4; ++r) lines[line * kBlockRows + 4 * quarter + r] = rows[r * stride_ + line];
        }
      }
    }
  }

  void transpose_four(const uint32_t* from, uint32_t* to) const {
    const Quad a = load(from), b = load(from + stride_), c = load(from + 2 * stride_), d = load(from + 3 * stride_);
    const Quad ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Quad cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    store(to, __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
    store(to + kBlockRows, __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
    store(to + 2 * kBlockRows, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
    store(to + 3 * kBlockRows, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
  }

  // Bytes as they are.
  void pack_scale_bytes(int64_t row, int64_t r, uint8_t* base) const {
    const int64_t groups = shape_.groups();
    reinterpret_cast<float*>(base)[r] = matrix_.factor;
    uint8_t* to = base + shape_.row_scale_bytes();
    for (int64_t g = 0; g < groups; ++g) to[g * kBlockRows + r] = matrix_.scale_bytes[row * groups + g];
  }

  void pack_supers(int64_t row, int64_t r, uint8_t* base) const {
    const int64_t supers = shape_.supers();
    uint8_t* to = base + shape_.row_scale_bytes() + shape_.group_scale_bytes() + shape_.zero_bytes();
    for (const uint16_t* from : {matrix_.supers, matrix_.min_supers}) {
      for (int64_t i = 0; from && i < supers; ++i)
        reinterpret_cast<uint16_t*>(to)[i * kBlockRows + r] = from[row * supers + i];
      to += shape_.super_bytes();
    }
  }

  void pack_scales(int64_t row, int64_t r, uint8_t* base) const {
    const int64_t groups = shape_.groups();
    const float* scales = matrix_.scales + row * groups;
    auto* row_scales = reinterpret_cast<float*>(base);
    uint8_t* group_scales = base + shape_.row_scale_bytes();
    if (shape_.format.group == 0) {
      row_scales[r] = scales[0];
      return;
    }
    if (encoding_ == Encoding::kFp8) {
      row_scales[r] = 1.0f;
      if (r == 0) std::memcpy(group_scales, scales, static_cast<size_t>(groups) * sizeof(float));
      return;
    }
    row_scales[r] = all_halves(scales, groups) ? 1.0f : row_unit(scales, groups);
    auto* halves = reinterpret_cast<uint16_t*>(group_scales);
    for (int64_t g = 0; g < groups; ++g) halves[g * kBlockRows + r] = float_to_fp16(scales[g] / row_scales[r]);
  }

  static bool all_halves(const float* scales, int64_t count) {
    return std::all_of(scales, scales + count,
                       [](float scale) { return fp16_to_float(float_to_fp16(scale)) == scale; });
  }

  // A power of two that brings the row's largest scale to [2^14, 2^15), where float16 has most room below.
  static float row_unit(const float* scales, int64_t count) {
    float largest = 0.0f;
    for (int64_t g = 0; g < count; ++g) largest = std::max(largest, std::fabs(scales[g]));
    if (largest == 0.0f) return 1.0f;
    int exponent;
    std::frexp(largest, &exponent);
    return std::ldexp(1.0f, std::max(exponent - 15, -126));
  }

  void pack_zeros(int64_t row, int64_t r, uint8_t* base) const {
    uint8_t* zeros = base + shape_.row_scale_bytes() + shape_.group_scale_bytes();
    const int64_t groups = shape_.groups();
    for (int64_t g = 0; g < groups; ++g) zeros[g * kBlockRows + r] = matrix_.zeros[row * groups + g];
  }

  const PlainMatrix& matrix_;
  const PackedShape shape_;
  const Encoding encoding_;
  const int64_t num_lines_, stride_;
  std::vector<uint32_t> words_;
  std::vector<uint8_t> padded_;
};

}  // namespace

void pack_blocks(const PlainMatrix& matrix, int64_t block, int64_t count, uint8_t* packed) {
  BlockPacker packer(matrix);
  for (int64_t b = 0; b < count; ++b) packer.pack(block + b, packed + b * matrix.shape.block_bytes());
}

}  // namespace kt
