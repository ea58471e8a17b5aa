// A Hugging Face checkpoint directory: model.safetensors.index.json with its shards, or one model.safetensors.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/status.h"
#include "weights/json.h"
#include "weights/safetensors.h"

namespace kt {

class Checkpoint {
 public:
  struct Tensor {
    const SafetensorsFile* file;
    const TensorEntry* entry;
  };

  // Opens every shard and checks its header. config.json is read where there is one.
  static Status open(const std::string& directory, std::shared_ptr<Checkpoint>* checkpoint);

  bool contains(const std::string& name) const { return tensors_.count(name) != 0; }
  // A tensor that is not there is an error naming it.
  Status find(const std::string& name, Tensor* tensor) const;
  const std::string& directory() const { return directory_; }
  // quantization_config of config.json, of the text model where there are several; null where there is none.
  const Json* quantization() const;

 private:
  Status read_config();
  Status open_index(const std::string& index_path);
  Status open_file(const std::string& name, std::shared_ptr<SafetensorsFile>* file);

  std::string directory_;
  Json config_;
  std::map<std::string, std::shared_ptr<SafetensorsFile>> files_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace kt
