#include "ops/experts/retained.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>

#include "ops/experts/lora.h"
#include "ops/experts/operand.h"

namespace kt {
namespace {

// Chunks whose memory waits for its next use. Never destroyed: a Retained may outlive static objects.
struct SpareChunks {
  std::mutex mutex;
  std::vector<RetainedChunk> chunks;  // taken from the end
  size_t idle = 0;                    // number of chunks at the front that this window did not take
  RecentNeed need;                    // bytes of a chunk

  bool too_large(const RetainedChunk& chunk) const { return static_cast<size_t>(chunk.bytes()) > 2 * need.most(); }

  // Frees chunks that no call of this window took, and those much larger than what recent calls needed.
  void end_window() {
    chunks.erase(chunks.begin(), chunks.begin() + static_cast<std::ptrdiff_t>(std::min(idle, chunks.size())));
    std::erase_if(chunks, [&](const RetainedChunk& chunk) { return too_large(chunk); });
    idle = chunks.size();
    need.end_window();
  }

  static SpareChunks& instance() {
    static SpareChunks* const spare = new SpareChunks;
    return *spare;
  }
};

Status differs(const std::string& name, const std::string& was, const std::string& is) {
  return invalid_value("the retained activations are of another call: " + name + " was " + was + " there and is " + is +
                       " here");
}

template <class T>
Status compare(const std::string& name, T was, T is) {
  return was == is ? Status() : differs(name, std::to_string(was), std::to_string(is));
}

std::string place(const char* name, int64_t token, int64_t position) {
  return std::string(name) + "[" + std::to_string(token) + ", " + std::to_string(position) + "]";
}

Status compare_slots(const CallFacts& was, const CallFacts& is) {
  KT_RETURN_IF_ERROR(compare("the number of slots", was.slots.size(), is.slots.size()));
  for (size_t i = 0; i < is.slots.size(); ++i) {
    const CallFacts::Slot &a = was.slots[i], &b = is.slots[i];
    const std::string slot = "slots[" + std::to_string(i) + "].";
    for (int part = 0; part < kNumProjections; ++part)
      KT_RETURN_IF_ERROR(compare(slot + kProjectionNames[part] + "'s rank", a.ranks[part], b.ranks[part]));
    KT_RETURN_IF_ERROR(compare(slot + "scaling", a.scaling, b.scaling));
    KT_RETURN_IF_ERROR(compare(slot + "dropout", a.dropout, b.dropout));
    if (b.dropout == 0) continue;
    KT_RETURN_IF_ERROR(compare(slot + "seed", a.seed, b.seed));
    KT_RETURN_IF_ERROR(compare(slot + "first_expert", a.first_expert, b.first_expert));
    for (size_t token = 0; token < b.tokens.size(); ++token)
      KT_RETURN_IF_ERROR(compare(slot + "tokens[" + std::to_string(token) + "]", a.tokens[token], b.tokens[token]));
  }
  for (size_t token = 0; token < is.token_slots.size(); ++token) {
    KT_RETURN_IF_ERROR(
        compare("token_slots[" + std::to_string(token) + "]", was.token_slots[token], is.token_slots[token]));
  }
  return {};
}

Status compare_routing(const RoutedCall& call, const Routing& was) {
  std::vector<int64_t> expert_of(static_cast<size_t>(was.num_pairs()));
  for (const PairRange& run : was.experts)
    std::fill(expert_of.begin() + run.begin, expert_of.begin() + run.end, run.expert);
  for (int64_t flat = 0; flat < was.num_tokens * was.top_k; ++flat) {
    const int64_t token = was.first_token + flat / was.top_k, position = flat % was.top_k;
    const int64_t pair = was.pair_of[static_cast<size_t>(flat)];
    const int64_t expert = pair < 0 ? -1 : expert_of[static_cast<size_t>(pair)];
    const int64_t id = id_at(call.ids, token, position);
    if (id != expert) return differs(place("ids", token, position), std::to_string(expert), std::to_string(id));
    if (pair < 0) continue;
    const float before = was.weight[static_cast<size_t>(pair)];
    const float weight = call.weights.as<float>()[token * call.weights.strides[0] + position];
    if (weight != before)
      return differs(place("weights", token, position), std::to_string(before), std::to_string(weight));
  }
  return {};
}

}  // namespace

void RetainedChunk::reserve(const ExpertLayer& layer, const RoutedCall& call) {
  const int64_t pairs = routing.num_pairs();
  ld = activation_stride(layer.shape().intermediate);
  rank = max_rank_of_all(call.slots);
  const bool has_gate = layer.mlp().has_gate();
  if (has_gate) gate.reserve<float>(pairs * ld);
  up.reserve<float>(pairs * ld);
  for (AlignedBuffer& rows : low) rows.reserve<float>(pairs * rank);
  SpareChunks& spare = SpareChunks::instance();
  std::lock_guard lock(spare.mutex);
  spare.need.add(static_cast<size_t>(pairs * ((has_gate ? 2 : 1) * ld + kNumProjections * rank)) * sizeof(float));
}

int64_t RetainedChunk::bytes() const {
  size_t bytes = gate.bytes() + up.bytes();
  for (const AlignedBuffer& rows : low) bytes += rows.bytes();
  return static_cast<int64_t>(bytes);
}

Retained::~Retained() { clear(); }

void Retained::clear() {
  SpareChunks& spare = SpareChunks::instance();
  std::lock_guard lock(spare.mutex);
  for (RetainedChunk& chunk : chunks) {
    if (!spare.too_large(chunk)) spare.chunks.push_back(std::move(chunk));
  }
  chunks.clear();
  call = {};
}

void Retained::free_spare() {
  SpareChunks& spare = SpareChunks::instance();
  std::lock_guard lock(spare.mutex);
  spare.chunks.clear();
  spare.idle = 0;
  free_scratch();
}

RetainedChunk& Retained::add_chunk() {
  SpareChunks& spare = SpareChunks::instance();
  std::lock_guard lock(spare.mutex);
  if (spare.chunks.empty()) return chunks.emplace_back();
  chunks.push_back(std::move(spare.chunks.back()));
  spare.chunks.pop_back();
  spare.idle = std::min(spare.idle, spare.chunks.size());
  return chunks.back();
}

int64_t Retained::bytes() const {
  int64_t bytes = 0;
  for (const RetainedChunk& chunk : chunks) bytes += chunk.bytes();
  return bytes;
}

int64_t Retained::spare_bytes() {
  SpareChunks& spare = SpareChunks::instance();
  std::lock_guard lock(spare.mutex);
  int64_t bytes = 0;
  for (const RetainedChunk& chunk : spare.chunks) bytes += chunk.bytes();
  return bytes;
}

CallScope::~CallScope() {
  static std::atomic<int64_t> calls{0};
  if ((calls.fetch_add(1) + 1) % kCallsInWindow != 0) return;
  SpareChunks& spare = SpareChunks::instance();
  std::lock_guard lock(spare.mutex);
  spare.end_window();
}

CallFacts facts_of(const ExpertLayer& layer, const RoutedCall& call) {
  CallFacts facts;
  facts.layer = layer.id();
  facts.tokens = call.x.shape[0];
  facts.top_k = call.ids.shape[1];
  facts.x_dtype = call.x.dtype;
  for (const LoraSlot& slot : call.slots) {
    CallFacts::Slot& made =
        facts.slots.emplace_back(CallFacts::Slot{{}, slot.scaling, slot.dropout, slot.seed, slot.first_expert, {}});
    if (slot.dropout > 0) {
      for (int64_t token = 0; token < facts.tokens; ++token) made.tokens.push_back(token_number(slot, token));
    }
    for (int part = 0; part < kNumProjections; ++part) made.ranks[part] = slot.pairs[part].rank();
  }
  for (int64_t token = 0; token < facts.tokens; ++token) facts.token_slots.push_back(slot_at(call, token));
  return facts;
}

Status check_retained(const ExpertLayer& layer, const RoutedCall& call, const Retained& retained) {
  const CallFacts is = facts_of(layer, call), &was = retained.call;
  if (was.layer == 0) return invalid_value("the retained activations are of a forward call that did not finish");
  if (was.layer != is.layer)
    return invalid_value("the retained activations are of another call: its layer was another one");
  KT_RETURN_IF_ERROR(compare("x.shape[0]", was.tokens, is.tokens));
  if (was.x_dtype != is.x_dtype) return differs("x's dtype", dtype_name(was.x_dtype), dtype_name(is.x_dtype));
  KT_RETURN_IF_ERROR(compare("ids.shape[1]", was.top_k, is.top_k));
  KT_RETURN_IF_ERROR(compare_slots(was, is));
  for (const RetainedChunk& chunk : retained.chunks) KT_RETURN_IF_ERROR(compare_routing(call, chunk.routing));
  return {};
}

}  // namespace kt
