// An open file of which it is known where its tensors lie. The header is read and checked in Python
// (kt_runtime/checkpoint_file.py, gguf_file.py).
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

// "[2, 3]"
std::string shape_text(const std::vector<int64_t>& sizes);

class TensorFile {
 public:
  // Keeps a copy of the descriptor, which stays the caller's. `path` is for messages.
  static Status open(const std::string& path, int descriptor, std::map<std::string, TensorEntry> tensors,
                     std::shared_ptr<const TensorFile>* file);
  ~TensorFile();
  TensorFile(const TensorFile&) = delete;
  TensorFile& operator=(const TensorFile&) = delete;

  const std::string& path() const { return path_; }
  const std::map<std::string, TensorEntry>& tensors() const { return tensors_; }

  // `bytes` bytes of the tensor from `first_byte` on. Safe to call from several threads.
  Status read(const TensorEntry& entry, int64_t first_byte, int64_t bytes, void* to) const;

 private:
  TensorFile(std::string path, int descriptor, std::map<std::string, TensorEntry> tensors)
      : path_(std::move(path)), descriptor_(descriptor), tensors_(std::move(tensors)) {}

  std::string path_;
  int descriptor_;
  std::map<std::string, TensorEntry> tensors_;
};

}  // namespace kt
