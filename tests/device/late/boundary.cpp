// What PyTorch asks of a device: current device and stream, events, allocators of both memories, graphs.
#include "boundary.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GraphImplInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

#include "generator.h"

namespace late {

namespace {

thread_local int64_t current = 0;  // stream

void require_device(c10::DeviceIndex index) {
  TORCH_CHECK(index == 0 || index == -1, "late: there is one device, late:0; got late:", static_cast<int>(index));
}

struct Event {
  Mark mark;
  int times_asked = 0;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    require_device(device.index());
    return getDevice();
  }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device device) const override { require_device(device.index()); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(Device::get().new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(Device::get().new_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const int64_t last = current;
    current = next.id();
    return stream(last);
  }
  bool queryStream(const c10::Stream& stream) const override {
    static thread_local std::map<int64_t, int> times_asked;
    int& times = times_asked[stream.id()];
    const bool is_done = Device::get().is_done_when_asked(Device::get().mark(stream.id()), times);
    if (is_done) times = 0;
    return is_done;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Device::get().await(Device::get().mark(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex) const override { Device::get().await_all(); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return Device::get().is_capturing(stream.id()); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Memory::get().used_on(data.get(), stream.id());
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = Event{Device::get().mark(stream.id()), 0};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Device::get().wait(stream.id(), static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    return Device::get().is_done_when_asked(static_cast<Event*>(event)->mark, static_cast<Event*>(event)->times_asked);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Device::get().await(static_cast<Event*>(event)->mark);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  // The device has no clock: a task takes a millisecond.
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return static_cast<double>(static_cast<Event*>(second)->mark.position) -
           static_cast<double>(static_cast<Event*>(first)->mark.position);
  }

 private:
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, the_device(), id); }
};

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    void* place = Memory::get().allocate(num_bytes, current);
    TORCH_CHECK_WITH(OutOfMemoryError, place != nullptr || num_bytes == 0, "late: out of memory: ", num_bytes,
                     " bytes wanted, ", Memory::get().used_bytes(), " of ", Memory::get().total_bytes(), " in use");
    return {place, place, &free, the_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "late: storages are not cloned"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Memory::get().used_on(data.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[all].increase(Memory::get().used_bytes());
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const size_t total = Memory::get().total_bytes();
    return {total - Memory::get().used_bytes(), total};
  }

 private:
  static void free(void* place) { Memory::get().free(place); }
};

// Page-locked host memory. Queued copies hold the storage, so that it is not reused before they ran.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    const size_t rounded = (num_bytes + 63) / 64 * 64;
    void* place = rounded == 0 ? nullptr : std::aligned_alloc(64, rounded);
    TORCH_CHECK(place != nullptr || rounded == 0, "late: no host memory for ", num_bytes, " pinned bytes");
    if (place != nullptr) {
      poison(place, rounded);
      std::lock_guard lock(mutex());
      places()[reinterpret_cast<uintptr_t>(place)] = rounded;
    }
    return {place, place, &free, c10::Device(c10::kCPU)};
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

  static bool holds(const void* place) {
    std::lock_guard lock(mutex());
    const auto address = reinterpret_cast<uintptr_t>(place);
    auto next = places().upper_bound(address);
    if (next == places().begin()) return false;
    --next;
    return address < next->first + next->second;
  }

 private:
  static void free(void* place) {
    if (place == nullptr) return;
    std::lock_guard lock(mutex());
    places().erase(reinterpret_cast<uintptr_t>(place));
    std::free(place);
  }
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::map<uintptr_t, size_t>& places() {
    static auto* places = new std::map<uintptr_t, size_t>;
    return *places;
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex index) const override { require_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    require_device(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* place) const override { return is_pinned(place); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return the_device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<RandomNumbers>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs&) {}
  ~Graph() override {
    try {
      Graph::reset();
    } catch (const std::exception& error) {
      TORCH_WARN("late: while a graph was destroyed: ", error.what());
    }
  }
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode) override {
    reset();
    Device::get().begin_capture(current, &program_);
  }
  void capture_end() override { Device::get().end_capture(); }
  void instantiate() override {}
  void replay() override { Device::get().replay(current, program_); }
  // Queued replays hold copies of the tasks; their memory is not reused before they ran, in the order of streams.
  void reset() override {
    if (program_.empty()) return;
    Device::get().await_all();
    program_.clear();
    Memory::get().release(&program_);
  }
  at::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  Program program_;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(c10::kPrivateUse1, &device_allocator)
const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(c10::kPrivateUse1, &pinned_allocator);
  return true;
}();

}  // namespace

}  // namespace late

namespace at {
C10_REGISTER_TYPED_CLASS(GraphImplRegistry, "LATE", late::Graph)
}

namespace late {

c10::Device the_device() { return {c10::kPrivateUse1, 0}; }
int64_t current_stream() { return current; }
bool is_pinned(const void* place) { return PinnedAllocator::holds(place); }
c10::Allocator* allocator() { return &device_allocator; }

}  // namespace late
