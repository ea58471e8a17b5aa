// A value of a configuration file, as Python's json reads it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kt {

struct Setting {
  enum class Kind { kNull, kBool, kNumber, kText, kList, kObject };

  Kind kind = Kind::kNull;
  bool boolean = false;
  bool integral = false;  // a number that is an integer from 0 to 2^63 - 1, in `integer`
  int64_t integer = 0;
  std::string text;  // of a text; of a number, for messages
  std::vector<Setting> list;
  std::vector<std::pair<std::string, Setting>> members;  // of an object, sorted by name

  // Null where the object has no such member, or where this is no object.
  const Setting* find(std::string_view name) const;
};

}  // namespace kt
