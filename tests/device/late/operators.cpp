// One boxed kernel for all operators: the result is sized on the meta device, and the work is queued. It runs PyTorch's
// CPU operator on tensors that alias the accessible half of memory.
//
// An operator whose result the meta device cannot size (nonzero, item) waits for the stream, as CUDA's kernels do, and
// is run at once; the waits are counted by the operator's name.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>

#include "boundary.h"
#include "generator.h"
#include "guarded.h"
#include "sizes.h"

namespace late {

namespace {

using c10::IValue;
using torch::jit::Stack;
using OnTensor = std::function<at::Tensor(const at::Tensor&)>;

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == c10::kPrivateUse1; }

// The value with `change` applied to each of its tensors.
IValue with_tensors(const IValue& value, const OnTensor& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

Stack with_tensors(const Stack& stack, const OnTensor& change) {
  Stack changed;
  for (const IValue& value : stack) changed.push_back(with_tensors(value, change));
  return changed;
}

void place_on(c10::DeviceType type, Stack& stack) {
  for (IValue& value : stack) {
    if (value.isDevice() && value.toDevice().type() == c10::kPrivateUse1) value = c10::Device(type);
  }
}

at::Tensor alias_with(const c10::Storage& storage, c10::DispatchKeySet keys, const at::Tensor& shape) {
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, shape.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  return alias;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  const auto num_bytes = static_cast<int64_t>(tensor.storage().nbytes());
  const at::Tensor whole = at::detail::empty_meta({num_bytes}, at::kByte);
  return alias_with(whole.storage(), whole.key_set(), tensor);
}

at::Tensor new_on_device(const at::Tensor& shape) {
  return at::detail::empty_strided_generic(shape.sizes(), shape.strides(), allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), shape.scalar_type());
}

at::Generator& host_generator() { return const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator()); }

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// One call of an operator: what was given, and what is known of the result.
class Call {
 public:
  Call(c10::OperatorHandle op, Stack arguments) : op_(std::move(op)), arguments_(std::move(arguments)) {}

  Stack run() {
    require_one_device();
    if (!depends_on_values() && !selects_by_mask()) {
      if (std::optional<Stack> written = known_to_write_in_place()) return queued_in_place(std::move(*written));
      if (std::optional<Stack> sized = on_meta()) return queued(*sized);
    }
    return at_once();
  }

 private:
  const c10::FunctionSchema& schema() const { return op_.schema(); }
  std::string name() const { return c10::toString(op_.operator_name()); }

  // As CUDA's operators: numbers may be on the CPU, indices too; everything else is a missing copy.
  void require_one_device() const {
    for (const IValue& value : arguments_) {
      if (value.isOptionalTensorList()) continue;
      with_tensors(value, [this](const at::Tensor& tensor) {
        TORCH_CHECK(!tensor.defined() || is_ours(tensor) || (tensor.is_cpu() && tensor.dim() == 0), name(),
                    ": Expected all tensors to be on the same device, but found late:0 and ", tensor.device(), ", ",
                    tensor.scalar_type(), " ", tensor.sizes());
        return tensor;
      });
    }
  }

  // Of the sizes that a result has, or of a number for the host: the meta device would refuse, which takes long.
  bool depends_on_values() const {
    if (op_.hasTag(at::Tag::data_dependent_output)) return true;
    const bool is_index = op_.operator_name().name == "aten::index";  // which `selects_by_mask` is for
    return op_.hasTag(at::Tag::dynamic_output_shape) && !is_index;
  }

  // A mask among indices is a nonzero on the device, unless one number is put where the mask says.
  bool selects_by_mask() const {
    bool has_mask = false;
    for (const IValue& value : arguments_) {
      if (!value.isOptionalTensorList()) continue;
      for (const std::optional<at::Tensor>& index : value.toOptionalTensorVector()) {
        const bool is_defined = index && index->defined();
        has_mask |= is_defined && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
      }
    }
    const bool puts_one_number =
        arguments_.size() > 2 && arguments_[2].isTensor() && arguments_[2].toTensor().numel() == 1;
    return has_mask && !puts_one_number;
  }

  // nullopt: the meta device cannot tell the result, or the arguments are wrong, which running them will tell.
  std::optional<Stack> on_meta() {
    metas_.clear();
    if (!writes() && returns_aliases()) return asked_on_meta();
    const std::string key = signature(op_, arguments_);
    if (const Stack* known = writes() ? nullptr : Sizes::get().find(key)) return *known;
    std::optional<Stack> found = asked_on_meta();
    if (found && !writes()) Sizes::get().add(key, *found);
    if (found && writes() && is_written_in_place()) Sizes::get().add(key, Stack());
    return found;
  }

  // The written arguments, which are the results: if such a call was seen to change no size.
  std::optional<Stack> known_to_write_in_place() const {
    if (!writes() || Sizes::get().find(signature(op_, arguments_)) == nullptr) return std::nullopt;
    return written_arguments();
  }

  // After the meta device was asked.
  bool is_written_in_place() const {
    const bool same = std::all_of(metas_.begin(), metas_.end(), [](const auto& of) {
      return of.first.sizes() == of.second.sizes() && of.first.strides() == of.second.strides();
    });
    return same && written_arguments().has_value();
  }

  // By the schema; nullopt: a result is none of them.
  std::optional<Stack> written_arguments() const {
    Stack written;
    for (const c10::Argument& result : schema().returns()) {
      const auto& given = schema().arguments();
      const auto found = std::find_if(given.begin(), given.end(), [&result](const c10::Argument& argument) {
        return is_written(result) && is_written(argument) &&
               result.alias_info()->beforeSets() == argument.alias_info()->beforeSets();
      });
      if (found == given.end()) return std::nullopt;
      written.push_back(arguments_[found - given.begin()]);
    }
    return written;
  }

  Stack queued_in_place(Stack written) {
    Stack places;
    for (const IValue& result : written) places.push_back(with_tensors(result, for_kernels_if_ours));
    queue(std::move(places));
    return written;
  }

  std::optional<Stack> asked_on_meta() {
    Stack stack = with_tensors(arguments_, [this](const at::Tensor& tensor) {
      if (!is_ours(tensor)) return tensor;
      metas_.push_back({tensor, as_meta(tensor)});
      return metas_.back().second;
    });
    place_on(c10::kMeta, stack);
    for (IValue& value : stack) {
      if (value.isGenerator()) value = IValue();
    }
    try {
      without_autograd([&] { return op_.callBoxed(stack), 0; });
    } catch (const std::exception& error) {
      return std::nullopt;
    }
    for (const IValue& value : stack) {
      if (value.isTensor() && value.toTensor().is_cpu()) return std::nullopt;
    }
    return stack;
  }

  // The tensor of the caller whose memory a result of the meta device has, or nullptr.
  const at::Tensor* aliased(const at::Tensor& meta) const {
    for (const auto& [tensor, its_meta] : metas_) {
      if (meta.storage().is_alias_of(its_meta.storage())) return &tensor;
    }
    return nullptr;
  }

  Stack queued(const Stack& sized) {
    resize_outputs();
    Stack results, places;
    bool has_new = false;
    for (size_t i = 0; i < sized.size(); ++i) {
      results.push_back(with_tensors(sized[i], [this, &has_new, i](const at::Tensor& meta) {
        if (!meta.defined()) return meta;
        const bool may_alias = i < schema().returns().size() && schema().returns()[i].alias_info() != nullptr;
        if (const at::Tensor* source = may_alias ? aliased(meta) : nullptr) return same_or_view(*source, meta, i);
        has_new = true;
        return new_on_device(meta);
      }));
      places.push_back(with_tensors(results.back(), for_kernels_if_ours));
    }
    if (has_new || writes()) queue(std::move(places));
    return results;
  }

  bool returns_aliases() const {
    const auto& returns = schema().returns();
    return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& result) { return result.alias_info(); });
  }

  bool writes() const { return std::any_of(schema().arguments().begin(), schema().arguments().end(), is_written); }

  at::Tensor same_or_view(const at::Tensor& source, const at::Tensor& meta, size_t result) const {
    return is_written(schema().returns()[result]) ? source : alias_with(source.storage(), source.key_set(), meta);
  }

  // out= arguments take the size that the meta device gave theirs.
  void resize_outputs() {
    for (const auto& [tensor, meta] : metas_) {
      if (tensor.sizes() == meta.sizes()) continue;
      const size_t wanted = at::detail::computeStorageNbytes(meta.sizes(), meta.strides(), meta.itemsize());
      if (tensor.storage().nbytes() < wanted) resize_storage(tensor.storage(), wanted);
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
    }
  }

  static at::Tensor for_kernels_if_ours(const at::Tensor& tensor) {
    return is_ours(tensor) ? for_kernels(tensor) : tensor;
  }

  // The arguments for a CPU kernel that runs later: aliases of the device's memory, copies of the host's.
  Stack for_cpu() const {
    Stack stack = with_tensors(arguments_, [](const at::Tensor& tensor) {
      if (!tensor.defined() || is_ours(tensor)) return for_kernels_if_ours(tensor);
      at::Tensor copy = without_autograd([&] { return tensor.clone(); });
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    });
    place_on(c10::kCPU, stack);
    return stack;
  }

  // Gives the call, which `stack` is for, random numbers of the device. Empty: it draws none.
  std::function<void(Stack&)> seeded(Stack& stack) const {
    for (size_t i = 0; i < stack.size(); ++i) {
      static const auto optional_generator = c10::getTypePtr<std::optional<at::Generator>>();
      if (!stack[i].isGenerator() && *schema().arguments()[i].type() != *optional_generator) continue;
      const auto given = stack[i].isGenerator() ? std::optional(stack[i].toGenerator()) : std::nullopt;
      const uint64_t seed = of_device(given).draw_seed();
      return [i, seed](Stack& run) { run[i] = at::make_generator<at::CPUGeneratorImpl>(seed); };
    }
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return {};
    const uint64_t seed = of_device(std::nullopt).draw_seed();
    return [seed](Stack&) { host_generator().set_current_seed(seed); };
  }

  std::function<void(Stack&)> kernel(Stack& stack) const {
    const auto call = [op = op_](Stack& run) { without_autograd([&] { return op.callBoxed(run), 0; }); };
    auto seed = seeded(stack);
    if (!seed) return call;
    return [call, seed = std::move(seed)](Stack& run) {  // the host's random numbers stay what they were
      const at::Tensor state = host_generator().get_state();
      seed(run);
      call(run);
      host_generator().set_state(state);
    };
  }

  void queue(Stack places) const {
    Stack stack = for_cpu();
    auto run = [stack, kernel = kernel(stack), places = std::move(places)] {
      Stack results = stack;
      kernel(results);
      for (size_t i = 0; i < places.size(); ++i) store(results[i], places[i]);
    };
    Device::get().queue(current_stream(), Task{name(), guarded(std::move(run)), {}, {}});
  }

  static void store(const IValue& result, const IValue& place) {
    if (place.isTensor()) store_tensor(result.toTensor(), place.toTensor());
    if (!place.isTensorList()) return;
    const auto results = result.toTensorVector(), places = place.toTensorVector();
    for (size_t i = 0; i < places.size(); ++i) store_tensor(results[i], places[i]);
  }

  static void store_tensor(const at::Tensor& result, const at::Tensor& place) {
    if (!place.defined() || !result.defined() || result.const_data_ptr() == place.const_data_ptr()) return;
    TORCH_CHECK(result.sizes() == place.sizes(), "the CPU's result has the shape ", result.sizes(),
                ", the meta device said ", place.sizes());
    place.copy_(result);
  }

  Stack at_once() const {
    Device::get().await_hidden(current_stream(), name());
    Stack stack = for_cpu();
    for (size_t i = 0; i < stack.size(); ++i) {
      const c10::Argument& argument = schema().arguments()[i];
      if (argument.kwarg_only() && is_written(argument)) stack[i] = at::empty({0}, stack[i].toTensor().options());
    }
    const Stack given = stack;
    kernel(stack)(stack);
    for (IValue& result : stack) {
      result = with_tensors(result, [&](const at::Tensor& tensor) { return moved_to_device(tensor, given); });
    }
    return stack;
  }

  // A result of the CPU on the device: a new tensor, or the argument that the operator wrote.
  at::Tensor moved_to_device(const at::Tensor& result, const Stack& given) const {
    if (!result.defined()) return result;
    for (size_t i = 0; i < given.size(); ++i) {
      if (!given[i].isTensor() || !given[i].toTensor().is_same(result)) continue;
      const at::Tensor& argument = arguments_[i].toTensor();
      if (schema().arguments()[i].kwarg_only()) {
        argument.resize_(result.sizes());
        copy_between(result, argument, true);
      }
      return argument;
    }
    const at::Tensor moved = new_on_device(result);
    copy_between(result, moved, true);
    return moved;
  }

  c10::OperatorHandle op_;
  Stack arguments_;
  std::vector<std::pair<at::Tensor, at::Tensor>> metas_;
};

void run(const c10::OperatorHandle& op, Stack* stack, size_t num_arguments) {
  Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(num_arguments), stack->end());
  torch::jit::drop(*stack, num_arguments);
  for (IValue& result : Call(op, std::move(arguments)).run()) stack->push_back(std::move(result));
}

void any_operator(const c10::OperatorHandle& op, Stack* stack) { run(op, stack, op.schema().arguments().size()); }

c10::OperatorHandle named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const c10::OperatorHandle&, Stack* stack) {
  const c10::OperatorHandle op = named("aten::convolution");
  run(op, stack, op.schema().arguments().size());
}

// PyTorch's name for backends of their own lacks the bias' sizes, which the CPU's operator has as fourth argument.
void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  const c10::OperatorHandle op = named("aten::convolution_backward");
  const auto bias = stack->end() - 7;
  const at::Tensor weight = (bias - 1)->toTensor();
  const bool is_transposed = (bias + 3)->toBool();
  const int64_t groups = (bias + 5)->toInt();
  const int64_t channels = is_transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(bias, IValue(std::vector<int64_t>{channels}));
  run(op, stack, op.schema().arguments().size());
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_between(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t wanted =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (self.storage().nbytes() < wanted) resize_storage(self.storage(), wanted);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  if (stride.empty()) {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Memory::get().used_on(self.storage().data_ptr().get(), stream.id());
}

int64_t attention_by_matrix_products(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                     const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;
}

}  // namespace

at::Tensor for_kernels(const at::Tensor& tensor) {
  void* place = tensor.numel() == 0 ? nullptr : Memory::get().for_kernels(tensor.const_data_ptr());
  at::Tensor alias = at::from_blob(place, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

// Copies resolve conjugated and negated views themselves: PyTorch's way to do so is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_between);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_fused_sdp_choice", &attention_by_matrix_products);
  // PyTorch's general kernel of it reads the offsets on the host; the device's own does not.
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  // A mask is one wait; PyTorch's general kernel would expand it twice.
  m.impl("index.Tensor", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace late
