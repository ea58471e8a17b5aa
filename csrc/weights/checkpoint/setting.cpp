#include "weights/checkpoint/setting.h"

#include <algorithm>

namespace kt {

const Setting* Setting::find(std::string_view name) const {
  const auto at = std::lower_bound(members.begin(), members.end(), name,
                                   [](const auto& member, std::string_view wanted) { return member.first < wanted; });
  return at != members.end() && at->first == name ? &at->second : nullptr;
}

}  // namespace kt
