// The processors that this process may use, by memory node (NUMA), and how much of them it is allowed to use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kt {

struct Topology {
  struct Node {
    int id = 0;  // the operating system's number
    std::vector<int>
        processors;     // that the process may use; never empty. One of each physical core, then their siblings
    int num_cores = 0;  // physical cores among them
  };
  std::vector<Node> nodes;  // at least one

  int num_processors() const;
  int num_cores() const;
  // Index into `nodes`; 0 for a processor that is not listed.
  int node_of(int processor) const;
};

// Of this machine and the affinity mask of the process; read once.
const Topology& topology();
// Another number where `topology()` may have changed; never 0.
uint64_t topology_version();

// From `root`/sys/devices/system, with the processors of `allowed` only.
Topology read_topology(const std::string& root, const std::vector<int>& allowed);

// Processors' worth of time that the cgroups of this process grant it (v2 cpu.max, v1 cpu.cfs_quota_us; the tightest of
// the group and its parents); infinite where none says so. From `root`/proc/self/cgroup and `root`/sys/fs/cgroup.
double read_cpu_quota(const std::string& root);

// Physical cores, as two threads of one core share its arithmetic units; at most the quota, rounded up; at least 1.
int threads_for(const Topology& topology, double cpu_quota);

// Which processor thread `index` of a pool runs on: nodes take turns, so that few threads are spread over all of them.
struct Seat {
  int node, processor;
};
Seat seat_of(const Topology& topology, int index);

// Replaces `topology()` while it lives. For tests, while no job runs: the pool's workers take their new seats with the
// next job.
class SimulatedTopology {
 public:
  explicit SimulatedTopology(Topology simulated);
  ~SimulatedTopology();
  SimulatedTopology(const SimulatedTopology&) = delete;
  SimulatedTopology& operator=(const SimulatedTopology&) = delete;

 private:
  const Topology simulated_;
};

// "0-3,8,10-11" as the kernel writes lists of processors; malformed text gives what could be read.
std::vector<int> parse_processor_list(const char* text);

}  // namespace kt
