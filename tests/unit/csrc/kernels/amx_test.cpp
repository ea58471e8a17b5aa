// What is particular to the kernels for AMX: the software model of its tiles against itself, the instructions against
// the model bit by bit, integer products (but for planes) against the other instruction sets bit by bit, and many rows.
#include <string_view>

#include "amx_model/tile_model.h"
#include "kernels/registry.h"
#include "packed_case.h"

namespace kt {
namespace amx::inline model {
extern const Tiles kTiles;
}
}  // namespace kt

namespace kt_test {
namespace {

namespace model = tile_model;

int faults = 0;

// While it lives, faults of the model are counted.
struct CountingFaults {
  CountingFaults() {
    faults = 0;
    model::fault_handler() = [](model::Fault, const char*) { ++faults; };
  }
  ~CountingFaults() { model::fault_handler() = model::abort_on_fault; }
};

struct Config {
  uint8_t bytes[64] = {1};
  Config& tile(int number, int rows, int row_bytes) {
    bytes[16 + 2 * number] = static_cast<uint8_t>(row_bytes);
    bytes[48 + number] = static_cast<uint8_t>(rows);
    return *this;
  }
  Config& byte(int at, int value) {
    bytes[at] = static_cast<uint8_t>(value);
    return *this;
  }
};

void test_faults(Report& report) {
  const CountingFaults counting;
  const auto faulty = [&](const char* what, auto work) {
    const int before = faults;
    work();
    report.equal(std::string("the tile model accepts ") + what, faults == before + 1);
  };
  const auto refused = [&](const char* what, const Config& config) {
    faulty(what, [&] { model::load_config(config.bytes); });
  };
  alignas(64) static uint8_t memory[16][64];
  const auto good = [] { return Config().tile(0, 16, 64).tile(4, 16, 64).tile(6, 16, 64).tile(7, 8, 64); };
  refused("an unknown palette", good().byte(0, 2));
  refused("a reserved byte", good().byte(5, 1));
  refused("a ninth tile", good().byte(56, 1));
  refused("17 rows", good().tile(1, 17, 64));
  refused("68 bytes a row", good().tile(1, 16, 68));
  refused("rows without bytes", good().tile(1, 16, 0));
  faulty("a load without configuration", [] { model::load(0, memory, 64); });
  model::load_config(good().bytes);
  report.equal("the tile model refuses a good configuration", faults == 7);
  faulty("a load of a tile that is not configured", [] { model::load(3, memory, 64); });
  faulty("a store of a tile that is not configured", [] { model::store(3, memory, 64); });
  faulty("shapes that do not match", [] { model::dot_bf16(0, 4, 7); });
  faulty("a product of a tile with itself", [] { model::dot_s8u8(0, 4, 4); });
  model::release();
  faulty("a product after the release", [] { model::dot_s8s8(0, 4, 6); });
}

bool same_bits(const std::vector<float>& x, const std::vector<float>& y) {
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::memcmp(&x[i], &y[i], sizeof(float)) != 0 && !(std::isnan(x[i]) && std::isnan(y[i]))) return false;
  }
  return x.size() == y.size();
}

// Any bits, small numbers whose products are subnormal, or large ones whose products overflow; else ordinary numbers.
std::vector<uint16_t> wild_bf16s(int64_t count, int64_t kind, Random& random) {
  std::vector<uint16_t> values = random.bf16s(count);
  for (uint16_t& bits : values) {
    const auto any = static_cast<uint16_t>(random.below(65536));
    if (kind == 1) bits = any;
    if (kind == 2) bits = static_cast<uint16_t>((any & 0x8fffu) | 0x1800u);  // exponents near 2^-70
    if (kind == 3) bits = static_cast<uint16_t>((any & 0x8fffu) | 0x5000u);  // near 2^50
  }
  return values;
}

// A packed bf16 matrix of given bits.
struct Packed {
  Packed(int64_t rows, int64_t cols, const std::vector<uint16_t>& bits) : shape{rows, cols, {}} {
    data.resize(static_cast<size_t>(shape.bytes() + 64));
    first = data.data() + (64 - reinterpret_cast<uintptr_t>(data.data()) % 64) % 64;
    kt::pack_blocks({shape, bits.data(), nullptr, nullptr}, 0, shape.blocks(), first);
  }
  kt::PackedShape shape;
  std::vector<uint8_t> data;
  uint8_t* first;
};

std::vector<float> multiply_bf16(const kt::Tiles& tiles, const kt::PackedBlocks& weights, int64_t rows,
                                 const std::vector<uint16_t>& a) {
  const int64_t cols = weights.shape.padded_cols(), out = weights.shape.padded_rows();
  std::vector<float> c(static_cast<size_t>(rows * out));
  tiles.multiply_bf16({.rows = rows, .a = {a.data(), cols}, .weights = weights, .c = {c.data(), out}});
  return c;
}

std::vector<float> multiply_int8(const kt::Tiles& tiles, const kt::PackedBlocks& weights, int64_t rows,
                                 const std::vector<float>& in) {
  const kt::PackedShape& shape = weights.shape;
  const auto [ld, groups] = tiles.quantized_size(shape);
  const int64_t out = shape.padded_rows();
  std::vector<uint8_t> values(static_cast<size_t>(rows * ld));
  std::vector<float> scales(static_cast<size_t>(rows * groups)), c(static_cast<size_t>(rows * out));
  std::vector<int32_t> sums(static_cast<size_t>(rows * groups));
  for (int64_t m = 0; m < rows; ++m) {
    tiles.quantize(shape, in.data() + m * shape.cols, values.data() + m * ld, scales.data() + m * groups,
                   sums.data() + m * groups);
  }
  const kt::QuantizedRows a{
      .values = {values.data(), ld}, .scales = {scales.data(), groups}, .sums = {sums.data(), groups}};
  tiles.multiply_int8({.rows = rows, .a = a, .weights = weights, .c = {c.data(), out}});
  return c;
}

std::vector<float> multiply_transposed(const kt::Tiles& tiles, const kt::PackedBlocks& weights, int64_t rows,
                                       const std::vector<float>& in) {
  const kt::PackedShape& shape = weights.shape;
  const int64_t ld = kt::round_up(rows, kt::kTokenUnit), out = shape.padded_cols();
  std::vector<uint16_t> operand(static_cast<size_t>(shape.padded_rows() * ld));
  tiles.transpose_rows_bf16({in.data(), shape.rows}, rows, shape.rows, operand.data(), ld);
  std::vector<float> c(static_cast<size_t>(rows * out));
  tiles.multiply_transposed_bf16({.rows = rows,
                                  .in = operand.data(),
                                  .ld = ld,
                                  .pieces = &weights,
                                  .num_pieces = 1,
                                  .first_col = 0,
                                  .cols = out,
                                  .out = {c.data(), out}});
  return c;
}

// One step of the tiles, and more than one, on numbers that round, overflow, underflow or are none.
void compare_wild(const kt::Tiles& tiles, const kt::Tiles& other, const char* what, Random& random, Report& report) {
  for (int64_t kind = 0; kind < 4; ++kind) {
    for (const int64_t cols : {32, 96}) {
      const Packed weights(16, cols, wild_bf16s(16 * cols, kind, random));
      const std::vector<uint16_t> a = wild_bf16s(16 * cols, kind, random);
      const kt::PackedBlocks blocks{weights.shape, weights.first, 1};
      report.equal(std::string(what) + ": other bits for bf16 of kind " + std::to_string(kind),
                   same_bits(multiply_bf16(tiles, blocks, 16, a), multiply_bf16(other, blocks, 16, a)));
    }
  }
}

constexpr kt::Format kInt8Rows{kt::Encoding::kInt8, 0, false};

// Ordinary numbers in every format, rows around the tiles' edges.
void compare_formats(const kt::Tiles& tiles, const kt::Tiles& other, bool float_products, Random& random,
                     Report& report) {
  for (const kt::Format& format : all_formats()) {
    if (!float_products && format == kInt8Rows) continue;  // planes: other codes than another instruction set's
    const PackedCase& weights = packed_case(50, 200, format, random);
    const kt::PackedShape& shape = weights.shape;
    for (const int64_t rows : {1, 16, 17, 43, 66}) {
      const std::string what = kt::format_name(format) + " " + std::to_string(rows) + " rows: " + tiles.name + " and " +
                               other.name + " differ";
      if (format.integer()) {
        const std::vector<float> in = random.floats(rows * shape.cols);
        const kt::PackedBlocks blocks = weights.blocks();
        report.equal(what, same_bits(multiply_int8(tiles, blocks, rows, in), multiply_int8(other, blocks, rows, in)));
      } else if (float_products) {
        const std::vector<uint16_t> a = random.bf16s(rows * shape.padded_cols());
        report.equal(what, same_bits(multiply_bf16(tiles, weights.blocks(), rows, a),
                                     multiply_bf16(other, weights.blocks(), rows, a)));
      }
      if (!float_products) continue;
      const std::vector<float> in = random.floats(rows * shape.rows);
      report.equal(what + " (transposed)", same_bits(multiply_transposed(tiles, weights.blocks(), rows, in),
                                                     multiply_transposed(other, weights.blocks(), rows, in)));
    }
  }
}

// One call, and one by one.
void test_many_rows(const kt::Tiles& tiles, const kt::Format& format, int64_t out_rows, int64_t in_cols,
                    const std::vector<int64_t>& row_counts, Random& random, Report& report) {
  const PackedCase& weights = packed_case(out_rows, in_cols, format, random);
  for (const int64_t rows : row_counts) {
    const int64_t cols = weights.shape.padded_cols(), out = weights.shape.padded_rows();
    const std::vector<float> in = random.floats(rows * weights.shape.rows);
    const std::vector<uint16_t> a = random.bf16s(rows * cols);
    std::vector<float> wide(a.size());
    for (size_t i = 0; i < a.size(); ++i) wide[i] = kt::bf16_to_float(a[i]);
    const bool integer = format.integer();
    const auto forward = [&](int64_t first, int64_t count) {
      const auto begin = static_cast<ptrdiff_t>(first * cols), end = static_cast<ptrdiff_t>((first + count) * cols);
      return integer ? multiply_int8(tiles, weights.blocks(), count, {wide.begin() + begin, wide.begin() + end})
                     : multiply_bf16(tiles, weights.blocks(), count, {a.begin() + begin, a.begin() + end});
    };
    const auto backward = [&](int64_t first, int64_t count) {
      const auto begin = in.begin() + static_cast<ptrdiff_t>(first * weights.shape.rows);
      return multiply_transposed(tiles, weights.blocks(), count,
                                 {begin, begin + static_cast<ptrdiff_t>(count * weights.shape.rows)});
    };
    const std::vector<float> all = forward(0, rows), all_back = backward(0, rows);
    for (const int64_t row : {int64_t{0}, rows / 2, rows - 1}) {
      const std::string what = kt::format_name(format) + " row " + std::to_string(row) + " of " + std::to_string(rows) +
                               " depends on the others";
      const auto part = [row](const std::vector<float>& from, int64_t width) {
        const auto begin = from.begin() + static_cast<ptrdiff_t>(row * width);
        return std::vector<float>(begin, begin + static_cast<ptrdiff_t>(width));
      };
      report.equal(what, same_bits(forward(row, 1), part(all, out)));
      report.equal(what + " (transposed)", same_bits(backward(row, 1), part(all_back, cols)));
    }
  }
}

// The model with and without the processor's fused multiply-add.
void test_model(Random& random, Report& report) {
  if (!model::use_fused()) return;
  for (int64_t kind = 0; kind < 4; ++kind) {
    const Packed weights(32, 96, wild_bf16s(32 * 96, kind, random));
    const std::vector<uint16_t> a = wild_bf16s(20 * 96, kind, random);
    const kt::PackedBlocks blocks{weights.shape, weights.first, 2};
    const std::vector<float> fused = multiply_bf16(kt::amx::model::kTiles, blocks, 20, a);
    model::use_fused() = false;
    const std::vector<float> portable = multiply_bf16(kt::amx::model::kTiles, blocks, 20, a);
    model::use_fused() = true;
    report.equal("the model's two ways of kind " + std::to_string(kind), same_bits(fused, portable));
  }
}

}  // namespace

void test_amx(const kt::Tiles& tiles, Report& report) {
  const std::string_view name = tiles.name;
  if (name != "amx" && name != "amx-model") return;
  Random random(6);
  // Tokens enough for several tiles and panels.
  for (const kt::Format& format : all_formats())
    test_many_rows(tiles, format, 48, 160, {15, 33, 49, 130}, random, report);
  // And for several chunks of columns, blocks and tiles of a product that keeps its sums beside it.
  for (const kt::Format& format : {kt::Format{}, kt::Format{kt::Encoding::kFp8, 128, false}, kInt8Rows})
    test_many_rows(tiles, format, 16 * 11 + 3, 544, {15, 33, 49, 145}, random, report);
  test_many_rows(tiles, kInt8Rows, 16 * 9, 1088, {7, 8, 9, 41, 75}, random, report);  // steps of 64 columns, not of 32
  if (name == "amx") {
    compare_wild(tiles, kt::amx::model::kTiles, "instructions and model", random, report);
    compare_formats(tiles, kt::amx::model::kTiles, true, random, report);
  } else {
    test_faults(report);
    test_model(random, report);
  }
  // Portable kernels round twice where these have a fused multiply-add.
  for (const kt::Tiles* other : kt::available_tiles()) {
    if (other != &tiles && std::string_view(other->name) != "portable")
      compare_formats(tiles, *other, false, random, report);
  }
}

}  // namespace kt_test
