#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "threads/topology.h"

namespace kt {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

double ratio(double quota, double period) { return quota > 0 && period > 0 ? quota / period : kNoLimit; }

// cpu.max: "max 100000" or "150000 100000".
double limit_v2(const std::string& directory) {
  std::ifstream file(directory + "/cpu.max");
  double quota = 0, period = 0;
  return file >> quota >> period ? ratio(quota, period) : kNoLimit;
}

// cpu.cfs_quota_us: -1 without a limit.
double limit_v1(const std::string& directory) {
  std::ifstream quota_file(directory + "/cpu.cfs_quota_us"), period_file(directory + "/cpu.cfs_period_us");
  double quota = 0, period = 0;
  return quota_file >> quota && period_file >> period ? ratio(quota, period) : kNoLimit;
}

// The tightest limit of the group and its parents. A container may see the host's path of the group, of which only the
// mount's own directory exists; that directory then holds the limit.
double tightest(const std::string& mount, std::string group, double (*limit_of)(const std::string&)) {
  double limit = limit_of(mount);
  while (group.size() > 1) {
    limit = std::min(limit, limit_of(mount + group));
    group.resize(group.find_last_of('/'));
  }
  return limit;
}

bool lists_cpu(const std::string& controllers) {
  std::istringstream names(controllers);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "cpu") return true;
  }
  return false;
}

}  // namespace

double read_cpu_quota(const std::string& root) {
  const std::string mounts = root + "/sys/fs/cgroup";
  double limit = kNoLimit;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "0::/a/b" for v2, "4:cpu,cpuacct:/a/b" for v1
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    if (group.empty() || group[0] != '/') continue;
    if (controllers.empty()) {
      for (const char* mount : {"", "/unified"}) limit = std::min(limit, tightest(mounts + mount, group, limit_v2));
    } else if (lists_cpu(controllers)) {
      for (const std::string& mount : {std::string("cpu"), controllers})
        limit = std::min(limit, tightest(mounts + "/" + mount, group, limit_v1));
    }
  }
  return limit;
}

int threads_for(const Topology& topology, double cpu_quota) {
  const int cores = topology.num_cores();
  return cpu_quota < cores ? std::max(1, static_cast<int>(std::ceil(cpu_quota))) : cores;
}

}  // namespace kt
