// The device's lock, for threads that may hold Python's lock.
//
// Work runs under the device's lock, and ends with the release of tensors; if Python knows one, that takes Python's
// lock. So a thread that waits for the device's lock must not hold Python's: each would wait for the other.
#pragma once

#include <mutex>

// Python's, weak: a process without Python has none.
extern "C" {
__attribute__((weak)) int PyGILState_Check();
__attribute__((weak)) void* PyEval_SaveThread();
__attribute__((weak)) void PyEval_RestoreThread(void*);
}

namespace late {

class Lockable {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    void* python = PyGILState_Check && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex_.lock();
    if (python) PyEval_RestoreThread(python);
  }
  void unlock() { mutex_.unlock(); }

 private:
  std::recursive_mutex mutex_;
};

}  // namespace late
