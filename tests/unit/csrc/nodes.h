// Memory nodes that this machine may not have.
#pragma once

#include "threads/topology.h"

namespace kt_test {

// Nodes that share this machine's first processor.
inline kt::Topology simulated(int num_nodes) {
  kt::Topology made;
  const int processor = kt::topology().nodes[0].processors[0];
  for (int node = 0; node < num_nodes; ++node) made.nodes.push_back({node, {processor}, 1});
  return made;
}

}  // namespace kt_test
