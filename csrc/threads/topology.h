// The processors that this process may use, by memory node (NUMA).
#pragma once

#include <vector>

namespace kt {

struct Topology {
  struct Node {
    int id;                       // the operating system's number
    std::vector<int> processors;  // of those that the process may use; never empty
  };
  std::vector<Node> nodes;  // at least one

  int num_processors() const;
  // Index into `nodes`; 0 for a processor that is not listed.
  int node_of(int processor) const;
};

// Read once: /sys/devices/system/node and the affinity mask of the process.
const Topology& topology();

// "0-3,8,10-11" as the kernel writes lists of processors; malformed text gives what could be read.
std::vector<int> parse_processor_list(const char* text);

}  // namespace kt
