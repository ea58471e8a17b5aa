// torch.ops.late: what tests ask of the device itself.
#include <torch/library.h>

#include "boundary.h"

namespace late {

namespace {

void set_schedule(const std::string& name, int64_t seed) {
  static const std::map<std::string, Schedule> known{
      {"late", Schedule::kLate}, {"eager", Schedule::kEager}, {"random", Schedule::kRandom}};
  const auto found = known.find(name);
  TORCH_CHECK(found != known.end(), "late: no schedule '", name, "'; there are late, eager, random");
  Device::get().set_schedule(found->second, static_cast<uint64_t>(seed));
}

c10::Dict<std::string, int64_t> hidden_waits() {
  c10::Dict<std::string, int64_t> waits;
  for (const auto& [name, count] : Device::get().hidden_waits()) waits.insert(name, count);
  return waits;
}

}  // namespace

TORCH_LIBRARY(late, m) {
  m.def("set_schedule(str name, int seed) -> ()", &set_schedule);
  m.def("hidden_waits() -> Dict(str, int)", &hidden_waits);
  m.def("forget_hidden_waits() -> ()", [] { Device::get().forget_hidden_waits(); });
  m.def("forbid_hidden_waits(bool forbidden) -> ()", [](bool forbidden) { Device::get().forbid_hidden(forbidden); });
  m.def("set_default_stream_keeps(bool keeps) -> ()",
        [](bool keeps) { Memory::get().set_default_stream_keeps(keeps); });
  m.def("used_bytes() -> int", [] { return static_cast<int64_t>(Memory::get().used_bytes()); });
  m.def("total_bytes() -> int", [] { return static_cast<int64_t>(Memory::get().total_bytes()); });
}

}  // namespace late
