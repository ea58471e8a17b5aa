// The exchange of ranks on one machine, through memory that all of them have mapped.
//
// Memory: a lane for each rank, then two buffers for each rank. A message is cut into pieces of whole rows that fit a
// buffer. Piece number s of a rank goes to its buffer s mod 2; then the rank writes s into its lane, and the others,
// which wait for that, read what they need. A rank that writes piece s has seen piece s - 1 of all others, who had read
// piece s - 2 by then: so two buffers suffice, and nobody confirms. A wait spins, then yields the processor, then
// sleeps on a futex.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ranks/exchange.h"
#include "ranks/peers.h"

namespace kt {

class SharedExchange final : public Exchange {
 public:
  // Bytes of a file for `num_ranks`; its first use needs zeros.
  static int64_t file_bytes(int num_ranks);
  // `descriptor`: of that file, and stays the caller's. `processes`: of each rank. An error leaves `opened` as it is.
  static Status open(int descriptor, std::vector<pid_t> processes, int rank, double patience_seconds,
                     std::shared_ptr<Exchange>* opened);
  ~SharedExchange() override;

  Status gather_columns(const TensorView& matrix) override;
  Status gather_rows(const TensorView& own, const std::vector<int64_t>& counts, const TensorView& out) override;
  bool is_near() const override { return true; }
  void give_up() override;

 private:
  struct Lane;
  struct Rows;

  SharedExchange(void* memory, std::vector<pid_t> processes, int rank, double patience_seconds);
  Lane& lane_of(int rank) const;
  char* buffer_of(int rank) const;  // for the present piece
  template <class Take>
  Status trade(uint64_t kind, const Rows& own, int64_t most_rows, Take&& take);
  template <class Take>
  Status trade_piece(uint64_t message, Take&& take);
  void publish(uint64_t message);
  Status wait_for(int rank, uint64_t message);
  Status wait_for_piece(int rank);
  Status given_up() const;

  void* const memory_;
  Peers peers_;
  uint32_t piece_ = 0;  // the number of the latest
  Status failure_;
};

}  // namespace kt
