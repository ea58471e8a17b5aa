// A model's decoder stack as a table: the engine's parameters and KV pool, which are read and written in place, and the
// layers of the expert store. The owner of the tensors keeps them alive.
//
// H hidden, I intermediate, V vocabulary, N query heads, K key heads, D head size, E experts, S slots of the KV pool, P
// positions, L slots of the LoRA pool, R its highest rank.
#pragma once

#include <memory>
#include <vector>

#include "base/views.h"
#include "ops/low_rank.h"
#include "weights/packed.h"

namespace kt {

// The engine's LoRA pool in one layer. Tensors of layers that it does not adapt are absent.
struct StackLora {
  LowRankPool qkv, out;             // queries, keys and values are three parts
  TensorView gate_up_a, gate_up_b;  // [L, E, 2 R, H], [L, E, 2 I, R]: gate from row 0, up from row R and row I
  TensorView down_a, down_b;        // [L, E, R, I], [L, E, H, R]
};

// Grouped-query attention with norms on each head's queries and keys, then routed experts.
struct StackLayer {
  TensorView input_norm;            // [H]
  TensorView qkv, qkv_bias;         // [(N + 2 K) D, H]: queries, keys, values; [(N + 2 K) D] or absent
  TensorView query_norm, key_norm;  // [D]
  TensorView keys, values;          // [S, K, D]
  TensorView out, out_bias;         // [H, N D]; [H] or absent
  TensorView post_norm;             // [H]
  TensorView gate;                  // [E, H]
  std::shared_ptr<ExpertLayer> experts;
  StackLora lora;
};

// All tensors have one dtype, float32 or bf16.
struct Stack {
  int64_t heads, key_heads, head_size;
  int64_t top_k;
  bool normalises;                 // the routing weights of a token sum to 1
  float epsilon;                   // of every norm
  float scaling;                   // of the queries
  int64_t lora_slots, lora_rank;   // L, R; 0 without a pool
  TensorView embedding;            // [V, H]
  TensorView angles;               // [P, D]: of each position D / 2 cosines, then D / 2 sines
  TensorView final_norm;           // [H]
  std::vector<StackLayer> layers;  // at least one

  DType dtype() const { return embedding.dtype; }
  int64_t hidden() const { return embedding.shape[1]; }
  int64_t num_slots() const { return layers[0].keys.shape[0]; }
  int64_t qkv_cols() const { return (heads + 2 * key_heads) * head_size; }
};

}  // namespace kt
