// What the operators know of the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include "memory.h"
#include "queue.h"

namespace late {

c10::Device the_device();
int64_t current_stream();  // of this thread
bool is_pinned(const void* place);
c10::Allocator* allocator();
void resize_storage(const c10::Storage& storage, size_t num_bytes);

// `tensor` of the device as a CPU tensor for kernels: the same elements, in the half that may be accessed.
at::Tensor for_kernels(const at::Tensor& tensor);
at::Tensor copy_between(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

}  // namespace late
