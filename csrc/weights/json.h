// The part of JSON (RFC 8259) that weight files use, read strictly: no duplicate keys, no trailing bytes, bounded
// depth. NaN and Infinity, which Python's json writes into config.json, are numbers that are not integral.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kt {

struct Json {
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };

  Kind kind = Kind::kNull;
  bool boolean = false;
  bool integral = false;  // a number that is a non-negative integer below 10^18, in `integer`
  int64_t integer = 0;
  std::string string;  // of a string; of a number, as it is written
  std::vector<Json> array;
  std::vector<std::pair<std::string, Json>> object;  // sorted by key

  const Json* find(std::string_view key) const;
};

// False, with the reason in `error`, when `text` is not one JSON value.
bool parse_json(std::string_view text, Json* value, std::string* error);

}  // namespace kt
