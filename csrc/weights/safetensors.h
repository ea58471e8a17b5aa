// One .safetensors file: 8 bytes little-endian header length, a JSON header, then the tensors' bytes without a gap.
// https://huggingface.co/docs/safetensors (format section). The header is checked whole before a byte is used.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace kt {

struct TensorEntry {
  std::string dtype;  // "BF16", "F32", ...
  std::vector<int64_t> shape;
  int64_t offset = 0;  // from the start of the file
  int64_t bytes = 0;
};

class SafetensorsFile {
 public:
  static Status open(const std::string& path, std::shared_ptr<SafetensorsFile>* file);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const std::map<std::string, TensorEntry>& tensors() const { return tensors_; }

  // `bytes` bytes of the tensor from `first_byte` on. Safe to call from several threads.
  Status read(const TensorEntry& entry, int64_t first_byte, int64_t bytes, void* to) const;

 private:
  SafetensorsFile(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  Status read_header(int64_t file_bytes);

  std::string path_;
  int descriptor_;
  std::map<std::string, TensorEntry> tensors_;
};

}  // namespace kt
