// Random numbers of the device: a seed and a count of uses, as CUDA's Philox has them. A use draws a seed on the host,
// when the work is queued; the work makes a CPU generator of it. So results depend on no schedule.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace late {

class RandomNumbers final : public c10::GeneratorImpl {
 public:
  RandomNumbers();
  // Of the next operator.
  uint64_t draw_seed();

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;  // 16 bytes of CPU memory: seed, offset
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  RandomNumbers* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator();
RandomNumbers& of_device(const std::optional<at::Generator>& generator);

}  // namespace late
