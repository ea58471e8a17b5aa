#include "weights/reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/bf16.h"
#include "base/fp16.h"
#include "base/fp8.h"
#include "weights/checkpoint/unpack.h"

namespace kt {
namespace {

// Beyond it a weight would overflow float32 in the arithmetic.
constexpr float kScaleLimit = 1e30f;

int64_t element_bytes(const TensorPart& part) {
  const std::string& dtype = part.tensor.entry->dtype;
  return dtype == "I64" ? 8 : dtype == "F32" || dtype == "I32" ? 4 : dtype == "BF16" || dtype == "F16" ? 2 : 1;
}

Status bad_element(const TensorPart& part, const std::string& what, int64_t element) {
  return bad_checkpoint(part.where() + " holds " + what + " at element " + std::to_string(part.first + element));
}

// Stored rows from the first to the last of `count`, `step` apart.
int64_t rows_between(int64_t count, int64_t step) { return (count - 1) * step + 1; }

// Every `step`-th row.
template <class T>
void take_rows(const T* stored, int64_t count, int64_t cols, int64_t step, T* rows) {
  for (int64_t row = 0; step > 1 && row < count; ++row)
    std::memcpy(rows + row * cols, stored + row * step * cols, static_cast<size_t>(cols) * sizeof(T));
}

// The position, in codes, of row `row` of eight (or, with 8 bits, four) in its word.
int64_t place_in_word(const Scheme& scheme, int64_t row) {
  static constexpr int kAwqPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const int64_t at = row % scheme.codes_per_word();
  return scheme.storage == Storage::kAwq ? kAwqPlace[at] : at;
}

}  // namespace

MatrixReader::MatrixReader(const Scheme& scheme, const MatrixSource& source, int64_t rows, int64_t cols)
    : scheme_(scheme),
      source_(source),
      shape_{rows, cols, scheme.format()},
      stored_groups_(scheme.group ? (cols + scheme.group - 1) / scheme.group : 1) {}

// `count` elements of the part from `first` on.
Status MatrixReader::read_part(const TensorPart& part, int64_t first, int64_t count, void* to) const {
  const int64_t bytes = element_bytes(part);
  return part.tensor.file->read(*part.tensor.entry, (part.first + first) * bytes, count * bytes, to);
}

Status MatrixReader::prepare() {
  if (source_.shape.present()) KT_RETURN_IF_ERROR(check_shape());
  if (source_.group_index.present()) KT_RETURN_IF_ERROR(check_group_index());
  if (source_.scales.present()) {
    const bool bytes = shape_.format.scales != Scales::kHalf;
    KT_RETURN_IF_ERROR(bytes ? read_scale_bytes() : read_scales());
  }
  if (source_.global.present()) KT_RETURN_IF_ERROR(read_factor());
  if (source_.zeros.present()) KT_RETURN_IF_ERROR(read_zeros());
  if (scheme_.layout.transposed) return read_transposed();
  if (scheme_.storage != Storage::kGptq && scheme_.storage != Storage::kAwq) return {};
  const int64_t words = shape_.rows * shape_.cols / scheme_.codes_per_word();
  return read_part(source_.codes, 0, words, raw_.reserve<uint32_t>(words));
}

Status MatrixReader::check_shape() const {
  int64_t wide[2];
  if (element_bytes(source_.shape) == 8) {
    KT_RETURN_IF_ERROR(read_part(source_.shape, 0, 2, wide));
  } else {
    int32_t narrow[2];
    KT_RETURN_IF_ERROR(read_part(source_.shape, 0, 2, narrow));
    std::copy(narrow, narrow + 2, wide);
  }
  if (wide[0] == shape_.rows && wide[1] == shape_.cols) return {};
  return bad_checkpoint(source_.shape.where() + " holds [" + std::to_string(wide[0]) + ", " + std::to_string(wide[1]) +
                        "], expected [" + std::to_string(shape_.rows) + ", " + std::to_string(shape_.cols) + "]");
}

Status MatrixReader::check_group_index() const {
  std::vector<int32_t> index(static_cast<size_t>(shape_.cols));
  KT_RETURN_IF_ERROR(read_part(source_.group_index, 0, shape_.cols, index.data()));
  const int64_t group = scheme_.group ? scheme_.group : shape_.cols;
  for (int64_t col = 0; col < shape_.cols; ++col) {
    if (index[static_cast<size_t>(col)] == col / group) continue;
    return bad_checkpoint(source_.group_index.where() + " puts column " + std::to_string(col) + " into group " +
                          std::to_string(index[static_cast<size_t>(col)]) + ", expected " +
                          std::to_string(col / group) +
                          ": columns in the order of their activations (desc_act) are not supported");
  }
  return {};
}

Status MatrixReader::read_scales() {
  const bool blocks = scheme_.storage == Storage::kFp8Blocks;
  const bool transposed = scheme_.storage == Storage::kGptq || scheme_.storage == Storage::kAwq;
  const int64_t last_row = source_.first_row + (shape_.rows - 1) * source_.row_step;
  const int64_t stored_rows = blocks ? last_row / kFp8Block + 1 : shape_.rows;
  const int64_t count = stored_rows * stored_groups_;
  std::vector<float> stored(static_cast<size_t>(count));
  if (element_bytes(source_.scales) == 4) {
    KT_RETURN_IF_ERROR(read_part(source_.scales, 0, count, stored.data()));
  } else {
    std::vector<uint16_t> narrow(static_cast<size_t>(count));
    KT_RETURN_IF_ERROR(read_part(source_.scales, 0, count, narrow.data()));
    const auto widen = source_.scales.tensor.entry->dtype == "BF16" ? bf16_to_float : fp16_to_float;
    std::transform(narrow.begin(), narrow.end(), stored.begin(), widen);
  }
  for (int64_t i = 0; i < count; ++i) {
    const float scale = stored[static_cast<size_t>(i)];
    if (!(scale > 0.0f && scale < kScaleLimit))
      return bad_element(source_.scales, "scale " + std::to_string(scale) + " (allowed: above 0, below 1e30)", i);
  }
  const int64_t groups = shape_.groups();
  scales_.resize(static_cast<size_t>(shape_.rows * groups));
  for (int64_t row = 0; row < shape_.rows; ++row) {
    const int64_t stored_row = blocks ? (source_.first_row + row * source_.row_step) / kFp8Block : row;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = std::min(g, stored_groups_ - 1);
      scales_[static_cast<size_t>(row * groups + g)] =
          stored[static_cast<size_t>(transposed ? from * shape_.rows + row : stored_row * stored_groups_ + from)];
    }
  }
  return {};
}

// Exponents, or e4m3. A level of e2m1 is twice its value: the exponent is one less, and of the others `factor_` is
// half.
Status MatrixReader::read_scale_bytes() {
  const int64_t step = source_.row_step, groups = shape_.groups();
  const int64_t count = rows_between(shape_.rows, step) * stored_groups_;
  std::vector<uint8_t> stored(static_cast<size_t>(count));
  KT_RETURN_IF_ERROR(read_part(source_.scales, 0, count, stored.data()));
  const bool exponents = shape_.format.scales == Scales::kExponent;
  const uint8_t less = exponents && scheme_.fp4() ? 1 : 0;
  scale_bytes_.resize(static_cast<size_t>(shape_.rows * groups));
  for (int64_t i = 0; i < count; ++i) {
    if (i / stored_groups_ % step != 0) continue;
    uint8_t& byte = stored[static_cast<size_t>(i)];
    if (exponents && byte > kMostExponent)
      return bad_element(
          source_.scales,
          byte == 255 ? "a scale that is NaN" : "scale 2^" + std::to_string(byte - 127) + " (allowed: below 1e30)", i);
    if (!exponents && (fp8_is_nan(byte) || byte > 0x80))
      return bad_element(source_.scales,
                         "scale " + std::to_string(fp8_to_float(byte)) + " (allowed: numbers that are not negative)",
                         i);
    byte = static_cast<uint8_t>(byte > less ? byte - less : 0);
    if (!exponents) byte &= 0x7f;
    scale_bytes_[static_cast<size_t>(i / stored_groups_ / step * groups + i % stored_groups_)] = byte;
  }
  return {};
}

Status MatrixReader::read_factor() {
  float stored;
  KT_RETURN_IF_ERROR(read_part(source_.global, 0, 1, &stored));
  const bool divides = scheme_.global_suffix == ".weight_global_scale";
  if (!(stored > 1.0f / kScaleLimit && stored < kScaleLimit))
    return bad_element(source_.global, "scale " + std::to_string(stored) + " (allowed: above 1e-30, below 1e30)", 0);
  factor_ = (divides ? 1.0f / stored : stored) * 0.5f;
  return {};
}

Status MatrixReader::read_zeros() {
  const int64_t count = source_.zeros.tensor.entry->bytes / element_bytes(source_.zeros);
  const int64_t per_word = scheme_.codes_per_word(), groups = shape_.groups(), words_of_rows = shape_.rows / per_word;
  std::vector<uint32_t> words;
  std::vector<uint8_t> bytes;
  if (scheme_.storage == Storage::kInt8) {
    bytes.resize(static_cast<size_t>(count));
    KT_RETURN_IF_ERROR(read_part(source_.zeros, 0, count, bytes.data()));
  } else {
    words.resize(static_cast<size_t>(count));
    KT_RETURN_IF_ERROR(read_part(source_.zeros, 0, count, words.data()));
  }
  zeros_.resize(static_cast<size_t>(shape_.rows * groups));
  for (int64_t row = 0; row < shape_.rows; ++row) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t from = std::min(g, stored_groups_ - 1);
      uint32_t zero;
      if (scheme_.storage == Storage::kInt8) {
        zero = bytes[static_cast<size_t>(row * stored_groups_ + from)] ^ 0x80u;
      } else {
        const int64_t at = scheme_.storage == Storage::kPacked ? row / per_word * stored_groups_ + from
                                                               : from * words_of_rows + row / per_word;
        zero = words[static_cast<size_t>(at)] >> (place_in_word(scheme_, row) * scheme_.bits);
        zero = (zero + static_cast<uint32_t>(scheme_.zero_added)) & ((1u << scheme_.bits) - 1);
        if (!scheme_.zero_points && zero != 1u << (scheme_.bits - 1))
          return bad_element(source_.zeros,
                             "zero point " + std::to_string(zero) + " of output " + std::to_string(row) +
                                 ", but quantization_config says symmetric,",
                             at);
      }
      zeros_[static_cast<size_t>(row * groups + g)] = static_cast<uint8_t>(zero);
    }
  }
  return {};
}

Status MatrixReader::read(int64_t first, int64_t count, PlainMatrix* strip) {
  const bool transposed = scheme_.layout.transposed;  // then `prepare` has read all
  if (!transposed) KT_RETURN_IF_ERROR(read_codes(first, count));
  const int64_t at = first * shape_.groups();
  *strip = {.shape = {count, shape_.cols, shape_.format},
            .codes = transposed ? static_cast<uint16_t*>(stored_.data()) + first * shape_.cols : codes_.data(),
            .scales = scales_.empty() ? nullptr : scales_.data() + at,
            .zeros = scheme_.zero_points ? zeros_.data() + at : nullptr,
            .scale_bytes = scale_bytes_.empty() ? nullptr : scale_bytes_.data() + at,
            .factor = factor_};
  return {};
}

// `count` values from `first` on, as bfloat16.
Status MatrixReader::read_plain(int64_t first, int64_t count, uint16_t* values) {
  const bool is_bf16 = source_.codes.tensor.entry->dtype == "BF16";
  const int64_t wide = element_bytes(source_.codes);
  void* stored = is_bf16 ? values : static_cast<void*>(raw_.reserve<uint8_t>(count * wide));
  KT_RETURN_IF_ERROR(read_part(source_.codes, first, count, stored));
  if (!is_bf16) narrow_to_bf16(stored, wide, count, values);
  const int64_t bad = first_not_finite(values, count);
  const char* what = is_bf16 ? "NaN or Inf" : "NaN, Inf or a value that bfloat16 does not reach";
  return bad < 0 ? Status() : bad_element(source_.codes, what, first + bad);
}

Status MatrixReader::read_dense(int64_t first, int64_t count) {
  const int64_t cols = shape_.cols, step = source_.row_step, span = rows_between(count, step);
  auto* values = codes_.reserve<uint16_t>(count * cols);
  auto* stored = step == 1 ? values : stored_.reserve<uint16_t>(span * cols);
  KT_RETURN_IF_ERROR(read_plain(first * step * cols, span * cols, stored));
  take_rows(stored, count, cols, step, values);
  return {};
}

Status MatrixReader::read_fp8(int64_t first, int64_t count) {
  const int64_t cols = shape_.cols, step = source_.row_step, span = rows_between(count, step);
  auto* codes = codes_.reserve<uint8_t>(count * cols);
  auto* stored = step == 1 ? codes : stored_.reserve<uint8_t>(span * cols);
  KT_RETURN_IF_ERROR(read_part(source_.codes, first * step * cols, span * cols, stored));
  const int64_t bad = first_fp8_nan(stored, span * cols);
  if (bad >= 0) return bad_element(source_.codes, "NaN", first * step * cols + bad);
  take_rows(stored, count, cols, step, codes);
  return {};
}

// Codes of e2m1, two in a byte.
Status MatrixReader::read_fp4(int64_t first, int64_t count) {
  const int64_t bytes = shape_.cols / 2, step = source_.row_step, span = rows_between(count, step);
  auto* codes = codes_.reserve<uint8_t>(count * shape_.cols);
  auto* raw = raw_.reserve<uint8_t>(span * bytes);
  KT_RETURN_IF_ERROR(read_part(source_.codes, first * step * bytes, span * bytes, raw));
  for (int64_t row = 0; row < count; ++row) {
    unpack_nibbles(raw + row * step * bytes, shape_.cols, codes + row * shape_.cols);
  }
  return {};
}

// The whole matrix, some columns at a time. A column is part of a stored row.
Status MatrixReader::read_transposed() {
  constexpr int64_t kColumns = 64;
  const int64_t rows = shape_.rows, cols = shape_.cols, step = source_.row_step, span = rows_between(rows, step);
  auto* matrix = stored_.reserve<uint16_t>(rows * cols);
  auto* columns = codes_.reserve<uint16_t>(kColumns * span);
  for (int64_t first = 0; first < cols; first += kColumns) {
    const int64_t count = std::min(kColumns, cols - first);
    for (int64_t c = 0; c < count; ++c)
      KT_RETURN_IF_ERROR(read_plain((first + c) * source_.stored_rows, span, columns + c * span));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < count; ++c) matrix[row * cols + first + c] = columns[c * span + row * step];
    }
  }
  return {};
}

Status MatrixReader::read_codes(int64_t first, int64_t count) {
  const int64_t cols = shape_.cols, elements = count * cols;
  if (scheme_.storage == Storage::kDense) return read_dense(first, count);
  if (scheme_.fp4()) return read_fp4(first, count);
  if (!scheme_.integer()) return read_fp8(first, count);
  auto* codes = codes_.reserve<uint8_t>(elements);
  const WordColumns all{.words = static_cast<const uint32_t*>(raw_.data()), .rows = shape_.rows, .cols = cols};
  if (scheme_.storage == Storage::kGptq) {
    unpack_gptq(all, scheme_.bits, first, count, codes);
    return {};
  }
  if (scheme_.storage == Storage::kAwq) {
    unpack_awq(all, first, count, codes);
    return {};
  }
  if (scheme_.storage == Storage::kPacked) {
    const int64_t words = (cols + scheme_.codes_per_word() - 1) / scheme_.codes_per_word();
    auto* raw = raw_.reserve<uint8_t>(count * words * 4);
    KT_RETURN_IF_ERROR(read_part(source_.codes, first * words, count * words, raw));
    for (int64_t row = 0; row < count; ++row) {
      const uint8_t* from = raw + row * words * 4;
      if (scheme_.bits == 4) {
        unpack_nibbles(from, cols, codes + row * cols);
      } else {
        std::copy(from, from + cols, codes + row * cols);
      }
    }
    return {};
  }
  KT_RETURN_IF_ERROR(read_part(source_.codes, first * cols, elements, codes));  // int8
  unpack_signed(codes, elements, codes);
  return {};
}

Status read_bias(const TensorPart& part, int64_t rows, int64_t step, float* bias) {
  const int64_t span = rows_between(rows, step), wide = element_bytes(part);
  const std::string& dtype = part.tensor.entry->dtype;
  std::vector<uint8_t> stored(static_cast<size_t>(span * wide));
  KT_RETURN_IF_ERROR(part.tensor.file->read(*part.tensor.entry, part.first * wide, span * wide, stored.data()));
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* from = stored.data() + row * step * wide;
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    if (dtype == "F32") std::memcpy(bias + row, from, sizeof(float));
    if (dtype != "F32") bias[row] = dtype == "BF16" ? bf16_to_float(half) : fp16_to_float(half);
    if (!std::isfinite(bias[row])) return bad_element(part, "NaN or Inf", row * step);
  }
  return {};
}

}  // namespace kt
