// A view of rows in memory: row m begins at data + m * ld. The number of rows and of columns is given elsewhere.
#pragma once

#include <cstdint>
#include <type_traits>

namespace kt {

template <class T>
struct Rows {
  T* data = nullptr;
  int64_t ld = 0;  // leading dimension: elements from the beginning of a row to that of the next

  constexpr T* row(int64_t m) const { return data + m * ld; }
  // The view from element `col` of row `m` on.
  constexpr Rows from(int64_t m, int64_t col = 0) const { return {data + m * ld + col, ld}; }
  template <class U>
    requires std::is_same_v<U, const T>
  constexpr operator Rows<U>() const {
    return {data, ld};
  }
};

// Columns [first, first + count).
struct ColumnRange {
  int64_t first, count;
};

}  // namespace kt
