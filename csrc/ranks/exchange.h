// What processes that compute one model together (ranks) send each other: columns and rows as they are, never sums.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "base/views.h"

namespace kt {

// All ranks make the same calls in the same order; a call returns when every rank has made it. Matrices have rows
// without gaps. An error is kLostRank: another rank has ended, has given up, or does not answer. Nothing can be
// exchanged after it. Not thread-safe.
class Exchange {
 public:
  Exchange(int rank, int num_ranks) : rank_(rank), num_ranks_(num_ranks) {}
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

  // matrix [T, N C]: each of the N ranks has written its own C columns, in the ranks' order. Writes those of the
  // others.
  virtual Status gather_columns(const TensorView& matrix) = 0;

  // own [counts[rank], N C] of each rank -> out [sum of counts, N C], all ranks' rows in the ranks' order, or
  // [sum of counts, C], this rank's columns of them. The two do not overlap.
  virtual Status gather_rows(const TensorView& own, const std::vector<int64_t>& counts, const TensorView& out) = 0;

  // Whether a call takes a few microseconds, so that one that spares another may send N times as many bytes.
  virtual bool is_near() const = 0;

  // So far: time in which this rank waited for others, and what it has sent to others.
  double waited_seconds() const { return waited_seconds_; }
  int64_t sent_bytes() const { return sent_bytes_; }

  // This rank goes no further: the others get an error instead of waiting.
  virtual void give_up() {}

 protected:
  void note_wait(double seconds) { waited_seconds_ += seconds; }
  // Rows of `bytes` for each of the other ranks.
  void note_sent(int64_t rows, int64_t bytes) { sent_bytes_ += (num_ranks_ - 1) * rows * bytes; }

 private:
  const int rank_, num_ranks_;
  double waited_seconds_ = 0;
  int64_t sent_bytes_ = 0;
};

}  // namespace kt
