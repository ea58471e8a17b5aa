#include "weights/scheme.h"

#include <algorithm>
#include <vector>

namespace kt {
namespace {

constexpr const char* kSupported =
    "; supported: bfloat16, float16, float32, fp8 (e4m3, blocks of 128 x 128), compressed-tensors (pack-quantized, "
    "int-quantized, float-quantized, naive-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized), "
    "modelopt (NVFP4), mxfp4, mxfp8, gptq, awq";

std::string text_of(const Setting* value) {
  if (value == nullptr) return "missing";
  switch (value->kind) {
    case Setting::Kind::kNull:
      return "null";
    case Setting::Kind::kBool:
      return value->boolean ? "true" : "false";
    case Setting::Kind::kNumber:
      return value->text;
    case Setting::Kind::kText:
      return "'" + value->text + "'";
    case Setting::Kind::kList: {
      std::string text = "[";
      for (const Setting& item : value->list) text += (text.size() > 1 ? ", " : "") + text_of(&item);
      return text + "]";
    }
    default:
      return "an object";
  }
}

bool is_true(const Setting* value) { return value && value->kind == Setting::Kind::kBool && value->boolean; }
bool is_text(const Setting* value, const char* wanted) {
  return value && value->kind == Setting::Kind::kText && value->text == wanted;
}
bool is_absent(const Setting* value) { return value == nullptr || value->kind == Setting::Kind::kNull; }

bool is_exponent(const std::string& dtype) { return dtype == "U8" || dtype == "F8_E8M0"; }
bool is_plain(const std::string& dtype) { return dtype == "BF16" || dtype == "F16" || dtype == "F32"; }

// [128, 128]
bool is_fp8_block(const Setting* value) {
  return value && value->kind == Setting::Kind::kList && value->list.size() == 2 &&
         std::all_of(value->list.begin(), value->list.end(),
                     [](const Setting& size) { return size.integral && size.integer == kFp8Block; });
}

class SchemeFinder {
 public:
  SchemeFinder(const Checkpoint& checkpoint, const std::string& prefix, const ExpertTable& table)
      : checkpoint_(checkpoint),
        prefix_(prefix),
        shape_(table.shape),
        layout_(table.layout),
        has_gate_(table.mlp.has_gate()),
        config_(checkpoint.quantization()) {
    if (config_ && config_->find("quant_method") && config_->find("quant_method")->kind == Setting::Kind::kText)
      method_ = config_->find("quant_method")->text;
  }

  Status find(Scheme* scheme) {
    const std::string fused = prefix_ + ".gate_up_proj", gate = prefix_ + ".0.gate_proj";
    for (const std::string& name : {fused, gate + ".weight", gate + ".weight_packed", gate + ".qweight"}) {
      if (!has_gate_ && has(name))
        return bad_checkpoint(checkpoint_.directory() + ": tensor '" + name +
                              "' is a gate, but the activation of these experts has none");
    }
    base_ = has_gate_ ? fused : prefix_ + ".up_proj";
    if (has(base_)) return find_fused(scheme);
    if (has(base_ + "_blocks")) return find_mxfp4(scheme);
    const std::string whole = base_;
    base_ = has_gate_ ? gate : prefix_ + ".0.up_proj";
    if (has(base_ + ".weight_packed")) return find_packed(scheme);
    if (has(base_ + ".qweight")) return find_transposed(scheme);
    if (has(base_ + ".weight")) return find_plain(scheme);
    return bad_checkpoint(checkpoint_.directory() + ": no experts under '" + prefix_ + "': tensor '" + base_ +
                          ".weight' is missing (nor .weight_packed, nor .qweight, nor '" + whole + "')");
  }

 private:
  bool has(const std::string& name) const { return checkpoint_.contains(name); }

  Status config_error(const std::string& key, const Setting* value, const std::string& allowed) const {
    return bad_checkpoint(checkpoint_.directory() + "/config.json: quantization_config: " + key + " is " +
                          text_of(value) + ", but experts under '" + prefix_ + "' need " + allowed);
  }
  Status method_error(const std::string& allowed) const {
    if (config_ == nullptr) {
      return bad_checkpoint(checkpoint_.directory() + ": tensors under '" + base_ +
                            "' are quantized, but config.json has no quantization_config; expected quant_method " +
                            allowed);
    }
    return config_error("quant_method", config_->find("quant_method"), allowed);
  }
  Status dtype_error(const std::string& name, const std::string& allowed) const {
    Checkpoint::Tensor tensor{};
    KT_RETURN_IF_ERROR(checkpoint_.find(name, &tensor));
    return bad_checkpoint(tensor.file->path() + ": tensor '" + name + "' has dtype " + tensor.entry->dtype +
                          ", expected " + allowed + kSupported);
  }
  std::string dtype(const std::string& name) const {
    Checkpoint::Tensor tensor{};
    return checkpoint_.find(name, &tensor).ok() ? tensor.entry->dtype : "";
  }

  Status find_fused(Scheme* scheme) {
    scheme->fused = true;
    scheme->layout = layout_;
    if (layout_.transposed && !is_plain(dtype(base_)))
      return dtype_error(base_, "BF16, F16 or F32, because it is stored transposed");
    if (dtype(base_) == "F8_E4M3") return find_fp8_blocks("_scale_inv", scheme);
    if (!is_plain(dtype(base_))) return dtype_error(base_, "BF16, F16, F32 or F8_E4M3");
    return dense("_scale_inv", scheme);
  }

  // Rows of codes are whole, also where the family's dense tensors are transposed.
  Status find_mxfp4(Scheme* scheme) const {
    if (config_ == nullptr || method_ != "mxfp4") return method_error("'mxfp4'");
    *scheme = {.storage = Storage::kMxfp4,
               .fused = true,
               .layout = {.interleaved = layout_.interleaved, .transposed = false},
               .bits = 4,
               .group = kMxGroup,
               .scale_suffix = "_scales"};
    return {};
  }

  Status find_plain(Scheme* scheme) {
    const std::string name = base_ + ".weight", type = dtype(name);
    if (is_plain(type)) return dense(".weight_scale", scheme);
    if (type == "F8_E4M3") {
      if (is_exponent(dtype(base_ + ".weight_scale_inv"))) return find_mxfp8(scheme);
      if (has(base_ + ".weight_scale_inv")) return find_fp8_blocks(".weight_scale_inv", scheme);
      scheme->storage = is_exponent(dtype(base_ + ".weight_scale")) ? Storage::kMxfp8 : Storage::kFp8Rows;
      return from_compressed(scheme);
    }
    if (type == "U8") return find_modelopt(scheme);
    if (type == "I8") {
      scheme->storage = Storage::kInt8;
      return from_compressed(scheme);
    }
    return dtype_error(name, "BF16, F16, F32, F8_E4M3, I8 or U8");
  }

  // Codes of integers, or of e2m1 in bytes.
  Status find_packed(Scheme* scheme) const {
    scheme->storage = Storage::kPacked;
    if (dtype(base_ + ".weight_packed") == "U8") {
      scheme->storage = Storage::kFp4;
      scheme->code_suffix = ".weight_packed";
      if (!is_exponent(dtype(base_ + ".weight_scale"))) scheme->global_suffix = ".weight_global_scale";
    }
    return from_compressed(scheme);
  }

  Status find_modelopt(Scheme* scheme) const {
    if (method_ != "modelopt" && method_ != "modelopt_fp4") return method_error("'modelopt'");
    const Setting* algorithm = config_->find("quant_algo");
    if (!is_text(algorithm, "NVFP4")) return config_error("quant_algo", algorithm, "'NVFP4'");
    *scheme = {.storage = Storage::kFp4,
               .bits = 4,
               .group = kNvfp4Group,
               .scale_suffix = ".weight_scale",
               .code_suffix = ".weight",
               .global_suffix = ".weight_scale_2"};
    return {};
  }

  Status find_mxfp8(Scheme* scheme) const {
    if (method_ != "mxfp8") return method_error("'mxfp8'");
    *scheme = {.storage = Storage::kMxfp8, .bits = 8, .group = kMxGroup, .scale_suffix = ".weight_scale_inv"};
    return {};
  }

  // A quantized checkpoint may leave its experts unquantized, so quantization_config does not describe dense experts.
  Status dense(const std::string& scale_suffix, Scheme* scheme) const {
    for (const std::string& suffix : {scale_suffix, scale_suffix + "_inv"}) {
      if (has(base_ + suffix))
        return bad_checkpoint(checkpoint_.directory() + ": tensor '" + base_ + suffix + "' is a scale, but '" + base_ +
                              "' is not quantized and has none");
    }
    *scheme = {.storage = Storage::kDense, .fused = scheme->fused, .layout = scheme->layout};
    return {};
  }

  Status find_fp8_blocks(const std::string& suffix, Scheme* scheme) const {
    if (config_) {
      if (method_ != "fp8") return method_error("'fp8'");
      const Setting* block = config_->find("weight_block_size");
      if (!is_fp8_block(block)) return config_error("weight_block_size", block, "[128, 128]");
    }
    *scheme = {.storage = Storage::kFp8Blocks,
               .fused = scheme->fused,
               .layout = scheme->layout,
               .bits = 8,
               .group = kFp8Block,
               .scale_suffix = suffix};
    return {};
  }

  Status find_transposed(Scheme* scheme) const {
    if (method_ == "gptq") return find_gptq(scheme);
    if (method_ == "awq") return find_awq(scheme);
    return method_error("'gptq' or 'awq' (tensor '" + base_ + ".qweight')");
  }

  // -1 is one group for the whole row.
  Status read_group(const std::string& key, const Setting* value, Scheme* scheme) const {
    const bool whole = value && value->kind == Setting::Kind::kNumber && value->text == "-1";
    if (!whole && !(value && value->integral && value->integer > 0 && value->integer % kColumnUnit == 0))
      return config_error(key, value, "a multiple of 32, or -1 for one group a row");
    scheme->group = whole ? 0 : value->integer;
    return {};
  }

  Status read_bits(const std::string& key, const Setting* value, bool eight, Scheme* scheme) const {
    if (!(value && value->integral && (value->integer == 4 || (eight && value->integer == 8))))
      return config_error(key, value, eight ? "4 or 8" : "4");
    scheme->bits = static_cast<int>(value->integer);
    return {};
  }

  Status find_gptq(Scheme* scheme) const {
    *scheme = {.storage = Storage::kGptq, .bits = 4, .zero_points = true, .zero_added = 1, .scale_suffix = ".scales"};
    KT_RETURN_IF_ERROR(read_bits("bits", config_->find("bits"), true, scheme));
    KT_RETURN_IF_ERROR(read_group("group_size", config_->find("group_size"), scheme));
    const Setting* layout = config_->find("checkpoint_format");
    if (is_text(layout, "gptq_v2")) {
      scheme->zero_added = 0;
    } else if (!is_absent(layout) && !is_text(layout, "gptq")) {
      return config_error("checkpoint_format", layout, "'gptq' or 'gptq_v2'");
    }
    if (is_true(config_->find("desc_act")) && !has(base_ + ".g_idx"))
      return config_error("desc_act", config_->find("desc_act"), "g_idx, which is missing, or desc_act false");
    scheme->zero_points = !is_true(config_->find("sym"));
    return {};
  }

  Status find_awq(Scheme* scheme) const {
    *scheme = {.storage = Storage::kAwq, .bits = 4, .zero_points = true, .scale_suffix = ".scales"};
    KT_RETURN_IF_ERROR(read_bits("bits", config_->find("bits"), false, scheme));
    KT_RETURN_IF_ERROR(read_group("group_size", config_->find("group_size"), scheme));
    const Setting* version = config_->find("version");
    if (!is_absent(version) && !is_text(version, "gemm") && !is_text(version, "GEMM"))
      return config_error("version", version, "'gemm'");
    const Setting* zeros = config_->find("zero_point");
    if (zeros && !is_true(zeros)) return config_error("zero_point", zeros, "true");
    return {};
  }

  // compressed-tensors: the group of config_groups that describes the experts. Of several the first that fits the
  // tensors of the first expert.
  Status from_compressed(Scheme* scheme) const {
    if (method_ != "compressed-tensors") return method_error("'compressed-tensors'");
    const Setting* groups = config_->find("config_groups");
    if (groups == nullptr || groups->kind != Setting::Kind::kObject || groups->members.empty())
      return config_error("config_groups", groups, "at least one group");
    Status first_error;
    for (const auto& [name, group] : groups->members) {
      Scheme candidate = *scheme;
      Status status = from_group("config_groups." + name + ".weights", group.find("weights"), &candidate);
      if (status.ok() && (groups->members.size() == 1 || fits(candidate))) {
        *scheme = candidate;
        return {};
      }
      if (first_error.ok()) first_error = status;
    }
    if (!first_error.ok()) return first_error;
    return config_error("config_groups", groups, "one that fits tensor '" + base_ + ".weight_scale'");
  }

  // Floats with a scale for 16 or 32 columns.
  Status from_float_group(const std::string& where, const Setting* weights, Scheme* scheme) const {
    const bool nvfp4 = !scheme->global_suffix.empty();
    scheme->bits = scheme->storage == Storage::kFp4 ? 4 : 8;
    scheme->group = nvfp4 ? kNvfp4Group : kMxGroup;
    scheme->scale_suffix = ".weight_scale";
    const auto is_number = [](const Setting* value, int64_t wanted) {
      return value && value->integral && value->integer == wanted;
    };
    const Setting *type = weights->find("type"), *bits = weights->find("num_bits"),
                  *strategy = weights->find("strategy"), *group = weights->find("group_size");
    const char* wanted = nvfp4 ? "tensor_group" : "group";
    if (!is_text(type, "float")) return config_error(where + ".type", type, "'float'");
    if (!is_number(bits, scheme->bits)) return config_error(where + ".num_bits", bits, std::to_string(scheme->bits));
    if (!is_text(strategy, wanted)) return config_error(where + ".strategy", strategy, "'" + std::string(wanted) + "'");
    if (!is_number(group, scheme->group))
      return config_error(where + ".group_size", group, std::to_string(scheme->group));
    return {};
  }

  Status from_group(const std::string& where, const Setting* weights, Scheme* scheme) const {
    if (weights == nullptr || weights->kind != Setting::Kind::kObject) return config_error(where, weights, "an object");
    if (scheme->storage == Storage::kFp4 || scheme->storage == Storage::kMxfp8)
      return from_float_group(where, weights, scheme);
    const bool fp8 = scheme->storage == Storage::kFp8Rows;
    const Setting *type = weights->find("type"), *bits = weights->find("num_bits"),
                  *strategy = weights->find("strategy");
    if (!is_text(type, fp8 ? "float" : "int")) return config_error(where + ".type", type, fp8 ? "'float'" : "'int'");
    const Setting* order = weights->find("actorder");
    if (is_text(order, "group") || has(base_ + ".weight_g_idx"))
      return config_error(where + ".actorder", order, "groups of neighbouring columns (no weight_g_idx)");
    scheme->scale_suffix = ".weight_scale";
    KT_RETURN_IF_ERROR(read_bits(where + ".num_bits", bits, true, scheme));
    if (scheme->storage != Storage::kPacked && scheme->bits != 8) return config_error(where + ".num_bits", bits, "8");
    if (fp8 && is_text(strategy, "block")) {
      const Setting* block = weights->find("block_structure");
      if (!is_fp8_block(block)) return config_error(where + ".block_structure", block, "[128, 128]");
      scheme->storage = Storage::kFp8Blocks;
      scheme->group = kFp8Block;
      return {};
    }
    scheme->group = 0;
    if (!fp8 && is_text(strategy, "group")) {
      KT_RETURN_IF_ERROR(read_group(where + ".group_size", weights->find("group_size"), scheme));
    } else if (!is_text(strategy, "channel")) {
      return config_error(where + ".strategy", strategy, fp8 ? "'channel' or 'block'" : "'group' or 'channel'");
    }
    const Setting* symmetric = weights->find("symmetric");
    scheme->zero_points = !fp8 && symmetric && !is_true(symmetric);
    return {};
  }

  bool fits(const Scheme& candidate) const {
    Checkpoint::Tensor codes{}, scales{};
    const bool fp4 = candidate.storage == Storage::kFp4, packed = fp4 || candidate.storage == Storage::kPacked;
    const std::string name = base_ + (packed ? ".weight_packed" : ".weight");
    if (!checkpoint_.find(name, &codes).ok() || !checkpoint_.find(base_ + ".weight_scale", &scales).ok()) return false;
    if (codes.entry->shape.size() != 2 || scales.entry->shape.size() != 2) return false;
    const int64_t per_word = fp4 ? 2 : packed ? candidate.codes_per_word() : 1;
    const int64_t words = round_up(shape_.hidden, per_word) / per_word;
    const int64_t groups = candidate.group ? (shape_.hidden + candidate.group - 1) / candidate.group : 1;
    return codes.entry->shape[1] == words && scales.entry->shape[1] == groups;
  }

  const Checkpoint& checkpoint_;
  const std::string& prefix_;
  const ExpertShape shape_;
  const FusedLayout layout_;
  const bool has_gate_;
  const Setting* config_;
  std::string method_, base_;
};

}  // namespace

Format Scheme::format() const {
  switch (storage) {
    case Storage::kDense:
      return {.encoding = Encoding::kBf16};
    case Storage::kFp8Blocks:
      return {.encoding = Encoding::kFp8, .group = kFp8Block};
    case Storage::kFp8Rows:
      return {.encoding = Encoding::kFp8};
    case Storage::kMxfp4:
      return {.encoding = Encoding::kFp4, .group = kMxGroup, .scales = Scales::kExponent};
    case Storage::kMxfp8:
      return {.encoding = Encoding::kFp8, .group = group, .scales = Scales::kExponent};
    case Storage::kFp4:
      if (global_suffix.empty()) return {.encoding = Encoding::kFp4, .group = group, .scales = Scales::kExponent};
      return {.encoding = Encoding::kFp4By16, .group = group, .scales = Scales::kFp8};
    default:
      return {.encoding = bits == 4 ? Encoding::kInt4 : Encoding::kInt8,
              .group = group == 0 && zero_points ? 128 : group,
              .zero_points = zero_points};
  }
}

Status find_scheme(const Checkpoint& checkpoint, const std::string& prefix, const ExpertTable& table, Scheme* scheme) {
  return SchemeFinder(checkpoint, prefix, table).find(scheme);
}

}  // namespace kt
