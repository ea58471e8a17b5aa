// The loop that only reads, over an instruction set's widest load.
#pragma once

#include <cstdint>

namespace kt {
namespace {

// Load::kBytes divides 256. Load::load(const uint8_t*) is an aligned load; Load::mix(a, b) keeps both alive.
template <class Load, int kStreams>
typename Load::Vector read_streams(const uint8_t* data, int64_t bytes) {
  constexpr int64_t kStep = 256;
  const int64_t run = bytes / kStreams;
  typename Load::Vector sums[4] = {};
  for (int64_t at = 0; at < run; at += kStep) {
#pragma GCC unroll 4
    for (int stream = 0; stream < kStreams; ++stream) {
      const uint8_t* from = data + stream * run + at;
#pragma GCC unroll 32
      for (int64_t i = 0; i < kStep / Load::kBytes; ++i) {
        sums[i % 4] = Load::mix(sums[i % 4], Load::load(from + i * Load::kBytes));
      }
    }
  }
  return Load::mix(Load::mix(sums[0], sums[1]), Load::mix(sums[2], sums[3]));
}

template <class Load>
typename Load::Vector read_memory(const uint8_t* data, int64_t bytes, int streams) {
  if (streams == 4) return read_streams<Load, 4>(data, bytes);
  if (streams == 2) return read_streams<Load, 2>(data, bytes);
  return read_streams<Load, 1>(data, bytes);
}

}  // namespace
}  // namespace kt
