#include "threads/topology.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <set>
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

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  return text;
}

// One processor of each physical core, in their order, then the others.
void cores_first(const std::string& root, Topology::Node* node) {
  std::set<int> seen;  // processors of cores that have one already
  const auto is_first = [&](int processor) {
    const bool first = seen.insert(processor).second;
    const std::string path = root + "/sys/devices/system/cpu/cpu" + std::to_string(processor);
    for (const int sibling : parse_processor_list(first_line(path + "/topology/thread_siblings_list").c_str()))
      seen.insert(sibling);
    return first;
  };
  std::vector<int> cores, siblings;
  for (const int processor : node->processors) (is_first(processor) ? cores : siblings).push_back(processor);
  node->num_cores = static_cast<int>(cores.size());
  node->processors = std::move(cores);
  node->processors.insert(node->processors.end(), siblings.begin(), siblings.end());
}

// SimulatedTopology's replacement of the machine's topology.
std::atomic<const Topology*> simulated_topology{nullptr};
std::atomic<uint64_t> version{1};

}  // namespace

Topology read_topology(const std::string& root, const std::vector<int>& allowed) {
  Topology found;
  std::vector<int> left = allowed;
  for (int id = 0; id < kMaxNodeNumber; ++id) {
    const std::string path = root + "/sys/devices/system/node/node" + std::to_string(id) + "/cpulist";
    Topology::Node node{id, {}, 0};
    for (const int processor : parse_processor_list(first_line(path).c_str())) {
      const auto at = std::find(left.begin(), left.end(), processor);
      if (at == left.end()) continue;
      node.processors.push_back(processor);
      left.erase(at);
    }
    if (!node.processors.empty()) found.nodes.push_back(std::move(node));
  }
  if (found.nodes.empty()) found.nodes.push_back({0, {}, 0});
  auto& first = found.nodes.front().processors;
  first.insert(first.end(), left.begin(), left.end());  // processors that no node lists
  for (Topology::Node& node : found.nodes) cores_first(root, &node);
  return found;
}

int Topology::num_processors() const {
  int count = 0;
  for (const Node& node : nodes) count += static_cast<int>(node.processors.size());
  return count;
}

int Topology::num_cores() const {
  int count = 0;
  for (const Node& node : nodes) count += node.num_cores;
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
  static const Topology* const found = new Topology(read_topology("", allowed_processors()));
  const Topology* const simulated = simulated_topology.load(std::memory_order_acquire);
  return simulated ? *simulated : *found;
}

uint64_t topology_version() { return version.load(std::memory_order_acquire); }

SimulatedTopology::SimulatedTopology(Topology simulated) : simulated_(std::move(simulated)) {
  simulated_topology.store(&simulated_, std::memory_order_release);
  version.fetch_add(1);
}

SimulatedTopology::~SimulatedTopology() {
  simulated_topology.store(nullptr, std::memory_order_release);
  version.fetch_add(1);
}

Seat seat_of(const Topology& topology, int index) {
  int at = index % topology.num_processors();
  // All cores of all nodes before the first sibling.
  for (const bool siblings : {false, true}) {
    for (size_t round = 0, seats = 1; seats > 0; ++round) {
      seats = 0;
      for (size_t node = 0; node < topology.nodes.size(); ++node) {
        const Topology::Node& n = topology.nodes[node];
        const auto cores = static_cast<size_t>(n.num_cores);
        const size_t place = siblings ? cores + round : round, end = siblings ? n.processors.size() : cores;
        if (place >= end) continue;
        ++seats;
        if (at-- == 0) return {static_cast<int>(node), n.processors[place]};
      }
    }
  }
  return {0, topology.nodes[0].processors[0]};
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
