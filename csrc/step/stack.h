// A model's decoder stack as a table: the engine's parameters and KV pool, which are read and written in place, and the
// layers of the expert store. The owner of the tensors keeps them alive.
//
// With ranks (`Stack::exchange`) each has a share: of the heads with their keys, of the rows of `out`, `gate_up`,
// `down` and the embedding, of the experts; then N, K, D and E below are the rank's own, but for the columns of `out`
// and `down`, for norms of all heads together, and for the router, which has all experts. Of latent attention each rank
// has all that does not belong to heads: `compress`, its norms, the indexer, and the pool's latents. Of Gated DeltaNet
// each has some key heads with their value heads, and their channels.
//
// H hidden, I intermediate, V vocabulary, N query heads, K key heads, D head size, E experts, S slots of the KV pool, P
// positions, L slots of the LoRA pool, R its highest rank. Sizes of latent attention have their names of config.json.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "base/views.h"
#include "ops/delta/gated_delta.h"
#include "ops/dense/low_rank.h"
#include "ops/router/grouped_router.h"
#include "ranks/exchange.h"
#include "weights/packed.h"

namespace kt {

// Its tensors in the LoRA pool are absent where the pool does not adapt the layer.
struct StackLinear {
  TensorView weight;                             // [out, in]; only its shape where the matrix is packed
  std::shared_ptr<const PackedMatrix> packed{};  // null: it is not
  TensorView bias;                               // [out]; may be absent
  LowRankPool lora;
};

// Grouped-query attention. The rotary embedding rotates the first elements of each head, as many as `angles` has
// columns. `is_gated`: behind each head's query, `qkv` has as many gates, whose sigmoids multiply the head's output.
// Llama 4: some layers rotate nothing and multiply a token's queries by a temperature instead, the others see the keys
// of their own chunk of the sequence only (`Stack::chunk`).
struct GroupedQuery {
  StackLinear qkv;                          // [(N + 2 K) D, H]: queries, keys, values; three parts for LoRA. Gated:
                                            // [(2 N + 2 K) D, H]
  TensorView query_norm, key_norm;          // [D], of each head, or [N D] and [K D], of all together; may be absent
  TensorView keys, values;                  // [S, K, D]
  StackLinear out;                          // [H, N D]
  bool rotates = true, norms_last = false;  // the norms come before the rotary embedding, or after it
  bool is_chunked = false;
  TensorView temperatures;  // [P / every + 1] float32, taken at (position + 1) / every; may be absent
  int64_t temperature_every = 1;
  TensorView sinks = {};  // [N] float32: of each head a score without a value; may be absent
  int64_t window = 0;     // keys that a query sees at most; 0: all
  bool is_gated = false;
};

// Chooses the keys that a query of latent attention sees (ops/router/indexer.h): N heads of D elements, of which the
// first `rope` are rotated.
struct Indexer {
  TensorView query;                   // [N D, rank], of the compressed queries
  TensorView key;                     // [D, H]
  TensorView norm_weight, norm_bias;  // [D] float32, of the keys
  TensorView weights;                 // [N, H] float32
  TensorView keys;                    // [S, D]: columns of the pool's rows, behind the layer's latent and rotary key
  int64_t top_k = 0;
  bool interleaved = false;

  bool present() const { return query.present(); }
  int64_t size() const { return key.shape[0]; }
  int64_t heads() const { return weights.shape[0]; }
};

// Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1) in absorbed order: the halves of
// kv_b_proj multiply queries and outputs, heads share one key and one value. Below: rank is q_lora_rank, or 0 where
// queries are not compressed; latent kv_lora_rank; nope, rope and value qk_nope_, qk_rope_ and v_head_dim.
struct Latent {
  StackLinear compress;    // [rank + latent + rope, H]: queries; keys and values, rotary key. LoRA: a part for each
  TensorView query_norm;   // [rank]; absent without rank
  StackLinear query;       // [N (nope + rope), rank]; without rank [N (nope + rope), H]
  TensorView latent_norm;  // [latent]
  TensorView key_heads;    // [N, latent, nope]: the half of kv_b_proj for queries, transposed
  TensorView value_heads;  // [N, value, latent]: the other half
  LowRankPool heads_lora;  // of kv_b_proj: a [L, R, latent], b [L, N (nope + value), R]
  TensorView keys;         // [S, 1, latent + rope]; values are the first `latent` columns
  StackLinear out;         // [H, N value]
  Indexer indexer{};       // absent: a query sees all keys before it
  int64_t top_k = 0;       // keys that a query sees; 0: all. Without an indexer it takes the choice of the layer before

  int64_t rank() const { return query_norm.present() ? query_norm.shape[0] : 0; }
  int64_t latent() const { return latent_norm.shape[0]; }
  int64_t heads() const { return key_heads.shape[0]; }
  int64_t nope() const { return key_heads.shape[2]; }
  int64_t rope() const { return keys.shape[2] - latent(); }
  int64_t value() const { return value_heads.shape[1]; }
};

// Gated DeltaNet (ops/delta/gated_delta.h), with an RMSNorm of each value head of its result, times SiLU of a gate. Its
// states are those of sequences, not of tokens: it has no keys. Below: C channels, HV value heads of V elements.
struct GatedDelta {
  DeltaShape shape;
  StackLinear inputs;         // [C + HV V, H]: queries, keys, values, gates of the result; LoRA: a part for the gates
  StackLinear gates;          // [2 HV, H]: write strengths, decays; two parts for LoRA
  bool by_key_head;           // the rows of both go key head by key head, each with its value heads; one part for LoRA
  TensorView filter;          // [C, W]
  TensorView log_rate, bias;  // [HV] float32 or the stack's dtype
  TensorView norm;            // [V], not an offset
  DeltaStates kept;           // of S slots; contiguous
  StackLinear out;            // [H, HV V]

  int64_t results() const { return shape.value_heads * shape.value_size; }
};

struct GatedMlp {
  StackLinear gate_up, down;  // [2 I, H], [H, I]; two parts and one for LoRA
  TensorView gate = {};       // [1, H]: the sigmoid of its product multiplies the result; may be absent

  bool present() const { return down.weight.present(); }
};

struct RoutedExperts {
  TensorView gate;                     // [E, H]; where experts are chosen in groups perhaps in float32
  TensorView gate_bias = {};           // [E], of the logits of a softmax; may be absent
  TensorView bias;                     // [E] float32, of the choice in groups; may be absent
  std::shared_ptr<ExpertLayer> layer;  // null: there are none
  int64_t place = 0;                   // among the layers that have routed experts
  TensorView gate_up_a, gate_up_b;     // LoRA: [L, E, 2 R, H], [L, E, 2 I, R]: gate from row 0, up from row R and row I
  TensorView down_a, down_b;           // [L, E, R, I], [L, E, H, R]

  bool present() const { return layer != nullptr; }
};

// Its MLP is the sum of a gated MLP (a dense one, or the shared experts) and of routed experts; one may be absent.
struct StackLayer {
  TensorView input_norm, post_norm;  // [H]
  std::variant<GroupedQuery, Latent, GatedDelta> attention;
  GatedMlp mlp;
  RoutedExperts routed;
};

// All tensors have one dtype, float32 or bf16; a packed matrix has none. All layers that have keys, of which there is
// at least one, have one kind of attention, of the same sizes; so have those with Gated DeltaNet.
struct Stack {
  int64_t heads;
  int64_t top_k;
  bool normalises;                       // the routing weights of a token sum to 1
  std::optional<GroupedRouting> groups;  // of the router, whose logits are float32; absent: softmax of all experts
  float epsilon;                         // of every norm
  float scaling;                         // of the queries
  bool offset_norms;                     // the weights of norms are offsets from one
  bool interleaved;                      // the rotary embedding rotates adjacent elements
  bool weighs_input;                     // a token's routing weights, one expert's, multiply the experts' input
  int64_t chunk;                         // of chunked layers: keys that one query sees at most; 0: there are none
  int64_t lora_slots, lora_rank;         // L, R; 0 without a pool
  TensorView embedding;                  // [V, H]
  TensorView angles;                     // [P, rope], rope <= D: of each position the cosines, then the sines
  TensorView final_norm;                 // [H]
  std::vector<StackLayer> layers;        // at least one
  std::shared_ptr<Exchange> exchange{};  // null: the process has the whole model
  int64_t vocabulary = 0;                // token ids of all ranks; of one rank perhaps 0: those of the embedding
  int64_t ids_per_rank = 0;              // rank r's embedding begins with id r * ids_per_rank

  DType dtype() const { return embedding.dtype; }
  int64_t hidden() const { return embedding.shape[1]; }
  int64_t num_ids() const { return vocabulary > 0 ? vocabulary : embedding.shape[0]; }
  int64_t ranks() const { return exchange ? exchange->num_ranks() : 1; }
  int64_t routed_layers() const {
    return std::count_if(layers.begin(), layers.end(), [](const StackLayer& layer) { return layer.routed.present(); });
  }
  // Keys that a query of the layers with an indexer sees, the same in all; 0: the queries see all.
  int64_t top_keys() const {
    const StackLayer* layer = attending();
    const auto* latent = layer ? std::get_if<Latent>(&layer->attention) : nullptr;
    return latent ? latent->top_k : 0;
  }
  // The first layer that has keys; null: none has.
  const StackLayer* attending() const {
    const auto found = std::find_if(layers.begin(), layers.end(), [](const StackLayer& layer) {
      return !std::holds_alternative<GatedDelta>(layer.attention);
    });
    return found == layers.end() ? nullptr : &*found;
  }
  // Of the first layer that has keys: all layers' keys have its shape.
  const TensorView& keys() const {
    const auto& attention = attending()->attention;
    const auto* grouped = std::get_if<GroupedQuery>(&attention);
    return grouped ? grouped->keys : std::get<Latent>(attention).keys;
  }
  // The first Gated DeltaNet layer; null: there is none.
  const GatedDelta* delta() const {
    for (const StackLayer& layer : layers) {
      if (const auto* found = std::get_if<GatedDelta>(&layer.attention)) return found;
    }
    return nullptr;
  }
};

}  // namespace kt
