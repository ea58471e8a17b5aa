#include "ranks/socket_exchange.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

namespace kt {
namespace {

constexpr uint32_t kColumns = 1, kRows = 2;
constexpr size_t kMostParts = 512;  // of memory, for one system call

struct Header {
  uint32_t number, what;
  uint64_t bytes;
  bool operator==(const Header&) const = default;
};
constexpr auto kHeaderBytes = static_cast<int64_t>(sizeof(Header));
static_assert(sizeof(Header) == 16);

// Rows of `bytes` each, `stride` bytes from one to the next.
struct Rows {
  char* data;
  int64_t rows, bytes, stride;
};

void copy_rows(const Rows& from, const Rows& to) {
  for (int64_t row = 0; row < from.rows; ++row)
    std::memcpy(to.data + row * to.stride, from.data + row * from.stride, static_cast<size_t>(from.bytes));
}

}  // namespace

struct SocketExchange::Message {
  Rows rows{};
  uint32_t kind = kColumns;
  Header header{};    // of what is sent; of what is expected
  Header received{};  // as far as it has been
  int64_t moved = 0;  // bytes, header included

  int64_t bytes() const { return kHeaderBytes + rows.rows * rows.bytes; }
  bool is_moved() const { return moved == bytes(); }

  void number(uint32_t number) {
    header = {number, kind + (static_cast<uint32_t>(rows.bytes) << 8),
              static_cast<uint64_t>(rows.rows) * static_cast<uint64_t>(rows.bytes)};
  }

  // The memory that is next, of header and rows or of `place` and rows.
  std::vector<iovec> next(Header* place) const {
    std::vector<iovec> parts;
    int64_t at = moved - kHeaderBytes;
    if (at < 0) {
      parts.push_back({reinterpret_cast<char*>(place) + moved, static_cast<size_t>(-at)});
      at = 0;
    }
    const bool has_no_gaps = rows.bytes == rows.stride;
    const int64_t all = rows.rows * rows.bytes;
    while (at < all && parts.size() < kMostParts) {
      const int64_t row = at / rows.bytes, begun = at % rows.bytes;
      const int64_t here = has_no_gaps ? all - at : rows.bytes - begun;
      parts.push_back({rows.data + row * rows.stride + begun, static_cast<size_t>(here)});
      at += here;
    }
    return parts;
  }
};

SocketExchange::SocketExchange(int rank, std::vector<int> sockets, std::vector<std::string> names)
    : Exchange(rank, static_cast<int>(sockets.size())), sockets_(std::move(sockets)), names_(std::move(names)) {}

SocketExchange::~SocketExchange() {
  for (int other = 0; other < num_ranks(); ++other) {
    if (other != rank()) close(sockets_[static_cast<size_t>(other)]);
  }
}

Status SocketExchange::gather_columns(const TensorView& matrix) {
  const int64_t element = dtype_bytes(matrix.dtype), stride = matrix.strides[0] * element;
  const int64_t bytes = matrix.shape[1] / num_ranks() * element;
  if (matrix.shape[0] * bytes == 0) return failure_;
  note_sent(matrix.shape[0], bytes);
  std::vector<Message> sent, received;
  for (int other = 0; other < num_ranks(); ++other) {
    sent.push_back({{matrix.as<char>() + rank() * bytes, matrix.shape[0], bytes, stride}, kColumns});
    received.push_back({{matrix.as<char>() + other * bytes, matrix.shape[0], bytes, stride}, kColumns});
  }
  return trade(sent, received);
}

Status SocketExchange::gather_rows(const TensorView& own, const std::vector<int64_t>& counts, const TensorView& out) {
  const int64_t element = dtype_bytes(own.dtype), taken = out.shape[1] * element, stride = out.strides[0] * element;
  const bool takes_all = out.shape[1] == own.shape[1];
  if (out.shape[0] * taken == 0) return failure_;
  note_sent(own.shape[0], taken);
  std::vector<Message> sent, received;
  char* place = out.as<char>();
  for (int other = 0; other < num_ranks(); ++other) {
    const int64_t count = counts[static_cast<size_t>(other)];
    sent.push_back(
        {{own.as<char>() + (takes_all ? 0 : other * taken), own.shape[0], taken, own.strides[0] * element}, kRows});
    received.push_back({{place, count, taken, stride}, kRows});
    place += count * stride;
  }
  const auto self = static_cast<size_t>(rank());
  copy_rows(sent[self].rows, received[self].rows);
  return trade(sent, received);
}

Status SocketExchange::trade(std::vector<Message>& sent, std::vector<Message>& received) {
  KT_RETURN_IF_ERROR(failure_);
  ++number_;
  for (int other = 0; other < num_ranks(); ++other) {
    for (Message* message : {&sent[static_cast<size_t>(other)], &received[static_cast<size_t>(other)]}) {
      message->number(number_);
      if (other == rank()) message->moved = message->bytes();
    }
  }
  const auto began = std::chrono::steady_clock::now();
  failure_ = move_all(sent, received);
  note_wait(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  if (!failure_.ok()) give_up();
  return failure_;
}

Status SocketExchange::move_all(std::vector<Message>& sent, std::vector<Message>& received) const {
  const auto is_moved = [](const Message& message) { return message.is_moved(); };
  while (true) {
    bool has_moved = false;
    for (int other = 0; other < num_ranks(); ++other) {
      KT_RETURN_IF_ERROR(send_some(other, &sent[static_cast<size_t>(other)], &has_moved));
      KT_RETURN_IF_ERROR(receive_some(other, &received[static_cast<size_t>(other)], &has_moved));
    }
    if (std::all_of(sent.begin(), sent.end(), is_moved) && std::all_of(received.begin(), received.end(), is_moved))
      return {};
    if (!has_moved) wait(sent, received);
  }
}

Status SocketExchange::send_some(int rank, Message* message, bool* has_moved) const {
  if (message->is_moved()) return {};
  std::vector<iovec> parts = message->next(&message->header);
  msghdr call{};
  call.msg_iov = parts.data();
  call.msg_iovlen = parts.size();
  const ssize_t bytes = sendmsg(sockets_[static_cast<size_t>(rank)], &call, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (bytes < 0) return errno == EAGAIN || errno == EINTR ? Status() : lost(rank, errno);
  message->moved += bytes;
  *has_moved = true;
  return {};
}

Status SocketExchange::receive_some(int rank, Message* message, bool* has_moved) const {
  if (message->is_moved()) return {};
  std::vector<iovec> parts = message->next(&message->received);
  msghdr call{};
  call.msg_iov = parts.data();
  call.msg_iovlen = message->moved < kHeaderBytes ? 1 : parts.size();
  const ssize_t bytes = recvmsg(sockets_[static_cast<size_t>(rank)], &call, MSG_DONTWAIT);
  if (bytes < 0) return errno == EAGAIN || errno == EINTR ? Status() : lost(rank, errno);
  if (bytes == 0) return lost(rank, 0);
  const bool had_header = message->moved >= kHeaderBytes;
  message->moved += bytes;
  *has_moved = true;
  if (!had_header && message->moved == kHeaderBytes && !(message->received == message->header))
    return {StatusCode::kLostRank, names_[static_cast<size_t>(rank)] + " computes something else than this rank"};
  return {};
}

void SocketExchange::wait(const std::vector<Message>& sent, const std::vector<Message>& received) const {
  std::vector<pollfd> waiting;
  for (size_t other = 0; other < sockets_.size(); ++other) {
    const int events = (sent[other].is_moved() ? 0 : POLLOUT) | (received[other].is_moved() ? 0 : POLLIN);
    if (events) waiting.push_back({sockets_[other], static_cast<short>(events), 0});
  }
  poll(waiting.data(), waiting.size(), -1);  // whatever it says, the next round looks at every socket
}

// `error`: of the system; 0: the other end has closed the connection.
Status SocketExchange::lost(int rank, int error) const {
  const std::string& name = names_[static_cast<size_t>(rank)];
  if (error == 0 || error == ECONNRESET || error == EPIPE)
    return {StatusCode::kLostRank, name + " has ended or given up; its own message has the reason"};
  return {StatusCode::kLostRank, "the connection to " + name + " has failed: " + std::strerror(error)};
}

void SocketExchange::give_up() {
  if (failure_.ok()) failure_ = {StatusCode::kLostRank, "this rank has given up a batch before"};
  for (int other = 0; other < num_ranks(); ++other) {
    if (other != rank()) shutdown(sockets_[static_cast<size_t>(other)], SHUT_RDWR);
  }
}

}  // namespace kt
