#include "weights/checkpoint.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "weights/json.h"

namespace kt {
namespace {

Status read_json(const std::string& path, Json* value) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  if (!stream) return bad_checkpoint(path + ": cannot be read");
  std::string error;
  if (!parse_json(text.str(), value, &error)) return bad_checkpoint(path + ": not JSON: " + error);
  return {};
}

}  // namespace

Status Checkpoint::open(const std::string& directory, std::shared_ptr<Checkpoint>* checkpoint) {
  auto opened = std::make_shared<Checkpoint>();
  opened->directory_ = directory;
  std::error_code ignored;
  const std::string index = directory + "/model.safetensors.index.json", single = "model.safetensors";
  if (std::filesystem::exists(index, ignored)) {
    KT_RETURN_IF_ERROR(opened->open_index(index));
  } else if (std::filesystem::exists(directory + "/" + single, ignored)) {
    std::shared_ptr<SafetensorsFile> file;
    KT_RETURN_IF_ERROR(opened->open_file(single, &file));
    for (const auto& [name, entry] : file->tensors()) opened->tensors_[name] = {file.get(), &entry};
  } else {
    return {StatusCode::kNotFound,
            directory + ": neither model.safetensors.index.json nor model.safetensors is in this directory"};
  }
  KT_RETURN_IF_ERROR(opened->read_config());
  *checkpoint = std::move(opened);
  return {};
}

Status Checkpoint::read_config() {
  const std::string path = directory_ + "/config.json";
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return {};
  return read_json(path, &config_);
}

const Json* Checkpoint::quantization() const {
  for (const Json* holder : {static_cast<const Json*>(&config_), config_.find("text_config")}) {
    const Json* found = holder ? holder->find("quantization_config") : nullptr;
    if (found && found->kind == Json::Kind::kObject) return found;
  }
  return nullptr;
}

Status Checkpoint::open_file(const std::string& name, std::shared_ptr<SafetensorsFile>* file) {
  auto& slot = files_[name];
  if (!slot) KT_RETURN_IF_ERROR(SafetensorsFile::open(directory_ + "/" + name, &slot));
  *file = slot;
  return {};
}

Status Checkpoint::open_index(const std::string& index_path) {
  Json index;
  KT_RETURN_IF_ERROR(read_json(index_path, &index));
  const Json* map = index.find("weight_map");
  if (map == nullptr || map->kind != Json::Kind::kObject)
    return bad_checkpoint(index_path + ": has no weight_map object");
  for (const auto& [name, shard] : map->object) {
    const std::string& file_name = shard.string;
    if (shard.kind != Json::Kind::kString || file_name.empty() || file_name.find('/') != std::string::npos) {
      return bad_checkpoint(index_path + ": shard of '" + name + "' is not a file name in this directory");
    }
    std::shared_ptr<SafetensorsFile> file;
    KT_RETURN_IF_ERROR(open_file(file_name, &file));
    const auto found = file->tensors().find(name);
    if (found == file->tensors().end()) {
      return bad_checkpoint(file->path() + ": tensor '" + name + "' is missing, though the index places it here");
    }
    tensors_[name] = {file.get(), &found->second};
  }
  return {};
}

Status Checkpoint::find(const std::string& name, Tensor* tensor) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) return bad_checkpoint(directory_ + ": tensor '" + name + "' is missing");
  *tensor = found->second;
  return {};
}

}  // namespace kt
