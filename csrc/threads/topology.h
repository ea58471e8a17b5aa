// The processors that this process may use, by memory node (NUMA), and the process's CPU quota.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kt {

struct Topology {
  struct Node {
    int id = 0;  // the operating system's number
    // Processors that the process may use; never empty. One of each physical core first, then their SMT siblings.
    std::vector<int> processors;
    int num_cores = 0;  // physical cores among them
  };
  std::vector<Node> nodes;  // at least one

  int num_processors() const;
  int num_cores() const;
  // Index into `nodes`; 0 for a processor that is not listed.
  int node_of(int processor) const;
};

// This machine's topology, restricted to the process's affinity mask; read once.
const Topology& topology();
// Changes whenever `topology()` may have changed; never 0.
uint64_t topology_version();

// Reads `root`/sys/devices/system; lists only processors of `allowed`.
Topology read_topology(const std::string& root, const std::vector<int>& allowed);

// The CPU quota of this process's cgroups, in processors (v2 cpu.max, v1 cpu.cfs_quota_us): the tightest limit of the
// group and its parents; infinite without a limit. Reads `root`/proc/self/cgroup and `root`/sys/fs/cgroup.
double read_cpu_quota(const std::string& root);

// Threads to use: one per physical core, because the hardware threads of a core share its arithmetic units; at most the
// quota, rounded up; at least 1.
int threads_for(const Topology& topology, double cpu_quota);

// The processor of a pool's thread `index`. Round-robin over nodes, so that few threads are spread over all nodes.
struct Seat {
  int node, processor;
};
Seat seat_of(const Topology& topology, int index);

// For tests: replaces `topology()` during the object's lifetime. To be made while no job runs; the pool's workers move
// to their new processors with the next job.
class SimulatedTopology {
 public:
  explicit SimulatedTopology(Topology simulated);
  ~SimulatedTopology();
  SimulatedTopology(const SimulatedTopology&) = delete;
  SimulatedTopology& operator=(const SimulatedTopology&) = delete;

 private:
  const Topology simulated_;
};

// Parses the kernel's lists of processors, such as "0-3,8,10-11"; of malformed text, the part before the error.
std::vector<int> parse_processor_list(const char* text);

}  // namespace kt
