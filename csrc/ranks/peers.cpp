#include "ranks/peers.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

namespace kt {
namespace {

constexpr double kMostBetweenLooks = 0.25;  // seconds: a longer pause was one of this process
// Of a second. A thread that polls uses less, one that computes on a crowded machine more.
constexpr double kBusyShare = 0.01;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int open_process(pid_t process) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, process, 0));
#else
  static_cast<void>(process);
  return -1;
#endif
}

struct ThreadState {
  char state = '?';   // as in proc_pid_stat(5)
  int64_t ticks = 0;  // of user and system time
};

// Of a process's main thread; '?' if it can't be read.
ThreadState main_thread_of(pid_t process) {
  char path[64], text[512];
  std::snprintf(path, sizeof(path), "/proc/%d/task/%d/stat", process, process);
  std::FILE* file = std::fopen(path, "re");
  if (!file) return {};
  const size_t length = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[length] = '\0';
  const char* fields = std::strrchr(text, ')');  // the name before it may contain anything
  ThreadState found;
  long long user = 0, system = 0;
  if (!fields || std::sscanf(fields + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lld %lld", &found.state, &user,
                             &system) != 3) {
    return {};
  }
  found.ticks = user + system;
  return found;
}

}  // namespace

Peers::Peers(std::vector<pid_t> processes, int rank, double patience_seconds)
    : processes_(std::move(processes)), rank_(rank), patience_(patience_seconds) {
  for (size_t i = 0; i < processes_.size(); ++i)
    descriptors_.push_back(static_cast<int>(i) == rank ? -1 : open_process(processes_[i]));
}

Peers::~Peers() {
  for (const int descriptor : descriptors_) {
    if (descriptor >= 0) close(descriptor);
  }
}

std::string Peers::name_of(int rank) const {
  return "rank " + std::to_string(rank) + " (process " + std::to_string(processes_[static_cast<size_t>(rank)]) + ")";
}

Status Peers::ended() const {
  for (size_t i = 0; i < processes_.size(); ++i) {
    if (static_cast<int>(i) == rank_) continue;
    pollfd poll_for{descriptors_[i], POLLIN, 0};
    const bool has_ended = descriptors_[i] >= 0 ? poll(&poll_for, 1, 0) > 0 && (poll_for.revents & POLLIN)
                                                : kill(processes_[i], 0) != 0 && errno == ESRCH;
    if (has_ended) return {StatusCode::kLostRank, name_of(static_cast<int>(i)) + " has ended"};
  }
  return {};
}

void Peers::begin_wait(int rank) {
  waited_for_ = rank;
  last_look_ = now();
  idle_seconds_ = 0;
  ticks_ = main_thread_of(processes_[static_cast<size_t>(rank)]).ticks;
}

Status Peers::check() {
  KT_RETURN_IF_ERROR(ended());
  const double at = now();
  idle_seconds_ += std::min(at - last_look_, kMostBetweenLooks);
  last_look_ = at;
  const ThreadState found = main_thread_of(processes_[static_cast<size_t>(waited_for_)]);
  const bool is_stopped = found.state == 'T' || found.state == 't';
  const double used = static_cast<double>(found.ticks - ticks_) / static_cast<double>(sysconf(_SC_CLK_TCK));
  if (is_stopped || used > kBusyShare * std::max(idle_seconds_, 1.0)) {
    ticks_ = found.ticks;
    idle_seconds_ = 0;
  }
  if (idle_seconds_ < patience_) return {};
  return {StatusCode::kLostRank, name_of(waited_for_) + " computes nothing and has answered nothing for " +
                                     std::to_string(static_cast<int>(idle_seconds_)) + " s"};
}

}  // namespace kt
