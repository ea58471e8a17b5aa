#include "ranks/shared_exchange.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <new>
#include <utility>

namespace kt {
namespace {

constexpr int64_t kBufferBytes = int64_t{1} << 20;
constexpr int kSpins = 500;  // some tens of microseconds
constexpr auto kYieldFor = std::chrono::milliseconds(2);
constexpr long kSleepNanoseconds = 50'000'000;
constexpr uint64_t kColumns = 1, kRows = 2;

void pause_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not private to a process.
void wait_while(std::atomic<uint32_t>* word, uint32_t value) {
  const timespec limit{0, kSleepNanoseconds};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Rows of `bytes` each, at two distances.
void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t rows, int64_t bytes) {
  if (from_stride == bytes && to_stride == bytes) {
    std::memcpy(to, from, static_cast<size_t>(rows * bytes));
    return;
  }
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(to + row * to_stride, from + row * from_stride, static_cast<size_t>(bytes));
}

}  // namespace

struct alignas(256) SharedExchange::Lane {
  std::atomic<uint32_t> written;   // the number of the rank's latest piece
  std::atomic<uint32_t> sleepers;  // ranks that sleep until the next one
  std::atomic<uint32_t> gave_up;
  uint64_t messages[2];  // what the pieces in the two buffers belong to
};

struct SharedExchange::Rows {
  const char* data;
  int64_t rows, bytes, stride;  // bytes of a row, and from one row to the next
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

int64_t SharedExchange::file_bytes(int num_ranks) {
  return num_ranks * (static_cast<int64_t>(sizeof(Lane)) + 2 * kBufferBytes);
}

Status SharedExchange::open(int descriptor, std::vector<pid_t> processes, int rank, double patience_seconds,
                            std::shared_ptr<Exchange>* opened) {
  const auto bytes = static_cast<size_t>(file_bytes(static_cast<int>(processes.size())));
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED)
    return {StatusCode::kNotFound, std::string("the memory of the ranks can't be mapped: ") + std::strerror(errno)};
  opened->reset(new SharedExchange(memory, std::move(processes), rank, patience_seconds));
  return {};
}

SharedExchange::SharedExchange(void* memory, std::vector<pid_t> processes, int rank, double patience_seconds)
    : Exchange(rank, static_cast<int>(processes.size())),
      memory_(memory),
      peers_(std::move(processes), rank, patience_seconds) {}

SharedExchange::~SharedExchange() { munmap(memory_, static_cast<size_t>(file_bytes(num_ranks()))); }

SharedExchange::Lane& SharedExchange::lane_of(int rank) const { return static_cast<Lane*>(memory_)[rank]; }

char* SharedExchange::buffer_of(int rank) const {
  char* const buffers = static_cast<char*>(memory_) + num_ranks() * sizeof(Lane);
  return buffers + (2 * rank + static_cast<int>(piece_ % 2)) * kBufferBytes;
}

Status SharedExchange::gather_columns(const TensorView& matrix) {
  const int64_t element = dtype_bytes(matrix.dtype), stride = matrix.strides[0] * element;
  const int64_t bytes = matrix.shape[1] / num_ranks() * element;
  auto* const data = matrix.as<char>();
  const Rows own{data + rank() * bytes, matrix.shape[0], bytes, stride};
  note_sent(own.rows, bytes);
  return trade(kColumns, own, own.rows, [&](int rank, int64_t first, const char* piece, int64_t at_once) {
    const int64_t rows = std::min(at_once, own.rows - first);
    copy_rows(piece, bytes, data + first * stride + rank * bytes, stride, rows, bytes);
  });
}

Status SharedExchange::gather_rows(const TensorView& own, const std::vector<int64_t>& counts, const TensorView& out) {
  const int64_t element = dtype_bytes(own.dtype), bytes = own.shape[1] * element, taken = out.shape[1] * element;
  const int64_t stride = out.strides[0] * element, first_byte = taken == bytes ? 0 : rank() * taken;
  const Rows rows{own.as<char>(), own.shape[0], bytes, own.strides[0] * element};
  note_sent(rows.rows, taken);
  std::vector<char*> places(1, out.as<char>());  // of each rank's rows
  for (const int64_t count : counts) places.push_back(places.back() + count * stride);
  copy_rows(rows.data + first_byte, rows.stride, places[static_cast<size_t>(rank())], stride, rows.rows, taken);
  const int64_t most = *std::max_element(counts.begin(), counts.end());
  return trade(kRows, rows, most, [&](int rank, int64_t first, const char* piece, int64_t at_once) {
    const auto index = static_cast<size_t>(rank);
    const int64_t here = std::min(at_once, counts[index] - first);
    copy_rows(piece + first_byte, bytes, places[index] + first * stride, stride, std::max<int64_t>(here, 0), taken);
  });
}

// Every rank sends its rows, and calls take(rank, first row, piece, rows of a piece) for each piece of the others.
template <class Take>
Status SharedExchange::trade(uint64_t kind, const Rows& own, int64_t most_rows, Take&& take) {
  KT_RETURN_IF_ERROR(failure_);
  if (most_rows == 0 || own.bytes == 0) return {};
  const int64_t at_once = kBufferBytes / own.bytes;
  if (at_once == 0)
    return invalid_value("a row of " + std::to_string(own.bytes) + " bytes can't be exchanged; allowed: up to " +
                         std::to_string(kBufferBytes));
  for (int64_t first = 0; first < most_rows; first += at_once) {
    ++piece_;
    const int64_t rows = std::clamp<int64_t>(own.rows - first, 0, at_once);
    copy_rows(own.data + first * own.stride, own.stride, buffer_of(rank()), own.bytes, rows, own.bytes);
    const uint64_t message =
        ((kind * 0x1000003 + static_cast<uint64_t>(own.bytes)) * 0x1000003 + static_cast<uint64_t>(most_rows)) *
            0x1000003 +
        static_cast<uint64_t>(first);
    failure_ = trade_piece(message, [&](int rank, const char* piece) { take(rank, first, piece, at_once); });
    if (!failure_.ok()) {
      give_up();
      return failure_;
    }
  }
  return {};
}

template <class Take>
Status SharedExchange::trade_piece(uint64_t message, Take&& take) {
  publish(message);
  for (int i = 1; i < num_ranks(); ++i) {
    const int other = (rank() + i) % num_ranks();
    KT_RETURN_IF_ERROR(wait_for(other, message));
    take(other, buffer_of(other));
  }
  return {};
}

void SharedExchange::publish(uint64_t message) {
  Lane& lane = lane_of(rank());
  lane.messages[piece_ % 2] = message;
  lane.written.store(piece_);
  if (lane.sleepers.load() > 0) wake_all(&lane.written);
}

Status SharedExchange::wait_for(int rank, uint64_t message) {
  const auto began = std::chrono::steady_clock::now();
  const Status status = wait_for_piece(rank);
  note_wait(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  KT_RETURN_IF_ERROR(status);
  if (lane_of(rank).messages[piece_ % 2] == message) return {};
  return {StatusCode::kLostRank, peers_.name_of(rank) + " computes something else than this rank"};
}

Status SharedExchange::wait_for_piece(int rank) {
  Lane& lane = lane_of(rank);
  const auto is_written = [&] { return static_cast<int32_t>(lane.written.load() - piece_) >= 0; };
  for (int i = 0; i < kSpins; ++i) {
    if (is_written()) return {};
    pause_processor();
  }
  const auto end = std::chrono::steady_clock::now() + kYieldFor;
  while (std::chrono::steady_clock::now() < end) {
    if (is_written()) return {};
    sched_yield();
  }
  peers_.begin_wait(rank);
  while (true) {
    ++lane.sleepers;
    const uint32_t seen = lane.written.load();
    if (static_cast<int32_t>(seen - piece_) < 0) wait_while(&lane.written, seen);
    --lane.sleepers;
    if (is_written()) return {};
    KT_RETURN_IF_ERROR(given_up());
    KT_RETURN_IF_ERROR(peers_.check());
  }
}

Status SharedExchange::given_up() const {
  for (int other = 0; other < num_ranks(); ++other) {
    if (other != rank() && lane_of(other).gave_up.load() != 0)
      return {StatusCode::kLostRank, peers_.name_of(other) + " has given up; its own message has the reason"};
  }
  return {};
}

void SharedExchange::give_up() {
  if (failure_.ok()) failure_ = {StatusCode::kLostRank, "this rank has given up a batch before"};
  Lane& lane = lane_of(rank());
  lane.gave_up.store(1);
  wake_all(&lane.written);
}

}  // namespace kt
