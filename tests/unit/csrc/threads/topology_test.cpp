// Memory nodes, physical cores and cgroup quotas, from directories that look like a machine's /sys and /proc.
#include "threads/topology.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "checks.h"

namespace kt_test {
namespace {

namespace fs = std::filesystem;

// A machine's files in a directory that is gone afterwards.
class Root {
 public:
  Root() : path_(fs::temp_directory_path() / ("kt_topology_" + std::to_string(getpid()))) { fs::remove_all(path_); }
  ~Root() { fs::remove_all(path_); }
  Root& file(const std::string& name, const std::string& text) {
    fs::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text << "\n";
    return *this;
  }
  // `siblings` of each of these processors
  Root& core(const std::string& siblings) {
    for (const int processor : kt::parse_processor_list(siblings.c_str()))
      file("sys/devices/system/cpu/cpu" + std::to_string(processor) + "/topology/thread_siblings_list", siblings);
    return *this;
  }
  Root& node(int id, const std::string& processors) {
    return file("sys/devices/system/node/node" + std::to_string(id) + "/cpulist", processors);
  }
  std::string path() const { return path_.string(); }

 private:
  const fs::path path_;
};

using Processors = std::vector<int>;

void test_nodes(Report& report) {
  Root root;
  root.node(0, "0-1,4-5").node(2, "2-3,6-7");
  for (const char* siblings : {"0,4", "1,5", "2,6", "3,7"}) root.core(siblings);
  const kt::Topology all = kt::read_topology(root.path(), {0, 1, 2, 3, 4, 5, 6, 7});
  report.equal("two nodes, by the system's numbers",
               all.nodes.size() == 2 && all.nodes[0].id == 0 && all.nodes[1].id == 2);
  report.equal("one of each core first",
               all.nodes[0].processors == Processors{0, 1, 4, 5} && all.nodes[1].processors == Processors{2, 3, 6, 7});
  report.equal("cores are counted, not their threads", all.num_cores() == 4 && all.num_processors() == 8);
  report.equal("the node of a processor", all.node_of(5) == 0 && all.node_of(6) == 1);
  Processors seats;
  for (int index = 0; index < 9; ++index) seats.push_back(kt::seat_of(all, index).processor);
  report.equal("threads take nodes in turn, and every core before a core's second thread",
               seats == Processors{0, 2, 1, 3, 4, 6, 5, 7, 0});
  report.equal("a seat is on its node", kt::seat_of(all, 1).node == 1 && kt::seat_of(all, 2).node == 0);

  const kt::Topology some = kt::read_topology(root.path(), {4, 6, 2});
  report.equal("only processors of the affinity mask", some.nodes.size() == 2 &&
                                                           some.nodes[0].processors == Processors{4} &&
                                                           some.nodes[1].processors == Processors{2, 6});
  report.equal("a core counts once, whichever of its threads the mask has", some.num_cores() == 2);
  const kt::Topology one = kt::read_topology(root.path(), {3, 7});
  report.equal("a node without usable processors is left out", one.nodes.size() == 1 && one.nodes[0].id == 2);
  const kt::Topology unknown = kt::read_topology(root.path() + "/nothing", {0, 1, 2});
  report.equal("a system that says nothing has one node, and every processor is a core",
               unknown.nodes.size() == 1 && unknown.num_cores() == 3);
}

double quota_of(const std::string& groups, const std::vector<std::pair<std::string, std::string>>& files) {
  Root root;
  root.file("proc/self/cgroup", groups);
  for (const auto& [name, text] : files) root.file("sys/fs/cgroup/" + name, text);
  return kt::read_cpu_quota(root.path());
}

void test_quota(Report& report) {
  const double none = std::numeric_limits<double>::infinity();
  const auto check = [&](const char* what, double got, double wanted) { report.equal(what, got == wanted); };
  check("v2", quota_of("0::/", {{"cpu.max", "150000 100000"}}), 1.5);
  check("v2 without a limit", quota_of("0::/", {{"cpu.max", "max 100000"}}), none);
  check("v2, a parent is tighter",
        quota_of("0::/a/b", {{"a/b/cpu.max", "400000 100000"}, {"a/cpu.max", "200000 100000"}}), 2.0);
  check("v2, the group is tighter",
        quota_of("0::/a/b", {{"a/b/cpu.max", "50000 100000"}, {"a/cpu.max", "200000 100000"}}), 0.5);
  check("v2, a path of the host that the container does not see",
        quota_of("0::/host/path", {{"cpu.max", "300000 100000"}}), 3.0);
  check("v2 beside v1", quota_of("1:name=systemd:/x\n0::/a", {{"unified/a/cpu.max", "250000 100000"}}), 2.5);
  check("v1",
        quota_of("5:cpu,cpuacct:/d",
                 {{"cpu,cpuacct/d/cpu.cfs_quota_us", "700000"}, {"cpu,cpuacct/d/cpu.cfs_period_us", "100000"}}),
        7.0);
  check("v1 without a limit",
        quota_of("5:cpu:/", {{"cpu/cpu.cfs_quota_us", "-1"}, {"cpu/cpu.cfs_period_us", "100000"}}), none);
  check("v1, another controller", quota_of("5:cpuset:/", {{"cpu/cpu.cfs_quota_us", "100000"}}), none);
  check("neither", quota_of("", {}), none);

  kt::Topology eight;
  eight.nodes = {{0, {0, 1, 2, 3, 8, 9, 10, 11}, 4}, {1, {4, 5, 6, 7, 12, 13, 14, 15}, 4}};
  check("as many threads as cores", kt::threads_for(eight, none), 8);
  check("at most the quota, rounded up", kt::threads_for(eight, 2.1), 3);
  check("a quota above the cores changes nothing", kt::threads_for(eight, 40), 8);
  check("one thread at least", kt::threads_for(eight, 0.2), 1);
}

}  // namespace

void test_topology(Report& report) {
  report.equal("processor lists", kt::parse_processor_list("0-2,7,9-10\n") == Processors{0, 1, 2, 7, 9, 10} &&
                                      kt::parse_processor_list("").empty() &&
                                      kt::parse_processor_list("3-x") == Processors{});
  test_nodes(report);
  test_quota(report);
}

}  // namespace kt_test
