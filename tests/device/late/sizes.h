// What the meta device has said of calls: the shapes of their results, by all that these depend on.
//
// Much of the meta device is Python (torch/_refs, torch/_meta_registrations): asked for each call, it took three
// quarters of the time of a server that decodes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <mutex>
#include <string>
#include <unordered_map>

namespace late {

// Operator and arguments: numbers, and of tensors dtype, sizes and strides. Empty: it has an argument of another kind,
// so nothing is known of the call. For operators that return no view.
std::string signature(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

class Sizes {
 public:
  static Sizes& get();

  // Results as tensors of the meta device; none for a call that writes its results in place. nullptr: the call is new.
  // Valid for ever: nothing is taken out.
  const torch::jit::Stack* find(const std::string& signature);
  void add(const std::string& signature, const torch::jit::Stack& results);

 private:
  std::mutex mutex_;  // held for nothing but the map
  std::unordered_map<std::string, torch::jit::Stack> known_;
};

}  // namespace late
