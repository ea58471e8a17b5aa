// The exchange of ranks on several machines: a connected TCP socket between each two of them.
//
// A message is a header and the rows that its receiver needs. Rows are sent from where they lie and received where they
// belong, so there are no buffers. All messages of a call are sent and received at once: no two ranks wait for each
// other because their sockets are full. A header is read and compared before any row is.
//
//   bytes  0 to  3   number of the message between these two ranks, from 1 on, modulo 2^32
//   bytes  4 to  7   1: columns, 2: rows; plus 256 times the bytes of a row, modulo 2^32
//   bytes  8 to 15   bytes of rows behind the header
//
// Numbers have this machine's byte order. Who may connect is Python's matter (kt_runtime/ranks/connections.py).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ranks/exchange.h"

namespace kt {

class SocketExchange final : public Exchange {
 public:
  // `sockets`: to each other rank, in the ranks' order; any number in the place of `rank`. This object closes them.
  // `names`: of the ranks, for errors.
  SocketExchange(int rank, std::vector<int> sockets, std::vector<std::string> names);
  ~SocketExchange() override;

  Status gather_columns(const TensorView& matrix) override;
  Status gather_rows(const TensorView& own, const std::vector<int64_t>& counts, const TensorView& out) override;
  bool is_near() const override { return false; }
  void give_up() override;

 private:
  struct Message;

  // What goes to each other rank and comes from it; the entries of this rank are ignored.
  Status trade(std::vector<Message>& sent, std::vector<Message>& received);
  Status move_all(std::vector<Message>& sent, std::vector<Message>& received) const;
  Status send_some(int rank, Message* message, bool* has_moved) const;
  Status receive_some(int rank, Message* message, bool* has_moved) const;
  void wait(const std::vector<Message>& sent, const std::vector<Message>& received) const;
  Status lost(int rank, int error) const;

  const std::vector<int> sockets_;
  const std::vector<std::string> names_;
  uint32_t number_ = 0;  // of the latest message
  Status failure_;
};

}  // namespace kt
