#include "weights/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "weights/json.h"

namespace kt {
namespace {

constexpr int64_t kMaxHeaderBytes = 100'000'000;

struct DTypeBytes {
  const char* name;
  int64_t bytes;
};
constexpr DTypeBytes kDTypes[] = {{"BF16", 2}, {"F16", 2},     {"F32", 4},     {"F64", 8},    {"I8", 1},  {"U8", 1},
                                  {"I16", 2},  {"U16", 2},     {"I32", 4},     {"U32", 4},    {"I64", 8}, {"U64", 8},
                                  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};

bool read_exactly(int descriptor, void* to, int64_t bytes, int64_t offset) {
  char* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = pread(descriptor, at, static_cast<size_t>(std::min<int64_t>(bytes, int64_t{1} << 30)), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    offset += got;
    bytes -= got;
  }
  return true;
}

// Elements times element size, or an error for a shape that is not one, an unknown type, or a product over 2^62.
bool tensor_bytes(const TensorEntry& entry, int64_t* bytes, std::string* error) {
  const auto known = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                  [&](const DTypeBytes& candidate) { return entry.dtype == candidate.name; });
  if (known == std::end(kDTypes)) {
    *error = "unknown dtype '" + entry.dtype + "'";
    return false;
  }
  *bytes = known->bytes;
  for (const int64_t size : entry.shape) {
    if (__builtin_mul_overflow(*bytes, size, bytes)) {
      *error = "shape too large";
      return false;
    }
  }
  return true;
}

bool parse_entry(const Json& json, int64_t data_bytes, TensorEntry* entry, std::string* error) {
  const Json* dtype = json.find("dtype");
  const Json* shape = json.find("shape");
  const Json* offsets = json.find("data_offsets");
  const auto is_list = [](const Json* list) {
    return list && list->kind == Json::Kind::kArray &&
           std::all_of(list->array.begin(), list->array.end(), [](const Json& item) { return item.integral; });
  };
  if (!dtype || dtype->kind != Json::Kind::kString || !is_list(shape) || !is_list(offsets) ||
      offsets->array.size() != 2) {
    *error = "needs dtype, shape and data_offsets";
    return false;
  }
  entry->dtype = dtype->string;
  for (const Json& size : shape->array) entry->shape.push_back(size.integer);
  const int64_t begin = offsets->array[0].integer, end = offsets->array[1].integer;
  int64_t bytes;
  if (!tensor_bytes(*entry, &bytes, error)) return false;
  if (begin > end || end > data_bytes) {
    *error = "data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) +
             "] are out of range: the file holds " + std::to_string(data_bytes) + " bytes of data (truncated?)";
    return false;
  }
  if (end - begin != bytes) {
    *error =
        "data_offsets span " + std::to_string(end - begin) + " bytes, shape and dtype need " + std::to_string(bytes);
    return false;
  }
  entry->offset = begin;
  entry->bytes = bytes;
  return true;
}

}  // namespace

Status SafetensorsFile::open(const std::string& path, std::shared_ptr<SafetensorsFile>* file) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    const int reason = errno;
    return {reason == ENOENT ? StatusCode::kNotFound : StatusCode::kBadCheckpoint, path + ": " + std::strerror(reason)};
  }
  std::shared_ptr<SafetensorsFile> opened(new SafetensorsFile(path, descriptor));
  struct stat info;
  if (fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) return bad_checkpoint(path + ": not a regular file");
  KT_RETURN_IF_ERROR(opened->read_header(info.st_size));
  *file = std::move(opened);
  return {};
}

SafetensorsFile::~SafetensorsFile() { ::close(descriptor_); }

Status SafetensorsFile::read_header(int64_t file_bytes) {
  unsigned char prefix[8];
  if (file_bytes < 8 || !read_exactly(descriptor_, prefix, 8, 0)) {
    return bad_checkpoint(path_ + ": " + std::to_string(file_bytes) + " bytes is too short for a safetensors file");
  }
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = (header_bytes << 8) | prefix[i];
  if (header_bytes > static_cast<uint64_t>(kMaxHeaderBytes) || header_bytes > static_cast<uint64_t>(file_bytes - 8)) {
    return bad_checkpoint(path_ + ": header length " + std::to_string(header_bytes) + " is not possible in a file of " +
                          std::to_string(file_bytes) + " bytes (at most " + std::to_string(kMaxHeaderBytes) + ")");
  }
  std::string text(header_bytes, '\0');
  if (!read_exactly(descriptor_, text.data(), static_cast<int64_t>(header_bytes), 8)) {
    return bad_checkpoint(path_ + ": header cannot be read");
  }
  Json header;
  std::string error;
  if (!parse_json(text, &header, &error)) return bad_checkpoint(path_ + ": header is not JSON: " + error);
  if (header.kind != Json::Kind::kObject) return bad_checkpoint(path_ + ": header is not an object");
  const int64_t data_start = 8 + static_cast<int64_t>(header_bytes);
  for (const auto& [name, json] : header.object) {
    if (name == "__metadata__") continue;
    TensorEntry entry;
    if (!parse_entry(json, file_bytes - data_start, &entry, &error)) {
      return bad_checkpoint(path_ + ": tensor '" + name + "': " + error);
    }
    tensors_.emplace(name, std::move(entry));
  }
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (auto& [name, entry] : tensors_) {
    spans.emplace_back(entry.offset, entry.offset + entry.bytes);
    entry.offset += data_start;
  }
  std::sort(spans.begin(), spans.end());
  int64_t covered = 0;
  for (const auto& [begin, end] : spans) {
    if (begin != covered) {
      return bad_checkpoint(path_ + ": tensors overlap or leave a gap at data byte " +
                            std::to_string(std::min(begin, covered)));
    }
    covered = end;
  }
  if (covered != file_bytes - data_start) {
    return bad_checkpoint(path_ + ": " + std::to_string(file_bytes - data_start - covered) +
                          " bytes after the last tensor");
  }
  return {};
}

Status SafetensorsFile::read(const TensorEntry& entry, int64_t first_byte, int64_t bytes, void* to) const {
  if (first_byte < 0 || bytes < 0 || first_byte + bytes > entry.bytes)
    return bad_checkpoint(path_ + ": read outside a tensor");
  if (!read_exactly(descriptor_, to, bytes, entry.offset + first_byte)) {
    return bad_checkpoint(path_ + ": cannot read " + std::to_string(bytes) + " bytes at " +
                          std::to_string(entry.offset + first_byte) + " (truncated while open?)");
  }
  return {};
}

}  // namespace kt
