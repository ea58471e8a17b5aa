// Float products of one instruction set: every format, sizes around the tiles' edges, misaligned operands, NaN beside
// them, and bits that depend neither on the other rows of a call nor on how its blocks are cut.
#include <algorithm>

#include "packed_case.h"
#include "reference.h"

namespace kt_test {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

template <class T>
using Multiply = void (*)(const kt::PackedProduct<T>&);

float value_of(float element) { return element; }
float value_of(uint16_t element) { return kt::bf16_to_float(element); }
void make(float value, float* element) { *element = value; }
void make(float value, uint16_t* element) { *element = kt::float_to_bf16(value); }

// Activations one element off any alignment, zero in the padding, NaN between and after the rows.
template <class T>
struct Activations {
  Activations(int64_t tokens, const kt::PackedShape& shape, Random& random) : lda(shape.padded_cols() + 3) {
    T poison{};
    make(kPoison, &poison);
    data.assign(static_cast<size_t>(1 + tokens * lda), poison);
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t k = 0; k < shape.padded_cols(); ++k) make(k < shape.cols ? random.normal() : 0.0f, &row(m)[k]);
    }
  }
  // Once for all instruction sets.
  static const Activations& drawn(int64_t tokens, const kt::PackedShape& shape, Random& random) {
    return drawn_once(random, Digest().add(tokens).add(shape.cols).add(shape.padded_cols()),
                      [&](Random& own) { return Activations(tokens, shape, own); });
  }
  T* row(int64_t m) { return data.data() + 1 + m * lda; }
  const T* row(int64_t m) const { return data.data() + 1 + m * lda; }
  kt::Rows<const T> rows(int64_t first) const { return {row(first), lda}; }
  int64_t lda;
  std::vector<T> data;
};

// The result of a call, with NaN before and after every row of c, which must still be there.
class Result {
 public:
  Result(int64_t tokens, int64_t cols) : tokens_(tokens), cols_(cols), ldc_(cols + 5) {
    data_.assign(static_cast<size_t>(1 + tokens * ldc_), kPoison);
  }
  float* at(int64_t m, int64_t n) { return data_.data() + 1 + m * ldc_ + n; }
  kt::Rows<float> rows() { return {at(0, 0), ldc_}; }
  bool neighbours_untouched() {
    bool untouched = std::isnan(data_[0]);
    for (int64_t m = 0; m < tokens_; ++m) {
      for (int64_t n = cols_; n < ldc_; ++n) untouched &= std::isnan(*at(m, n));
    }
    return untouched;
  }

 private:
  int64_t tokens_, cols_, ldc_;
  std::vector<float> data_;
};

template <class T>
class FloatTest {
 public:
  FloatTest(Multiply<T> multiply, std::string name, Report& report)
      : multiply_(multiply), name_(std::move(name)), report_(report) {}

  void values(const PackedCase& weights, int64_t tokens, Random& random) {
    if (!report_.takes()) return;
    const kt::PackedShape& shape = weights.shape;
    const std::string what = describe(shape, tokens);
    const Activations<T>& a = Activations<T>::drawn(tokens, shape, random);
    Result c(tokens, shape.padded_rows());
    multiply_({.rows = tokens, .a = a.rows(0), .weights = weights.blocks(), .c = c.rows()});
    for (int64_t m = 0; m < tokens; ++m) {
      for (int64_t n = 0; n < shape.padded_rows(); ++n) {
        const Sum sum = dot(
            shape.cols, [&](int64_t k) { return value_of(a.row(m)[k]); }, [&](int64_t k) { return weights.at(n, k); });
        report_.close(what, *c.at(m, n), sum.value, kSumTolerance, sum.scale);
      }
    }
    report_.equal(what + " writes beside its result", c.neighbours_untouched());
  }

  // All tokens in one call, against every token and every block in a call of its own.
  void same_bits_alone(const PackedCase& weights, int64_t tokens, Random& random) {
    if (!report_.takes()) return;
    const kt::PackedShape& shape = weights.shape;
    const std::string what = describe(shape, tokens), of_rows = what + " depends on the other rows",
                      of_blocks = what + " depends on the other blocks";
    const Activations<T>& a = Activations<T>::drawn(tokens, shape, random);
    Result all(tokens, shape.padded_rows()), one(1, shape.padded_rows()), some(tokens, kt::kBlockRows);
    multiply_({.rows = tokens, .a = a.rows(0), .weights = weights.blocks(), .c = all.rows()});
    const auto same = [](const float* x, const float* y, int64_t count) {
      return std::memcmp(x, y, static_cast<size_t>(count) * sizeof(float)) == 0;
    };
    for (int64_t m = 0; m < tokens; ++m) {
      multiply_({.rows = 1, .a = a.rows(m), .weights = weights.blocks(), .c = one.rows()});
      report_.equal(of_rows, same(one.at(0, 0), all.at(m, 0), shape.padded_rows()));
    }
    for (int64_t block = 0; block < shape.blocks(); ++block) {
      const kt::PackedBlocks only{shape, weights.data() + block * shape.block_bytes(), 1};
      multiply_({.rows = tokens, .a = a.rows(0), .weights = only, .c = some.rows()});
      for (int64_t m = 0; m < tokens; ++m) {
        report_.equal(of_blocks, same(some.at(m, 0), all.at(m, block * kt::kBlockRows), kt::kBlockRows));
      }
    }
  }

  // Activations that are one in one column and zero elsewhere give back the decoded weights, every code among them.
  void every_code(kt::Format format) {
    const int64_t rows = 16, cols = std::max<int64_t>(32, top_code(format) + 1);
    const int64_t tokens = cols;
    std::vector<uint8_t> codes(static_cast<size_t>(rows * cols));
    for (int64_t i = 0; i < rows * cols; ++i) {
      const int64_t all_bits = kt::levels_of_nibbles(format.encoding) ? 15 : top_code(format);
      const auto code = static_cast<uint8_t>((i % cols + i / cols) & all_bits);
      const bool nan = format.encoding == kt::Encoding::kFp8 && kt::fp8_is_nan(code);
      codes[static_cast<size_t>(i)] = nan ? 0 : code;
    }
    const kt::PackedShape shape{rows, cols, format};
    Factors factors = Factors::units(shape);
    for (float& scale : factors.scales) scale = 0.5f;
    if (format.zero_points || format.mins) factors.zeros.assign(static_cast<size_t>(rows * shape.groups()), 3);
    std::vector<uint8_t> data(static_cast<size_t>(shape.bytes() + kt::kLineBytes));
    uint8_t* packed = data.data() + (-reinterpret_cast<uintptr_t>(data.data()) & (kt::kLineBytes - 1));
    kt::pack_blocks(factors.plain(shape, codes.data()), 0, 1, packed);
    std::vector<T> a(static_cast<size_t>(tokens * cols));
    for (int64_t m = 0; m < tokens; ++m) make(1.0f, &a[static_cast<size_t>(m * cols + m)]);
    std::vector<float> c(static_cast<size_t>(tokens * rows));
    for (const int64_t at_once : {int64_t{1}, tokens}) {
      const std::string what = describe(shape, at_once) + " changes a code";
      for (int64_t m = 0; m < tokens; m += at_once) {
        multiply_({.rows = at_once,
                   .a = {a.data() + m * cols, cols},
                   .weights = {shape, packed, 1},
                   .c = {c.data() + m * rows, rows}});
      }
      for (int64_t m = 0; m < tokens; ++m) {
        for (int64_t n = 0; n < rows; ++n)
          report_.equal(what,
                        c[static_cast<size_t>(m * rows + n)] == static_cast<float>(kt::decode(shape, packed, n, m)));
      }
    }
  }

 private:
  std::string describe(const kt::PackedShape& shape, int64_t tokens) const {
    return name_ + " " + kt::format_name(shape.format) + " " + std::to_string(tokens) + " x [" +
           std::to_string(shape.rows) + ", " + std::to_string(shape.cols) + "]";
  }

  Multiply<T> multiply_;
  std::string name_;
  Report& report_;
};

template <class T>
void test_formats(FloatTest<T> test, const std::vector<kt::Format>& formats, Random& random) {
  for (const kt::Format& format : formats) {
    for (const int64_t rows : {1, 16, 50, 80}) {
      for (const int64_t cols : {1, 31, 33, 257}) {
        const PackedCase& weights = packed_case(rows, cols, format, random);
        for (const int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 12, 13, 25}) test.values(weights, tokens, random);
      }
    }
    for (const int64_t cols : {64, 1100}) {
      const PackedCase& weights = packed_case(80, cols, format, random);
      for (const int64_t tokens : {2, 6, 13, 29}) test.same_bits_alone(weights, tokens, random);
    }
    if (format.encoding != kt::Encoding::kBf16) test.every_code(format);
  }
}

}  // namespace

void test_float(const kt::Tiles& tiles, Report& report) {
  Random random(1);
  // And groups longer than a panel of unpacked weights.
  std::vector<kt::Format> formats = all_formats(), fp8_and_bf16;
  formats.push_back({kt::Encoding::kInt4, 512, true});
  formats.push_back({kt::Encoding::kFp8, 1024, false});
  for (const kt::Format& format : formats) {
    if (!format.integer()) fp8_and_bf16.push_back(format);
  }
  test_formats(FloatTest<float>(tiles.multiply, "multiply", report), formats, random);
  if (tiles.multiply_bf16)
    test_formats(FloatTest<uint16_t>(tiles.multiply_bf16, "multiply_bf16", report), fp8_and_bf16, random);
}

}  // namespace kt_test
