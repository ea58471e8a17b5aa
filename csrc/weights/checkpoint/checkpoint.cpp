#include "weights/checkpoint/checkpoint.h"

namespace kt {

void Checkpoint::add_file(std::shared_ptr<const TensorFile> file) {
  for (const auto& [name, entry] : file->tensors()) tensors_[name] = {file.get(), &entry};
  files_.push_back(std::move(file));
}

Status Checkpoint::find(const std::string& name, Tensor* tensor) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return bad_checkpoint(directory_ + ": tensor '" + name + "' is missing");
  *tensor = found->second;
  return {};
}

}  // namespace kt
