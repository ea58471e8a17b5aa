// The device's streams: queues of work that runs as late, as early or in as odd an order as the rules allow.
//
// There are no threads. Work runs inside the call that needs it (LATE), that queued it (EAGER), or at points that a
// seed draws (RANDOM). So a failure repeats. All members lock `mutex`, which callers may hold already.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "lock.h"

namespace late {

// The first `position` tasks of a stream.
struct Mark {
  int64_t stream = 0;
  uint64_t position = 0;
  bool is_captured = false;  // recorded while a graph was captured: it orders the graph's work alone
};

struct Task {
  std::string name;           // what an error names
  std::function<void()> run;  // on addresses that kernels may use
  std::function<void(Mark)>
      when_queued;            // what the host's memory has to know at once; gets the task's mark; may be empty
  std::optional<Mark> after;  // a wait: nothing to run
};

using Program = std::vector<Task>;  // what a graph captured, in the order of the calls

enum class Schedule { kLate, kEager, kRandom };

class Device {
 public:
  static Device& get();

  Lockable mutex;

  int64_t new_stream();
  int64_t num_streams();
  void set_schedule(Schedule schedule, uint64_t seed);

  void queue(int64_t stream, Task task);
  // For work of the allocator: never throws, and never becomes part of a captured graph.
  void queue_beside(int64_t stream, Task task);
  void wait(int64_t stream, Mark mark);
  Mark mark(int64_t stream);

  bool is_done(Mark mark);
  // Runs what `mark` needs. Throws what a task threw, with the task's name.
  void await(Mark mark);
  void await_all();
  // An answer to a query: false a few times, then the work makes progress. `times` counts the questions.
  bool is_done_when_asked(Mark mark, int& times);
  // A wait that the caller did not write (item, nonzero, a pageable copy): counted, or an error where forbidden.
  void await_hidden(int64_t stream, const std::string& what);

  void forbid_hidden(bool forbidden);
  std::map<std::string, int64_t> hidden_waits();
  void forget_hidden_waits();

  void begin_capture(int64_t stream, Program* program);
  void end_capture();
  bool is_capturing(int64_t stream);
  Program* captured_program(int64_t stream);
  void replay(int64_t stream, const Program& program);

 private:
  struct Stream {
    std::deque<Task> tasks;
    uint64_t queued = 0;
    uint64_t done = 0;
    bool captures = false;
  };

  void push(int64_t stream, Task task);
  void run_next(Stream& stream);
  bool run_any();
  void make_progress();
  void refuse_while_capturing(const std::string& what);

  std::deque<Stream> streams_{1};  // stream 0 is the default one
  Schedule schedule_ = Schedule::kLate;
  std::mt19937_64 random_;
  Program* program_ = nullptr;
  bool forbidden_ = false;
  std::map<std::string, int64_t> hidden_;
};

}  // namespace late
