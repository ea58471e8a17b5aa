// The files of a checkpoint, where their tensors lie, and how its weights are quantized. Found and checked in Python
// (kt_runtime/experts/checkpoint.py).
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "weights/checkpoint/setting.h"
#include "weights/checkpoint/tensor_file.h"

namespace kt {

class Checkpoint {
 public:
  struct Tensor {
    const TensorFile* file;
    const TensorEntry* entry;
  };

  // `directory` is for messages. `quantization`: config.json's quantization_config; null (kNull) where there is none.
  Checkpoint(std::string directory, Setting quantization)
      : directory_(std::move(directory)), quantization_(std::move(quantization)) {}

  void add_file(std::shared_ptr<const TensorFile> file);

  bool contains(const std::string& name) const { return tensors_.count(name) != 0; }
  // A tensor that is not there is an error naming it.
  Status find(const std::string& name, Tensor* tensor) const;
  const std::string& directory() const { return directory_; }
  // Null where there is none.
  const Setting* quantization() const {
    return quantization_.kind == Setting::Kind::kObject ? &quantization_ : nullptr;
  }

 private:
  std::string directory_;
  Setting quantization_;
  std::vector<std::shared_ptr<const TensorFile>> files_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace kt
