#include "weights/gguf_layer.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/memory.h"
#include "weights/checkpoint/unpack.h"
#include "weights/reader.h"

namespace kt {
namespace {

// Blocks of the file that are read and packed at a time: they stay in the L2 cache.
constexpr int64_t kStripBytes = 256 << 10;

std::string name_of(const std::string& prefix, Projection part, const char* kind = ".weight") {
  return prefix + ".ffn_" + kProjectionNames[part] + "_exps" + kind;
}

int64_t strip_blocks_of(int64_t row_bytes) { return std::max<int64_t>(1, kStripBytes / (row_bytes * kBlockRows)); }
int64_t row_bytes_of(const GgufType& type, int64_t cols) { return cols / type.columns * type.bytes; }

template <class T>
const T* at(const std::vector<T>& values) {
  return values.empty() ? nullptr : values.data();
}

}  // namespace

GgufPacker::GgufPacker(const GgufType& type, int64_t cols)
    : type_(type), cols_(cols), strip_rows_(strip_blocks_of(row_bytes_of(type, cols)) * kBlockRows) {
  const Format& format = type.format;
  const PackedShape shape{strip_rows_, cols, format};
  const auto groups = static_cast<size_t>(strip_rows_ * shape.groups());
  const auto supers = static_cast<size_t>(strip_rows_ * shape.supers());
  codes_.resize(static_cast<size_t>(strip_rows_ * cols));
  if (format.scales == Scales::kHalf) scales_.resize(groups);
  if (format.scales != Scales::kHalf) scale_bytes_.resize(groups);
  if (format.mins) mins_.resize(groups);
  if (format.scales == Scales::kByte) supers_.resize(supers);
  if (format.mins) min_supers_.resize(supers);
}

int64_t GgufPacker::pack(const uint8_t* from, int64_t rows, uint8_t* packed) {
  const int64_t row_bytes = row_bytes_of(type_, cols_);
  const int64_t block_bytes = PackedShape{kBlockRows, cols_, type_.format}.block_bytes();
  for (int64_t row = 0; row < rows; row += strip_rows_) {
    const int64_t bad =
        pack_strip(from + row * row_bytes, std::min(strip_rows_, rows - row), packed + row / kBlockRows * block_bytes);
    if (bad >= 0) return row * (cols_ / type_.columns) + bad;
  }
  return -1;
}

int64_t GgufPacker::pack_strip(const uint8_t* from, int64_t rows, uint8_t* packed) {
  const GgufParts parts{codes_.data(), scales_.data(), scale_bytes_.data(),
                        mins_.data(),  supers_.data(), min_supers_.data()};
  const int64_t bad = unpack_gguf(type_, from, rows * (cols_ / type_.columns), parts);
  if (bad >= 0) return bad;
  const PlainMatrix plain{.shape = {rows, cols_, type_.format},
                          .codes = codes_.data(),
                          .scales = at(scales_),
                          .zeros = at(mins_),
                          .scale_bytes = at(scale_bytes_),
                          .supers = at(supers_),
                          .min_supers = at(min_supers_)};
  pack_blocks(plain, 0, plain.shape.blocks(), packed);
  return -1;
}

bool GgufLayer::is_there(const Checkpoint& checkpoint, const std::string& prefix) {
  return checkpoint.contains(name_of(prefix, kGate)) || checkpoint.contains(name_of(prefix, kDown));
}

std::string GgufLayer::where(Projection part) const {
  return matrices_[part].tensor.file->path() + ": tensor '" + matrices_[part].name + "'";
}

Status GgufLayer::find_bias(const Checkpoint& checkpoint, const std::string& name, const ExpertTable& table,
                            int64_t rows, Projection part) {
  if (table.mlp.has_bias) return locate_bias(checkpoint, name, {table.shape.num_experts, rows}, &matrices_[part].bias);
  if (!checkpoint.contains(name)) return {};
  return bad_checkpoint(checkpoint.directory() + ": tensor '" + name +
                        "' is a bias, but the experts of this family have none");
}

Status GgufLayer::find(const Checkpoint& checkpoint, const std::string& prefix, const ExpertTable& table,
                       Projection part) {
  const bool down = part == kDown;
  const ExpertShape& shape = table.shape;
  const int64_t rows = down ? shape.hidden : shape.intermediate, cols = down ? shape.intermediate : shape.hidden;
  Matrices& found = matrices_[part];
  found.name = name_of(prefix, part);
  KT_RETURN_IF_ERROR(checkpoint.find(found.name, &found.tensor));
  const TensorEntry& entry = *found.tensor.entry;
  found.type = find_gguf_type(entry.dtype);
  if (found.type == nullptr)
    return bad_checkpoint(where(part) + " has type " + entry.dtype + "; experts are served in " + known_gguf_types());
  const std::vector<int64_t> wanted = {shape.num_experts, rows, cols};
  if (entry.shape != wanted)
    return bad_checkpoint(where(part) + " has shape " + shape_text(entry.shape) + ", expected " + shape_text(wanted));
  if (cols % found.type->columns)
    return bad_checkpoint(where(part) + " has rows of " + std::to_string(cols) + " weights, expected a multiple of " +
                          std::to_string(found.type->columns) + " (blocks of " + entry.dtype + ")");
  const int64_t bytes = shape.num_experts * rows * (cols / found.type->columns) * found.type->bytes;
  if (entry.bytes != bytes)
    return bad_checkpoint(where(part) + " has " + std::to_string(entry.bytes) + " bytes, expected " +
                          std::to_string(bytes));
  return find_bias(checkpoint, name_of(prefix, part, ".bias"), table, rows, part);
}

Status GgufLayer::open(const Checkpoint& checkpoint, const std::string& prefix, const ExpertTable& table,
                       GgufLayer* layer) {
  for (const Projection part : table.mlp.projections())
    KT_RETURN_IF_ERROR(layer->find(checkpoint, prefix, table, part));
  const bool has_gate = table.mlp.has_gate();
  if (!has_gate && checkpoint.contains(name_of(prefix, kGate)))
    return bad_checkpoint(checkpoint.directory() + ": tensor '" + name_of(prefix, kGate) +
                          "' is a gate, but the activation of these experts has none");
  const GgufType *up = layer->type_of(kUp), *gate = has_gate ? layer->type_of(kGate) : up,
                 *down = layer->type_of(kDown);
  if (gate != up)
    return bad_checkpoint(layer->where(kUp) + " has type " + up->name + ", expected " + gate->name + " as '" +
                          layer->matrices_[kGate].name + "'");
  if (up->format.integer() != down->format.integer())
    return bad_checkpoint(layer->where(kDown) + " has type " + down->name + ", and '" + layer->matrices_[kUp].name +
                          "' " + up->name + "; expected all of a layer in BF16, or none");
  return {};
}

Status GgufLayer::load_piece(int64_t stored, int64_t expert, Projection part, int node, ExpertLayer& into) const {
  const GgufType& type = *type_of(part);
  const Matrices& matrices = matrices_[part];
  const PackedShape shape = into.shape_of(part);
  const ExpertLayer::Piece piece = into.piece(expert, part, node);
  const int64_t blocks_of_row = shape.cols / type.columns, row_bytes = blocks_of_row * type.bytes;
  const int64_t strip_blocks = strip_blocks_of(row_bytes);
  const bool bf16 = !type.format.integer();
  if (node == 0 && into.mlp().has_bias) {
    TensorPart bias = matrices.bias;
    bias.first = stored * shape.rows;
    KT_RETURN_IF_ERROR(read_bias(bias, shape.rows, 1, into.bias_data(expert, part)));
  }
  AlignedBuffer raw;
  std::optional<GgufPacker> packer;
  if (!bf16) packer.emplace(type, shape.cols);
  for (int64_t block = 0; block < piece.blocks.blocks; block += strip_blocks) {
    const int64_t count = std::min(strip_blocks, piece.blocks.blocks - block);
    const int64_t first_row = (piece.first + block) * kBlockRows;
    const int64_t rows = std::min(count * kBlockRows, shape.rows - first_row);
    const int64_t stored_row = stored * shape.rows + first_row;
    auto* bytes = raw.reserve<uint8_t>(rows * row_bytes);
    KT_RETURN_IF_ERROR(
        matrices.tensor.file->read(*matrices.tensor.entry, stored_row * row_bytes, rows * row_bytes, bytes));
    uint8_t* packed = into.piece_data(expert, part, node) + block * shape.block_bytes();
    const int64_t bad = bf16 ? first_not_finite(reinterpret_cast<const uint16_t*>(bytes), rows * shape.cols)
                             : packer->pack(bytes, rows, packed);
    if (bad >= 0)
      return bad_checkpoint(where(part) + " holds a " + (bf16 ? "weight" : "scale") +
                            " that is NaN, infinite or above 1e30 in block " +
                            std::to_string(stored_row * blocks_of_row + bad) + " of " + type.name);
    if (bf16) pack_blocks({{rows, shape.cols, type.format}, bytes, nullptr, nullptr}, 0, count, packed);
  }
  return {};
}

}  // namespace kt
