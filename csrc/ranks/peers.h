// Processes that are waited for: whether one has ended, and whether it works.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "base/status.h"

namespace kt {

// How long a rank that neither answers nor uses the processor is waited for. A rank that a signal has stopped does not
// count as one: the server's frontend ends all ranks after it (sglang_patch/frontend/stalls.py).
inline constexpr double kPatienceSeconds = 7.0;

class Peers {
 public:
  // `processes`: of each rank. `rank`: this process's.
  Peers(std::vector<pid_t> processes, int rank, double patience_seconds);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // A wait for a rank begins.
  void begin_wait(int rank);
  // To be called every tenth of a second or so while it lasts: kLostRank if any rank has ended, or the one that is
  // waited for has done nothing for the time of patience. Time in which this process itself was stopped does not count.
  Status check();

  // "rank 1 (process 123)"
  std::string name_of(int rank) const;

 private:
  Status ended() const;

  const std::vector<pid_t> processes_;
  std::vector<int> descriptors_;  // pidfd of each other rank; -1: this one, or the system has none
  const int rank_;
  const double patience_;
  int waited_for_ = 0;
  double last_look_ = 0, idle_seconds_ = 0;
  int64_t ticks_ = 0;  // of the processor, used by the main thread of the rank that is waited for
};

}  // namespace kt
