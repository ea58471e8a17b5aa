// The routed experts of a layer in a GGUF file: three tensors `PREFIX.ffn_gate_exps.weight`, `..up_exps`, `..down_exps`
// [experts, rows, cols] of quantized blocks, which are packed as they are. gate and up have the same type.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "weights/checkpoint/checkpoint.h"
#include "weights/checkpoint/gguf_blocks.h"
#include "weights/packed.h"

namespace kt {

class GgufLayer {
 public:
  // Whether the checkpoint has such tensors under this prefix.
  static bool is_there(const Checkpoint& checkpoint, const std::string& prefix);
  // Checks types, shapes and sizes; reads nothing. `shape` is the layer's.
  static Status open(const Checkpoint& checkpoint, const std::string& prefix, ExpertShape shape, GgufLayer* layer);

  Format in_format() const { return type_of(kGate)->format; }
  Format out_format() const { return type_of(kDown)->format; }

  // Packs the part of an expert's matrix that lies on a node, strip by strip. Checks every scale (BF16: every weight).
  Status load_piece(int64_t expert, Projection part, int node, ExpertLayer& into) const;

 private:
  const GgufType* type_of(Projection part) const { return matrices_[part].type; }

  struct Matrices {  // of all experts
    std::string name;
    Checkpoint::Tensor tensor{};
    const GgufType* type = nullptr;
  };

  Status find(const Checkpoint& checkpoint, ExpertShape shape, Projection part);
  std::string where(Projection part) const;

  Matrices matrices_[kNumProjections];
};

}  // namespace kt
