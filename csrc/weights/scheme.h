// How a checkpoint stores the experts of a layer. Found from the tensors' names and types, and from quantization_config
// in config.json, which must agree. `cols` are a matrix's inputs, `rows` its outputs; words are 32 bits, first code
// lowest.
//
//   dense         .weight BF16, F16 or F32 [rows, cols]; the last two are rounded to BF16 while they are read
//   fp8_blocks    .weight F8_E4M3 [rows, cols], .weight_scale_inv (DeepSeek-V3; compressed-tensors: .weight_scale)
//                 [rows / 128, cols / 128], rounded up: W = scale * value
//   fp8_rows      .weight F8_E4M3, .weight_scale [rows, 1]               compressed-tensors "float-quantized", channel
//   int8          .weight I8, .weight_scale [rows, groups], perhaps .weight_zero_point I8 [rows, groups]
//                                                                        compressed-tensors "int-quantized"
//   packed        .weight_packed I32 [rows, words of cols], .weight_scale [rows, groups], .weight_shape [2], perhaps
//                 .weight_zero_point I32 [words of rows, groups]; codes are stored with 2^(bits - 1) added
//                                                                        compressed-tensors "pack-quantized", Kimi-K2
//   gptq          .qweight I32 [words of cols, rows], .qzeros I32 [groups, words of rows], .scales [groups, rows],
//                 .g_idx I32 [cols]; zeros are stored less one (modulo 2^bits), unless checkpoint_format is gptq_v2
//   mxfp4         fused only: prefix.gate_up_proj_blocks U8 [E, 2I, H / 32, 16], .gate_up_proj_scales U8 [E, 2I, H /
//   32]
//                 and those of down_proj: e2m1 codes, low nibble first, and the exponents of their powers of two, with
//                 127 added                                               gpt-oss
//   awq           .qweight I32 [cols, rows / 8], .qzeros I32 [groups, rows / 8], .scales [groups, rows]; nibble i of a
//                 word holds row 0, 2, 4, 6, 1, 3, 5, 7 of its eight ("gemm" version)
//   fp4           two codes of e2m1 a byte, the first one low: .weight_packed or .weight U8 [rows, cols / 2]
//     nvfp4       .weight_scale F8_E4M3 [rows, cols / 16], and one F32 for the matrix:
//                 .weight_global_scale [1], a divisor                    compressed-tensors "nvfp4-pack-quantized"
//                 .weight_scale_2, a factor; codes in .weight            NVIDIA ModelOpt, quant_algo NVFP4
//     mxfp4       .weight_scale, exponents [rows, cols / 32]             compressed-tensors "mxfp4-pack-quantized"
//   mxfp8         .weight F8_E4M3 [rows, cols], exponents (U8 or F8_E8M0) [rows, cols / 32] under
//                 .weight_scale                                          compressed-tensors "mxfp8-quantized"
//                 .weight_scale_inv                                      quant_method "mxfp8"
//
// dense and fp8_blocks may be fused: prefix.gate_up_proj [E, 2I, H] and prefix.down_proj [E, H, I], the scales under
// ..._scale_inv; FusedLayout says which rows are whose. Biases are prefix.E.gate_proj.bias [rows], or fused
// prefix.gate_up_proj_bias [E, 2I], prefix.down_proj_bias [E, H]. Experts without a gate have up_proj in place of both.
#pragma once

#include <string>

#include "base/status.h"
#include "kernels/format.h"
#include "weights/checkpoint/checkpoint.h"
#include "weights/packed.h"

namespace kt {

enum class Storage { kDense, kFp8Blocks, kFp8Rows, kMxfp8, kInt8, kPacked, kGptq, kAwq, kFp4, kMxfp4 };

inline constexpr int64_t kFp8Block = 128;
inline constexpr int64_t kMxGroup = 32, kNvfp4Group = 16;

// Of fused tensors. A family's table has it: shapes alone do not tell where hidden and intermediate sizes are equal.
struct FusedLayout {
  bool interleaved = false;  // gate's row i is row 2 i of gate_up_proj, up's row 2 i + 1; else gate's rows come first
  bool transposed = false;   // gate_up_proj [E, H, 2I], down_proj [E, I, H]; of dense tensors, others never are
};

// The experts of a layer, as their family's table describes them.
struct ExpertTable {
  ExpertShape shape;
  ExpertMlp mlp{};
  FusedLayout layout{};
};

struct Scheme {
  Storage storage = Storage::kDense;
  bool fused = false;
  FusedLayout layout{};  // where it is fused
  int bits = 16;         // of a code
  int64_t group = 0;     // columns that share a scale; 0: a row has one
  bool zero_points = false;
  int zero_added = 0;  // added to the stored zero: 1 for the first version of GPTQ
  std::string scale_suffix = {};
  // kFp4: where the codes are, and the scale of the whole matrix; the latter empty for mxfp4.
  std::string code_suffix = {}, global_suffix = {};

  bool integer() const { return storage >= Storage::kInt8; }
  bool fp4() const { return storage == Storage::kFp4 || storage == Storage::kMxfp4; }
  int64_t codes_per_word() const { return 32 / bits; }
  // One scale and zero a row becomes groups of 128 columns with equal values, because zeros are stored by group.
  Format format() const;
};

Status find_scheme(const Checkpoint& checkpoint, const std::string& prefix, const ExpertTable& table, Scheme* scheme);

}  // namespace kt
