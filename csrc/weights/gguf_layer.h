// The routed experts of a layer in a GGUF file: three tensors `PREFIX.ffn_gate_exps.weight`, `..up_exps`, `..down_exps`
// [experts, rows, cols] of quantized blocks, which are packed as they are. gate and up have the same type. Biases are
// `PREFIX.ffn_gate_exps.bias` [experts, rows] and so on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "weights/checkpoint/checkpoint.h"
#include "weights/checkpoint/gguf_blocks.h"
#include "weights/packed.h"
#include "weights/source.h"

namespace kt {

// Packs rows of blocks of a quantized type, strip by strip: a strip's codes stay in the L2 cache.
class GgufPacker {
 public:
  // `cols`: whole blocks of the type, which is not BF16.
  GgufPacker(const GgufType& type, int64_t cols);

  // The blocks of 16 rows that `rows` rows begin. `from`: the rows' blocks; `packed`: the place of the first. Index of
  // the first block of the type whose scale is NaN, infinite or beyond 1e30; -1: none.
  int64_t pack(const uint8_t* from, int64_t rows, uint8_t* packed);

 private:
  int64_t pack_strip(const uint8_t* from, int64_t rows, uint8_t* packed);

  const GgufType& type_;
  const int64_t cols_, strip_rows_;
  std::vector<uint8_t> codes_, scale_bytes_, mins_;
  std::vector<float> scales_;
  std::vector<uint16_t> supers_, min_supers_;
};

class GgufLayer {
 public:
  // Whether the checkpoint has such tensors under this prefix.
  static bool is_there(const Checkpoint& checkpoint, const std::string& prefix);
  // Checks types, shapes and sizes; reads nothing.
  static Status open(const Checkpoint& checkpoint, const std::string& prefix, const ExpertTable& table,
                     GgufLayer* layer);

  Format in_format() const { return type_of(kUp)->format; }
  Format out_format() const { return type_of(kDown)->format; }

  // Packs the part of a matrix of the layer's `expert` that lies on a node, strip by strip. The tensors have it as
  // expert `stored`. Checks every scale (BF16: every weight).
  Status load_piece(int64_t stored, int64_t expert, Projection part, int node, ExpertLayer& into) const;

 private:
  const GgufType* type_of(Projection part) const { return matrices_[part].type; }

  struct Matrices {  // of all experts
    std::string name;
    Checkpoint::Tensor tensor{};
    const GgufType* type = nullptr;
    TensorPart bias{};
  };

  Status find(const Checkpoint& checkpoint, const std::string& prefix, const ExpertTable& table, Projection part);
  Status find_bias(const Checkpoint& checkpoint, const std::string& name, const ExpertTable& table, int64_t rows,
                   Projection part);
  std::string where(Projection part) const;

  Matrices matrices_[kNumProjections];
};

}  // namespace kt
