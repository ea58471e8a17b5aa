#include "weights/loader.h"

#include <mutex>

#include "threads/pool.h"

namespace kt {
namespace {

// Where one matrix lies in the checkpoint.
struct Source {
  std::string name;
  Checkpoint::Tensor tensor{};
  int64_t first_byte = 0;
};

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

Status check_tensor(const Checkpoint::Tensor& tensor, const std::string& name, const std::vector<int64_t>& wanted) {
  const std::string where = tensor.file->path() + ": tensor '" + name + "'";
  if (tensor.entry->dtype != "BF16")
    return bad_checkpoint(where + " has dtype " + tensor.entry->dtype + ", expected BF16");
  if (tensor.entry->shape != wanted) {
    return bad_checkpoint(where + " has shape " + shape_text(tensor.entry->shape) + ", expected " + shape_text(wanted));
  }
  return {};
}

class LayerReader {
 public:
  LayerReader(const Checkpoint& checkpoint, const std::string& prefix, ExpertShape shape)
      : checkpoint_(checkpoint), prefix_(prefix), shape_(shape) {
    fused_ = checkpoint.contains(prefix + ".gate_up_proj");
  }

  // Names, types and shapes of everything, before a byte of it is read.
  Status locate(std::vector<Source>* sources) const {
    for (int64_t expert = 0; expert < shape_.num_experts; ++expert) {
      for (int part = 0; part < 3; ++part) {
        Source source;
        KT_RETURN_IF_ERROR(fused_ ? locate_fused(expert, part, &source) : locate_single(expert, part, &source));
        sources->push_back(std::move(source));
      }
    }
    return {};
  }

 private:
  Status locate_single(int64_t expert, int part, Source* source) const {
    static const char* const kParts[] = {"gate_proj", "up_proj", "down_proj"};
    source->name = prefix_ + "." + std::to_string(expert) + "." + kParts[part] + ".weight";
    KT_RETURN_IF_ERROR(checkpoint_.find(source->name, &source->tensor));
    const int64_t hidden = shape_.hidden, inner = shape_.intermediate;
    return check_tensor(source->tensor, source->name,
                        part < 2 ? std::vector<int64_t>{inner, hidden} : std::vector<int64_t>{hidden, inner});
  }

  Status locate_fused(int64_t expert, int part, Source* source) const {
    const int64_t experts = shape_.num_experts, hidden = shape_.hidden, inner = shape_.intermediate;
    source->name = prefix_ + (part < 2 ? ".gate_up_proj" : ".down_proj");
    KT_RETURN_IF_ERROR(checkpoint_.find(source->name, &source->tensor));
    const int64_t matrix_bytes = hidden * inner * 2;
    source->first_byte = part < 2 ? (2 * expert + part) * matrix_bytes : expert * matrix_bytes;
    return check_tensor(
        source->tensor, source->name,
        part < 2 ? std::vector<int64_t>{experts, 2 * inner, hidden} : std::vector<int64_t>{experts, hidden, inner});
  }

  const Checkpoint& checkpoint_;
  const std::string& prefix_;
  const ExpertShape shape_;
  bool fused_;
};

Status read_matrix(const Source& source, PackedShape shape, uint16_t* packed) {
  AlignedBuffer plain(static_cast<size_t>(shape.rows * shape.cols) * 2);
  auto* rows = static_cast<uint16_t*>(plain.data());
  const int64_t bytes = shape.rows * shape.cols * 2;
  KT_RETURN_IF_ERROR(source.tensor.file->read(*source.tensor.entry, source.first_byte, bytes, rows));
  const int64_t bad = pack_bf16(rows, shape.cols, shape, packed);
  if (bad < 0) return {};
  return {StatusCode::kBadCheckpoint, source.tensor.file->path() + ": tensor '" + source.name +
                                          "' holds NaN or Inf at element " +
                                          std::to_string(source.first_byte / 2 + bad)};
}

}  // namespace

Status load_layer(const Checkpoint& checkpoint, const std::string& prefix, ExpertShape shape, int num_threads,
                  std::shared_ptr<ExpertLayer>* layer) {
  std::vector<Source> sources;
  KT_RETURN_IF_ERROR(LayerReader(checkpoint, prefix, shape).locate(&sources));
  auto loaded = std::make_shared<ExpertLayer>(shape);
  std::mutex mutex;
  Status first_error;
  ThreadPool::instance().run(static_cast<int64_t>(sources.size()), num_threads, [&](int64_t task) {
    const int64_t expert = task / 3, part = task % 3;
    uint16_t* packed = part == 0   ? loaded->gate_data(expert)
                       : part == 1 ? loaded->up_data(expert)
                                   : loaded->down_data(expert);
    const Status status =
        read_matrix(sources[static_cast<size_t>(task)], part < 2 ? loaded->in_shape() : loaded->out_shape(), packed);
    if (status.ok()) return;
    std::lock_guard lock(mutex);
    if (first_error.ok()) first_error = status;
  });
  KT_RETURN_IF_ERROR(first_error);
  *layer = std::move(loaded);
  return {};
}

}  // namespace kt
