// Runs CPU operators apart from what the calling thread has switched on: autograd, Python modes, autocast.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <functional>
#include <stdexcept>
#include <utility>

namespace late {

inline c10::impl::LocalDispatchKeySet plain_keys() {
  c10::impl::LocalDispatchKeySet keys{c10::impl::PODLocalDispatchKeySet{}};
  keys.included_ = c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  keys.excluded_ = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
                   c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                        c10::DispatchKey::PythonDispatcher, c10::DispatchKey::PreDispatch});
  return keys;
}

template <typename F>
auto without_autograd(F&& call) {
  c10::impl::ForceDispatchKeyGuard keys(plain_keys());
  at::NoGradGuard no_grad;
  return std::forward<F>(call)();
}

template <typename F>
std::function<void()> guarded(F run) {
  return [run = std::move(run)] {
    try {
      without_autograd([&run] { return run(), 0; });
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  };
}

}  // namespace late
