#include "queue.h"

#include <stdexcept>
#include <utility>

namespace late {

namespace {
using Lock = std::lock_guard<Lockable>;
constexpr int kFalseAnswers = 2;  // of a query, before the device makes progress
}  // namespace

Device& Device::get() {
  static Device* device = new Device;  // never destroyed: tensors outlive static destructors
  return *device;
}

int64_t Device::new_stream() {
  Lock lock(mutex);
  streams_.emplace_back();
  return static_cast<int64_t>(streams_.size()) - 1;
}

int64_t Device::num_streams() {
  Lock lock(mutex);
  return static_cast<int64_t>(streams_.size());
}

void Device::set_schedule(Schedule schedule, uint64_t seed) {
  Lock lock(mutex);
  await_all();
  schedule_ = schedule;
  random_.seed(seed);
}

void Device::push(int64_t stream, Task task) {
  Stream& to = streams_.at(stream);
  if (task.when_queued) task.when_queued(Mark{stream, to.queued + 1});
  to.tasks.push_back(std::move(task));
  ++to.queued;
}

void Device::queue(int64_t stream, Task task) {
  Lock lock(mutex);
  if (streams_.at(stream).captures) {
    program_->push_back(std::move(task));
    return;
  }
  push(stream, std::move(task));
  make_progress();
}

void Device::queue_beside(int64_t stream, Task task) {
  Lock lock(mutex);
  push(stream, std::move(task));
  if (schedule_ == Schedule::kEager && streams_.at(stream).tasks.size() == 1) run_next(streams_.at(stream));
}

// A stream that waits for a capturing one joins the capture; the captured program is one list in the order of calls.
void Device::wait(int64_t stream, Mark mark) {
  Lock lock(mutex);
  if (mark.is_captured) {
    if (program_ != nullptr) streams_.at(stream).captures = true;
    return;
  }
  if (streams_.at(stream).captures) refuse_while_capturing("a wait for work outside of the graph");
  if (mark.stream == stream || is_done(mark)) return;
  push(stream, Task{"wait", {}, {}, mark});
  make_progress();
}

Mark Device::mark(int64_t stream) {
  Lock lock(mutex);
  return Mark{stream, streams_.at(stream).queued, streams_.at(stream).captures};
}

bool Device::is_done(Mark mark) {
  Lock lock(mutex);
  return streams_.at(mark.stream).done >= mark.position;
}

void Device::run_next(Stream& stream) {
  Task task = std::move(stream.tasks.front());
  stream.tasks.pop_front();
  ++stream.done;
  if (task.after) return;
  try {
    task.run();
  } catch (const std::exception& error) {
    throw std::runtime_error("late: " + task.name + " failed on the device: " + error.what());
  }
}

// A random stream's next task, if its wait is over. False: nothing is left to run.
bool Device::run_any() {
  std::vector<Stream*> ready;
  for (Stream& stream : streams_) {
    if (stream.tasks.empty()) continue;
    const std::optional<Mark>& after = stream.tasks.front().after;
    if (!after || is_done(*after)) ready.push_back(&stream);
  }
  if (ready.empty()) return false;
  run_next(*ready[random_() % ready.size()]);
  return true;
}

void Device::make_progress() {
  if (schedule_ == Schedule::kEager) await_all();
  if (schedule_ == Schedule::kRandom) {
    for (uint64_t steps = random_() % 2 * (random_() % 4); steps > 0 && run_any(); --steps) {
    }
  }
}

void Device::await(Mark mark) {
  Lock lock(mutex);
  if (streams_.at(mark.stream).captures) refuse_while_capturing("a synchronization");
  Stream& stream = streams_.at(mark.stream);
  if (mark.position > stream.queued) throw std::logic_error("late: a mark after all that was queued");
  while (stream.done < mark.position) {
    if (schedule_ == Schedule::kRandom) {
      run_any();
      continue;
    }
    if (const std::optional<Mark> after = stream.tasks.front().after) await(*after);
    run_next(stream);
  }
}

void Device::await_all() {
  Lock lock(mutex);
  if (program_ != nullptr) refuse_while_capturing("a synchronization of the device");
  for (int64_t stream = 0; stream < num_streams(); ++stream) await(mark(stream));
}

bool Device::is_done_when_asked(Mark mark, int& times) {
  Lock lock(mutex);
  if (streams_.at(mark.stream).captures) refuse_while_capturing("a query");
  if (!is_done(mark) && ++times > kFalseAnswers) await(mark);
  return is_done(mark);
}

void Device::await_hidden(int64_t stream, const std::string& what) {
  Lock lock(mutex);
  if (streams_.at(stream).captures) refuse_while_capturing(what);
  if (forbidden_) throw std::runtime_error("late: " + what + " waits for the device, and hidden waits are forbidden");
  ++hidden_[what];
  await(mark(stream));
}

void Device::forbid_hidden(bool forbidden) {
  Lock lock(mutex);
  forbidden_ = forbidden;
}

std::map<std::string, int64_t> Device::hidden_waits() {
  Lock lock(mutex);
  return hidden_;
}

void Device::forget_hidden_waits() {
  Lock lock(mutex);
  hidden_.clear();
}

void Device::refuse_while_capturing(const std::string& what) {
  throw std::runtime_error("late: " + what + " is not permitted while a graph is captured");
}

void Device::begin_capture(int64_t stream, Program* program) {
  Lock lock(mutex);
  if (program_ != nullptr) refuse_while_capturing("a second capture");
  program_ = program;
  streams_.at(stream).captures = true;
}

void Device::end_capture() {
  Lock lock(mutex);
  program_ = nullptr;
  for (Stream& stream : streams_) stream.captures = false;
}

bool Device::is_capturing(int64_t stream) {
  Lock lock(mutex);
  return streams_.at(stream).captures;
}

Program* Device::captured_program(int64_t stream) {
  Lock lock(mutex);
  return streams_.at(stream).captures ? program_ : nullptr;
}

void Device::replay(int64_t stream, const Program& program) {
  Lock lock(mutex);
  for (const Task& task : program) queue(stream, task);
}

}  // namespace late
