// Linear layers with packed matrices of one instruction set: parts of different formats, cut into tasks and between
// threads, have the bits of one product with each whole part, in float32 and in int8; so have gradients.
#include <memory>

#include "ops/packed/linear.h"
#include "packed_case.h"

namespace kt_test {
namespace {

using enum kt::Encoding;
constexpr kt::Format k8{kInt8, 32, false}, k4{kInt4, 32, false, kt::Scales::kByte, true},
    k6{kInt6, 16, false, kt::Scales::kByte};

// A matrix of parts of these formats, whose rows are no whole blocks.
struct Layer {
  Layer(const std::vector<kt::Format>& formats, int64_t cols, Random& random) {
    std::vector<kt::PackedShape> shapes;
    for (const kt::Format& format : formats) {
      cases.emplace_back(55 + 80 * static_cast<int64_t>(cases.size()), cols, format, random);
      shapes.push_back(cases.back().shape);
    }
    matrix = std::make_unique<kt::PackedMatrix>(shapes);
    for (size_t part = 0; part < cases.size(); ++part)
      std::memcpy(matrix->part_data(part), cases[part].data(), static_cast<size_t>(shapes[part].bytes()));
  }

  std::vector<PackedCase> cases;
  std::unique_ptr<kt::PackedMatrix> matrix;
};

// x times the transpose of a part, in one call of the kernels: [rows, padded rows of the part].
std::vector<float> whole_product(const kt::Tiles& tiles, const kt::PackedBlocks& part, const float* x, int64_t rows,
                                 bool in_int8) {
  const int64_t cols = part.shape.cols, width = part.shape.padded_rows();
  std::vector<float> out(static_cast<size_t>(rows * width));
  if (!in_int8) {
    tiles.multiply({.rows = rows, .a = {x, cols}, .weights = part, .c = {out.data(), width}});
    return out;
  }
  const auto [row_bytes, groups] = tiles.quantized_size(part.shape);
  std::vector<uint8_t> codes(static_cast<size_t>(rows * row_bytes));
  std::vector<float> scales(static_cast<size_t>(rows * groups));
  std::vector<int32_t> sums(static_cast<size_t>(rows * groups));
  for (int64_t m = 0; m < rows; ++m)
    tiles.quantize(part.shape, x + m * cols, codes.data() + m * row_bytes, scales.data() + m * groups,
                   sums.data() + m * groups);
  tiles.multiply_int8({.rows = rows,
                       .a = {{codes.data(), row_bytes}, {scales.data(), groups}, {sums.data(), groups}},
                       .weights = part,
                       .c = {out.data(), width}});
  return out;
}

void test_forward(const kt::Tiles& tiles, const Layer& layer, int64_t rows, bool bf16, Random& random, Report& report) {
  const kt::PackedMatrix& matrix = *layer.matrix;
  const int64_t cols = matrix.cols(), outs = matrix.rows();
  std::vector<uint16_t> narrow = random.bf16s(rows * cols);
  std::vector<float> wide;
  for (const uint16_t value : narrow) wide.push_back(kt::bf16_to_float(value));
  const kt::TensorView x = bf16 ? tensor_view(narrow.data(), kt::DType::kBf16, {rows, cols})
                                : tensor_view(wide.data(), kt::DType::kF32, {rows, cols});
  const std::string what = std::string(bf16 ? "int8" : "float32") + " product of " + std::to_string(rows) + " rows";
  for (const int threads : {1, 3}) {
    std::vector<float> out(static_cast<size_t>(rows * outs), -1.0f);
    kt::linear({tiles, threads}, x, matrix, {}, tensor_view(out.data(), kt::DType::kF32, {rows, outs}));
    bool same = true;
    for (const kt::PackedMatrix::Part& part : matrix.parts()) {
      const std::vector<float> wanted = whole_product(tiles, part.blocks, wide.data(), rows, bf16);
      for (int64_t m = 0; m < rows; ++m)
        same = same && std::memcmp(&out[static_cast<size_t>(m * outs + part.first_row)],
                                   &wanted[static_cast<size_t>(m * part.shape().padded_rows())],
                                   static_cast<size_t>(part.shape().rows) * sizeof(float)) == 0;
    }
    report.equal(what + " on " + std::to_string(threads) + " threads has the bits of whole products", same);
    for (int64_t n = 0; !bf16 && threads == 1 && n < outs; ++n) {
      size_t part = matrix.parts().size() - 1;
      while (matrix.parts()[part].first_row > n) --part;
      double sum = 0, magnitude = 0;
      for (int64_t k = 0; k < cols; ++k) {
        const double term = layer.cases[part].at(n - matrix.parts()[part].first_row, k) *
                            static_cast<double>(wide[static_cast<size_t>(k)]);
        sum += term;
        magnitude += std::fabs(term);
      }
      report.close(what, static_cast<double>(out[static_cast<size_t>(n)]), sum, kSumTolerance, magnitude);
    }
  }
}

// out [rows, columns] (+)= rows of a part's gradient times the part, in one call of the kernels.
template <class T>
void add_whole_gradient(const kt::Tiles& tiles, const kt::PackedMatrix::Part& part, kt::Rows<const float> by_out,
                        int64_t rows, std::vector<float>* out) {
  const int64_t ld = kt::round_up(rows, kt::kTokenUnit), cols = part.shape().cols;
  std::vector<T> transposed(static_cast<size_t>(ld * part.shape().padded_rows()));
  const kt::TransposedProduct<T> product{.rows = rows,
                                         .in = transposed.data(),
                                         .ld = ld,
                                         .pieces = &part.blocks,
                                         .num_pieces = 1,
                                         .first_col = 0,
                                         .cols = cols,
                                         .out = {out->data(), cols},
                                         .accumulate = part.first_row > 0};
  if constexpr (sizeof(T) == sizeof(float)) {
    tiles.transpose_rows(by_out.from(0, part.first_row), rows, part.shape().rows, transposed.data(), ld);
    tiles.multiply_transposed(product);
  } else {
    tiles.transpose_rows_bf16(by_out.from(0, part.first_row), rows, part.shape().rows, transposed.data(), ld);
    tiles.multiply_transposed_bf16(product);
  }
}

void test_backward(const kt::Tiles& tiles, const Layer& layer, int64_t rows, bool bf16, Random& random,
                   Report& report) {
  const kt::PackedMatrix& matrix = *layer.matrix;
  const int64_t cols = matrix.cols(), outs = matrix.rows();
  const std::vector<uint16_t> narrow = random.bf16s(rows * outs);
  std::vector<float> wide, wanted(static_cast<size_t>(rows * cols));
  for (const uint16_t value : narrow) wide.push_back(kt::bf16_to_float(value));
  for (const kt::PackedMatrix::Part& part : matrix.parts()) {
    const kt::Rows<const float> by_out{wide.data(), outs};
    if (bf16 && tiles.multiply_transposed_bf16) {
      add_whole_gradient<uint16_t>(tiles, part, by_out, rows, &wanted);
    } else {
      add_whole_gradient<float>(tiles, part, by_out, rows, &wanted);
    }
  }
  const kt::TensorView by_out = bf16 ? tensor_view(narrow.data(), kt::DType::kBf16, {rows, outs})
                                     : tensor_view(wide.data(), kt::DType::kF32, {rows, outs});
  for (const int threads : {1, 3}) {
    std::vector<float> by_x(wanted.size(), -1.0f);
    kt::linear_backward({tiles, threads}, by_out, matrix, tensor_view(by_x.data(), kt::DType::kF32, {rows, cols}));
    report.equal(std::string(bf16 ? "bf16" : "float32") + " gradient of " + std::to_string(rows) + " rows on " +
                     std::to_string(threads) + " threads has the bits of whole products",
                 std::memcmp(by_x.data(), wanted.data(), wanted.size() * sizeof(float)) == 0);
  }
}

}  // namespace

void test_packed(const kt::Tiles& tiles, Report& report) {
  Random random(11);
  for (const auto& formats : {std::vector<kt::Format>{k8}, {k4, k4, k6}, {k6, k8}}) {
    const Layer layer(formats, 512, random);
    for (const int64_t rows : {1, 5, 17, 300}) {
      for (const bool bf16 : {false, true}) {
        test_forward(tiles, layer, rows, bf16, random, report);
        test_backward(tiles, layer, rows, bf16, random, report);
      }
    }
  }
}

}  // namespace kt_test
