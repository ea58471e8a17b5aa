#include "weights/checkpoint/tensor_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kt {
namespace {

constexpr int64_t kLargestRead = int64_t{1} << 30;  // Linux reads at most 2^31 - 4096 bytes at once

}  // namespace

std::string shape_text(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

Status TensorFile::open(const std::string& path, int descriptor, std::map<std::string, TensorEntry> tensors,
                        std::shared_ptr<const TensorFile>* file) {
  const int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return bad_checkpoint(path + ": can't be kept open: " + std::strerror(errno));
  file->reset(new TensorFile(path, own, std::move(tensors)));
  return {};
}

TensorFile::~TensorFile() { ::close(descriptor_); }

Status TensorFile::read(const TensorEntry& entry, int64_t first_byte, int64_t bytes, void* to) const {
  if (first_byte < 0 || bytes < 0 || first_byte > entry.bytes - bytes)
    return bad_checkpoint(path_ + ": read outside a tensor");
  char* at = static_cast<char*>(to);
  for (int64_t offset = entry.offset + first_byte; bytes > 0;) {
    const ssize_t got = pread(descriptor_, at, static_cast<size_t>(std::min(bytes, kLargestRead)), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      const std::string reason = got < 0 ? std::strerror(errno) : "the file ends there: truncated while open";
      return bad_checkpoint(path_ + ": can't read " + std::to_string(bytes) + " bytes at byte " +
                            std::to_string(offset) + ": " + reason);
    }
    at += got;
    offset += got;
    bytes -= got;
  }
  return {};
}

}  // namespace kt
