#include "ops/dense/rotary.h"

#include <algorithm>
#include <cstring>

#include "base/scratch.h"
#include "threads/pool.h"

namespace kt {
namespace {

constexpr int64_t kTaskElements = 1 << 15;

void* head_of(const TensorView& heads, int64_t token, int64_t head) {
  return heads.as<char>() + (token * heads.strides[0] + head * heads.strides[1]) * dtype_bytes(heads.dtype);
}

// The angles of a token, with negated sines.
template <class T>
const void* inverse_of(const void* angles, int64_t half, T* to) {
  std::memcpy(to, angles, static_cast<size_t>(2 * half) * sizeof(T));
  constexpr T kSign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
  for (int64_t i = half; i < 2 * half; ++i) to[i] ^= kSign;
  return to;
}

}  // namespace

void rotate(const DenseEngine& engine, const Rotation& rotation) {
  const TensorView &x = rotation.x, &out = rotation.out;
  const int64_t tokens = x.shape[0], heads = x.shape[1], size = x.shape[2], rotated = rotation.angles.shape[1];
  if (tokens == 0 || heads == 0) return;
  const bool bf16 = x.dtype == DType::kBf16;
  const size_t bytes = static_cast<size_t>(size * dtype_bytes(x.dtype));
  const OperationScope scope;
  const int64_t at_once = std::max<int64_t>(kTaskElements / (heads * size), 1);
  run_ranges(tokens, at_once, engine.num_threads, [&](int64_t first, int64_t count) {
    static thread_local Scratch scratch;
    float* negated = scratch.reserve<float>(rotated);
    for (int64_t t = first; t < first + count; ++t) {
      for (int64_t n = 0; n < heads; ++n) {
        std::memcpy(head_of(out, t, n), head_of(x, t, n), bytes);
      }
      const int64_t position = rotation.positions.as<const int64_t>()[t];
      const void* angles = rotation.angles.as<char>() + position * rotated * dtype_bytes(x.dtype);
      if (rotation.inverse) {
        angles = bf16 ? inverse_of(angles, rotated / 2, reinterpret_cast<uint16_t*>(negated))
                      : inverse_of(angles, rotated / 2, reinterpret_cast<uint32_t*>(negated));
      }
      engine.kernels().rotate({.heads = heads,
                               .half = rotated / 2,

                               .x = {.data = head_of(out, t, 0), .stride = out.strides[1], .bf16 = bf16},
                               .angles = angles,
                               .interleaved = rotation.interleaved});
    }
  });
}

}  // namespace kt
