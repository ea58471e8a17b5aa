#include "generator.h"

#include <ATen/Utils.h>
#include <ATen/ops/empty.h>

#include <cstring>

namespace late {

RandomNumbers::RandomNumbers()
    : GeneratorImpl(c10::Device(c10::kPrivateUse1, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

// SplitMix64's finalizer, of a seed and a place in its sequence.
uint64_t RandomNumbers::draw_seed() {
  std::lock_guard lock(mutex_);
  uint64_t z = seed_ + 0x9E3779B97F4A7C15 * ++offset_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

void RandomNumbers::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t RandomNumbers::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void RandomNumbers::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  uint64_t numbers[2];
  TORCH_CHECK(state.numel() == sizeof numbers, "late: a generator's state has ", sizeof numbers, " bytes, got ",
              state.numel());
  std::memcpy(numbers, state.data(), sizeof numbers);
  seed_ = numbers[0];
  offset_ = numbers[1];
}

c10::intrusive_ptr<c10::TensorImpl> RandomNumbers::get_state() const {
  const uint64_t numbers[2] = {seed_, offset_};
  at::Tensor state = at::empty({static_cast<int64_t>(sizeof numbers)}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(state.data_ptr(), numbers, sizeof numbers);
  return state.getIntrusivePtr();
}

RandomNumbers* RandomNumbers::clone_impl() const {
  auto* copy = new RandomNumbers;
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

const at::Generator& default_generator() {
  static auto* generator = new at::Generator(at::make_generator<RandomNumbers>());
  return *generator;
}

RandomNumbers& of_device(const std::optional<at::Generator>& generator) {
  const at::Generator& chosen = generator && generator->defined() ? *generator : default_generator();
  TORCH_CHECK(chosen.device().type() == c10::kPrivateUse1, "late: expected a generator of the device, got one of ",
              chosen.device());
  return *static_cast<RandomNumbers*>(chosen.unsafeGetGeneratorImpl());
}

}  // namespace late
