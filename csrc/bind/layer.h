// One layer with the instruction set and thread count of its store, as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "bind/dlpack.h"
#include "ops/experts/forward.h"

namespace kt {

// Throws BindError for a status that is not ok.
void check(const Status& status);

// The packed bytes of one matrix on one memory node, read-only; keeps the layer alive.
struct PieceBytes {
  std::shared_ptr<const ExpertLayer> layer;
  const uint8_t* data;
  int64_t bytes;
};

class NativeLayer {
 public:
  NativeLayer(std::shared_ptr<ExpertLayer> layer, const Tiles* tiles, int num_threads)
      : layer_(std::move(layer)), tiles_(tiles), num_threads_(num_threads) {}

  // Returns the `retained` argument of `backward` if `retain` is set, else null.
  std::shared_ptr<Retained> forward(pybind11::handle x, pybind11::handle ids, pybind11::handle weights,
                                    const pybind11::sequence& slots, pybind11::handle token_slots, pybind11::handle out,
                                    bool retain) const;

  void backward(pybind11::handle grad_out, pybind11::handle x, pybind11::handle ids, pybind11::handle weights,
                const pybind11::sequence& slots, pybind11::handle token_slots, pybind11::handle x_grad,
                pybind11::handle weights_grad, const pybind11::sequence& slot_grads,
                const std::shared_ptr<Retained>& retained) const;

  // The sums of `forward` from rows that were computed elsewhere (ops/pairs/token_rows.h).
  void combine(pybind11::handle rows, pybind11::handle row_of, pybind11::handle weights, pybind11::handle out) const;

  // Writes to bfloat16 tensors for a bf16 layer, else to float32 tensors. Experts without a gate do not write to
  // `gate`.
  void unpack(int64_t expert, pybind11::handle gate, pybind11::handle up, pybind11::handle down) const;

  // Writes experts [first, first + count) to bfloat16 tensors w13 [count, 2I, H] (without a gate [count, I, H]) and w2
  // [count, H, I].
  void unpack_range(int64_t first, int64_t count, pybind11::handle w13, pybind11::handle w2) const;

  const std::shared_ptr<ExpertLayer>& layer() const { return layer_; }

  PieceBytes piece_bytes(int64_t expert, int projection, int node) const;
  // All biases of an expert; no bytes where it has none.
  PieceBytes bias_bytes(int64_t expert) const;
  // Of gate and up, joined by "+" with that of down if it is another.
  std::string format() const {
    const std::string in = format_name(layer_->in_shape().format), out = format_name(layer_->out_shape().format);
    return in == out ? in : in + "+" + out;
  }
  std::vector<int64_t> node_bytes() const;
  int num_nodes() const { return layer_->num_nodes(); }
  int64_t weight_bytes() const { return layer_->weight_bytes(); }
  int64_t resident_bytes() const { return layer_->resident_bytes(); }

 private:
  Engine engine() const { return {*layer_, *tiles_, num_threads_}; }
  void check_expert(int64_t expert) const;

  std::shared_ptr<ExpertLayer> layer_;
  const Tiles* tiles_;
  int num_threads_;
};

void bind_layer(pybind11::module_& module);

}  // namespace kt
