#include "threads/topology.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace kt {
namespace {

constexpr int kMaxNodeNumber = 1024;

std::vector<int> allowed_processors() {
  std::vector<int> allowed;
#if defined(__linux__)
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) {
    for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
      if (CPU_ISSET(processor, &mask)) allowed.push_back(processor);
    }
  }
#endif
  if (allowed.empty()) {
    const int count = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    for (int processor = 0; processor < count; ++processor) allowed.push_back(processor);
  }
  return allowed;
}

Topology read_topology() {
  Topology found;
  std::vector<int> left = allowed_processors();
  for (int id = 0; id < kMaxNodeNumber; ++id) {
    std::ifstream file("/sys/devices/system/node/node" + std::to_string(id) + "/cpulist");
    std::string text;
    if (!file || !std::getline(file, text)) continue;
    Topology::Node node{id, {}};
    for (const int processor : parse_processor_list(text.c_str())) {
      const auto at = std::find(left.begin(), left.end(), processor);
      if (at == left.end()) continue;
      node.processors.push_back(processor);
      left.erase(at);
    }
    if (!node.processors.empty()) found.nodes.push_back(std::move(node));
  }
  if (found.nodes.empty()) found.nodes.push_back({0, {}});
  auto& first = found.nodes.front().processors;
  first.insert(first.end(), left.begin(), left.end());  // processors that no node lists
  return found;
}

}  // namespace

int Topology::num_processors() const {
  int count = 0;
  for (const Node& node : nodes) count += static_cast<int>(node.processors.size());
  return count;
}

int Topology::node_of(int processor) const {
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto& listed = nodes[i].processors;
    if (std::find(listed.begin(), listed.end(), processor) != listed.end()) return static_cast<int>(i);
  }
  return 0;
}

const Topology& topology() {
  static const Topology* const found = new Topology(read_topology());
  return *found;
}

std::vector<int> parse_processor_list(const char* text) {
  std::vector<int> processors;
  char* end = nullptr;
  for (const char* at = text; *at; at = *end == ',' ? end + 1 : end) {
    const long first = std::strtol(at, &end, 10);
    if (end == at) break;
    long last = first;
    if (*end == '-') {
      const char* second = end + 1;
      last = std::strtol(second, &end, 10);
      if (end == second) break;
    }
    for (long processor = first; processor <= last && processor - first < 65536; ++processor)
      processors.push_back(static_cast<int>(processor));
    if (*end != ',') break;
  }
  return processors;
}

}  // namespace kt
