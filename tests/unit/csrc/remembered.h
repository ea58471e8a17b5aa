// What one instruction set's tests have drawn, and computed in float64, serves those of the next, in the same process.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.h"

namespace kt_test {

// A hash of all that a truth is computed from (FNV-1a over words).
class Digest {
 public:
  template <class T>
  Digest& add(const T* values, size_t count) {
    static_assert(std::has_unique_object_representations_v<T> || std::is_floating_point_v<T>);
    const auto* bytes = reinterpret_cast<const unsigned char*>(values);
    mix(count);
    for (size_t at = 0, size = count * sizeof(T), taken; at < size; at += taken) {
      uint64_t word = 0;
      taken = size - at < sizeof word ? size - at : sizeof word;
      std::memcpy(&word, bytes + at, taken);
      mix(word);
    }
    return *this;
  }
  template <class T>
  Digest& add(const std::vector<T>& values) {
    return add(values.data(), values.size());
  }
  template <class T>
  Digest& add(const T& value) {
    return add(&value, 1);
  }
  uint64_t value() const { return value_; }

 private:
  void mix(uint64_t word) {
    value_ = (value_ ^ word) * 0x100000001b3u;
    value_ ^= value_ >> 29;
  }
  uint64_t value_ = 0xcbf29ce484222325u;
};

// make(), or what it returned for the same digest before. Each place that calls this has results of its own.
template <class Make>
const std::invoke_result_t<Make>& remembered(const Digest& digest, Make make) {
  static std::map<uint64_t, std::invoke_result_t<Make>> known;
  const auto found = known.find(digest.value());
  if (found != known.end()) return found->second;
  return known.emplace(digest.value(), make()).first->second;
}

// make(random), or what it returned for the same digest and state of `random` before, after which `random` is the same.
template <class Make>
const std::invoke_result_t<Make, Random&>& drawn_once(Random& random, Digest digest, Make make) {
  using Value = std::invoke_result_t<Make, Random&>;
  const std::pair<Value, Random>& drawn = remembered(digest.add(random.state()), [&] {
    Random own = random;
    Value value = make(own);
    return std::pair<Value, Random>(std::move(value), own);
  });
  random = drawn.second;
  return drawn.first;
}

}  // namespace kt_test
