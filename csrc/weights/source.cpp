#include "weights/source.h"

#include <algorithm>

namespace kt {
namespace {

using Sizes = std::vector<int64_t>;

int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

std::string text_of(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " or ") + name;
  return text;
}

const std::vector<std::string> kScaleTypes = {"F32", "BF16", "F16"};
const std::vector<std::string> kExponentTypes = {"U8", "F8_E8M0"};
const std::vector<std::string> kPlainTypes = {"BF16", "F16", "F32"};

Status find_tensor(const Checkpoint& checkpoint, const std::string& name, const std::vector<std::string>& dtypes,
                   const Sizes& wanted, TensorPart* part) {
  part->name = name;
  KT_RETURN_IF_ERROR(checkpoint.find(name, &part->tensor));
  const TensorEntry& entry = *part->tensor.entry;
  if (std::find(dtypes.begin(), dtypes.end(), entry.dtype) == dtypes.end())
    return bad_checkpoint(part->where() + " has dtype " + entry.dtype + ", expected " + text_of(dtypes));
  if (entry.shape != wanted)
    return bad_checkpoint(part->where() + " has shape " + shape_text(entry.shape) + ", expected " + shape_text(wanted));
  return {};
}

class Locator {
 public:
  Locator(const Checkpoint& checkpoint, const std::string& prefix, const Scheme& scheme, const ExpertTable& table,
          int64_t expert, Projection part)
      : checkpoint_(checkpoint),
        prefix_(prefix),
        scheme_(scheme),
        shape_(table.shape),
        mlp_(table.mlp),
        expert_(expert),
        part_(part),
        rows_(part == kDown ? shape_.hidden : shape_.intermediate),
        cols_(part == kDown ? shape_.intermediate : shape_.hidden),
        groups_(scheme.group ? cols_ / scheme.group : 1) {
    static const char* const kNames[] = {".gate_proj", ".up_proj", ".down_proj"};
    base_ = prefix + "." + std::to_string(expert) + kNames[part];
  }

  Status locate(MatrixSource* source) const {
    KT_RETURN_IF_ERROR(check_sizes());
    if (scheme_.fused) return locate_fused(source);
    KT_RETURN_IF_ERROR(locate_single_bias(source));
    switch (scheme_.storage) {
      case Storage::kDense:
        return find(".weight", kPlainTypes, {rows_, cols_}, &source->codes);
      case Storage::kFp8Blocks:
        KT_RETURN_IF_ERROR(find(".weight", {"F8_E4M3"}, {rows_, cols_}, &source->codes));
        return find(scheme_.scale_suffix, kScaleTypes, {divide_up(rows_, kFp8Block), divide_up(cols_, kFp8Block)},
                    &source->scales);
      case Storage::kFp8Rows:
        KT_RETURN_IF_ERROR(find(".weight", {"F8_E4M3"}, {rows_, cols_}, &source->codes));
        return find(scheme_.scale_suffix, kScaleTypes, {rows_, 1}, &source->scales);
      case Storage::kInt8:
        KT_RETURN_IF_ERROR(find(".weight", {"I8"}, {rows_, cols_}, &source->codes));
        return locate_compressed({"I8"}, {rows_, groups_}, source);
      case Storage::kPacked:
        KT_RETURN_IF_ERROR(find(".weight_packed", {"I32"}, {rows_, words(cols_)}, &source->codes));
        KT_RETURN_IF_ERROR(find(".weight_shape", {"I32", "I64"}, {2}, &source->shape));
        return locate_compressed({"I32"}, {words(rows_), groups_}, source);
      case Storage::kMxfp8:
        KT_RETURN_IF_ERROR(find(".weight", {"F8_E4M3"}, {rows_, cols_}, &source->codes));
        return find(scheme_.scale_suffix, kExponentTypes, {rows_, groups_}, &source->scales);
      case Storage::kFp4:
        return locate_fp4(source);
      default:
        return locate_transposed(source);
    }
  }

 private:
  int64_t words(int64_t codes) const { return divide_up(codes, scheme_.codes_per_word()); }

  Status size_error(const char* what, int64_t size, int64_t unit) const {
    return bad_checkpoint(checkpoint_.directory() + ": '" + base_ + "' has " + std::to_string(size) + " " + what +
                          ", not a multiple of " + std::to_string(unit) + " as its format needs");
  }
  Status check_sizes() const {
    if (scheme_.storage != Storage::kFp8Blocks && scheme_.group && cols_ % scheme_.group)
      return size_error("inputs, in groups", cols_, scheme_.group);
    const bool transposed = scheme_.storage == Storage::kGptq || scheme_.storage == Storage::kAwq;
    if (transposed && rows_ % scheme_.codes_per_word()) return size_error("outputs", rows_, scheme_.codes_per_word());
    if (scheme_.storage == Storage::kGptq && cols_ % scheme_.codes_per_word())
      return size_error("inputs", cols_, scheme_.codes_per_word());
    if (scheme_.fused && scheme_.storage == Storage::kFp8Blocks && shape_.intermediate % kBlockRows)
      return size_error("outputs, fused in fp8", shape_.intermediate, kBlockRows);
    return {};
  }

  Status find_named(const std::string& name, const std::vector<std::string>& dtypes, const Sizes& wanted,
                    TensorPart* part) const {
    return find_tensor(checkpoint_, name, dtypes, wanted, part);
  }
  Status find(const std::string& suffix, const std::vector<std::string>& dtypes, const Sizes& wanted,
              TensorPart* part) const {
    return find_named(base_ + suffix, dtypes, wanted, part);
  }

  Status locate_fused(MatrixSource* source) const {
    const bool both = is_half();
    const int64_t all_rows = both ? 2 * rows_ : rows_;
    const std::string name = prefix_ + (part_ == kDown ? ".down_proj" : both ? ".gate_up_proj" : ".up_proj");
    if (scheme_.storage == Storage::kMxfp4) return locate_mxfp4(name, both ? 2 * rows_ : rows_, source);
    const bool fp8 = scheme_.storage == Storage::kFp8Blocks, transposed = scheme_.layout.transposed;
    const std::vector<std::string> types = fp8 ? std::vector<std::string>{"F8_E4M3"} : kPlainTypes;
    const int64_t stored_rows = transposed ? cols_ : all_rows, stored_cols = transposed ? all_rows : cols_;
    KT_RETURN_IF_ERROR(find_named(name, types, {shape_.num_experts, stored_rows, stored_cols}, &source->codes));
    place_rows(source);
    source->codes.first = expert_ * all_rows * cols_ + source->first_row * (transposed ? 1 : cols_);
    KT_RETURN_IF_ERROR(locate_fused_bias(name + "_bias", source));
    if (!fp8) return {};
    const int64_t scale_rows = divide_up(all_rows, kFp8Block), scale_cols = divide_up(cols_, kFp8Block);
    KT_RETURN_IF_ERROR(find_named(name + scheme_.scale_suffix, kScaleTypes,
                                  {shape_.num_experts, scale_rows, scale_cols}, &source->scales));
    source->scales.first = expert_ * scale_rows * scale_cols;
    return {};
  }

  // Whether the fused tensor holds another matrix too.
  bool is_half() const { return part_ != kDown && mlp_.has_gate(); }

  void place_rows(MatrixSource* source) const {
    const bool interleaved = is_half() && scheme_.layout.interleaved;
    source->first_row = !is_half() || part_ == kGate ? 0 : interleaved ? 1 : rows_;
    source->row_step = interleaved ? 2 : 1;
    source->stored_rows = is_half() ? 2 * rows_ : rows_;
  }

  Status locate_mxfp4(const std::string& name, int64_t all_rows, MatrixSource* source) const {
    constexpr int64_t kGroupBytes = kMxGroup / 2;
    place_rows(source);
    KT_RETURN_IF_ERROR(
        find_named(name + "_blocks", {"U8"}, {shape_.num_experts, all_rows, groups_, kGroupBytes}, &source->codes));
    KT_RETURN_IF_ERROR(
        find_named(name + scheme_.scale_suffix, {"U8"}, {shape_.num_experts, all_rows, groups_}, &source->scales));
    const int64_t first_group = (expert_ * all_rows + source->first_row) * groups_;
    source->codes.first = first_group * kGroupBytes;
    source->scales.first = first_group;
    return locate_fused_bias(name + "_bias", source);
  }

  Status locate_fused_bias(const std::string& name, MatrixSource* source) const {
    if (!mlp_.has_bias) return refuse_bias(name);
    source->bias.first = expert_ * source->stored_rows + source->first_row;
    return locate_bias(checkpoint_, name, {shape_.num_experts, source->stored_rows}, &source->bias);
  }
  Status locate_single_bias(MatrixSource* source) const {
    if (!mlp_.has_bias) return refuse_bias(base_ + ".bias");
    return locate_bias(checkpoint_, base_ + ".bias", {rows_}, &source->bias);
  }
  Status refuse_bias(const std::string& name) const {
    if (!checkpoint_.contains(name)) return {};
    return bad_checkpoint(checkpoint_.directory() + ": tensor '" + name +
                          "' is a bias, but the experts of this family have none");
  }

  Status locate_compressed(const std::vector<std::string>& zero_types, const Sizes& zero_sizes,
                           MatrixSource* source) const {
    KT_RETURN_IF_ERROR(find(".weight_scale", kScaleTypes, {rows_, groups_}, &source->scales));
    if (scheme_.zero_points) return find(".weight_zero_point", zero_types, zero_sizes, &source->zeros);
    if (!checkpoint_.contains(base_ + ".weight_zero_point")) return {};
    return bad_checkpoint(checkpoint_.directory() + ": tensor '" + base_ +
                          ".weight_zero_point' is there, but quantization_config says symmetric");
  }

  Status locate_fp4(MatrixSource* source) const {
    const bool nvfp4 = !scheme_.global_suffix.empty();
    KT_RETURN_IF_ERROR(find(scheme_.code_suffix, {"U8"}, {rows_, cols_ / 2}, &source->codes));
    const std::vector<std::string> types = nvfp4 ? std::vector<std::string>{"F8_E4M3"} : kExponentTypes;
    KT_RETURN_IF_ERROR(find(scheme_.scale_suffix, types, {rows_, groups_}, &source->scales));
    if (!nvfp4) return {};
    source->global.name = base_ + scheme_.global_suffix;
    KT_RETURN_IF_ERROR(checkpoint_.find(source->global.name, &source->global.tensor));
    const Sizes& sizes = source->global.tensor.entry->shape;  // [] or [1]
    return find(scheme_.global_suffix, {"F32"}, sizes.empty() ? sizes : Sizes{1}, &source->global);
  }

  Status locate_transposed(MatrixSource* source) const {
    const bool gptq = scheme_.storage == Storage::kGptq;
    KT_RETURN_IF_ERROR(
        find(".qweight", {"I32"}, gptq ? Sizes{words(cols_), rows_} : Sizes{cols_, words(rows_)}, &source->codes));
    KT_RETURN_IF_ERROR(find(".scales", kScaleTypes, {groups_, rows_}, &source->scales));
    KT_RETURN_IF_ERROR(find(".qzeros", {"I32"}, {groups_, words(rows_)}, &source->zeros));
    if (!gptq || !checkpoint_.contains(base_ + ".g_idx")) return {};
    return find(".g_idx", {"I32"}, {cols_}, &source->group_index);
  }

  const Checkpoint& checkpoint_;
  const std::string& prefix_;
  const Scheme& scheme_;
  const ExpertShape shape_;
  const ExpertMlp mlp_;
  const int64_t expert_;
  const Projection part_;
  const int64_t rows_, cols_, groups_;
  std::string base_;
};

}  // namespace

Status locate(const Checkpoint& checkpoint, const std::string& prefix, const Scheme& scheme, const ExpertTable& table,
              int64_t expert, Projection part, MatrixSource* source) {
  return Locator(checkpoint, prefix, scheme, table, expert, part).locate(source);
}

Status locate_bias(const Checkpoint& checkpoint, const std::string& name, const Sizes& wanted, TensorPart* bias) {
  return find_tensor(checkpoint, name, kPlainTypes, wanted, bias);
}

}  // namespace kt
