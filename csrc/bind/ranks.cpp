#include "bind/ranks.h"

#include <pybind11/stl.h>
#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "bind/binders.h"
#include "bind/dlpack.h"
#include "bind/layer.h"
#include "ranks/shared_exchange.h"

namespace py = pybind11;

namespace kt {
namespace {

// Rows of `bytes` each.
void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t rows, int64_t bytes) {
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(to + row * to_stride, from + row * from_stride, static_cast<size_t>(bytes));
}

// Through Python functions that move bytes, such as those of torch.distributed. They get memoryviews.
class CalledExchange final : public Exchange {
 public:
  // all_gather(received, sent): the same number of bytes of each rank, in the ranks' order.
  // all_to_all(received, sent, received_bytes, sent_bytes): a part for each rank, one of each; lists have their bytes.
  CalledExchange(int rank, int num_ranks, py::function all_gather, py::function all_to_all)
      : Exchange(rank, num_ranks), all_gather_(std::move(all_gather)), all_to_all_(std::move(all_to_all)) {}

  bool is_near() const override { return false; }

  Status gather_columns(const TensorView& matrix) override {
    const int64_t element = dtype_bytes(matrix.dtype), stride = matrix.strides[0] * element;
    const int64_t rows = matrix.shape[0], bytes = matrix.shape[1] / num_ranks() * element;
    if (rows * bytes == 0) return failure_;
    note_sent(rows, bytes);
    char* const data = matrix.as<char>();
    char* const sent = sent_.reserve<char>(rows * bytes);
    char* const received = received_.reserve<char>(num_ranks() * rows * bytes);
    copy_rows(data + rank() * bytes, stride, sent, bytes, rows, bytes);
    KT_RETURN_IF_ERROR(
        call([&] { all_gather_(memory(received, num_ranks() * rows * bytes), memory(sent, rows * bytes)); }));
    for (int other = 0; other < num_ranks(); ++other)
      copy_rows(received + other * rows * bytes, bytes, data + other * bytes, stride, rows, bytes);
    return {};
  }

  Status gather_rows(const TensorView& own, const std::vector<int64_t>& counts, const TensorView& out) override {
    const int64_t element = dtype_bytes(own.dtype), taken = out.shape[1] * element;
    const bool takes_all = out.shape[1] == own.shape[1];
    std::vector<int64_t> received_bytes, sent_bytes(counts.size(), own.shape[0] * taken);
    int64_t rows = 0;
    for (const int64_t count : counts) {
      received_bytes.push_back(count * taken);
      rows += count;
    }
    if (rows * taken == 0) return failure_;
    note_sent(own.shape[0], taken);
    char* const sent = sent_.reserve<char>(std::max<int64_t>(num_ranks() * own.shape[0] * taken, 1));
    char* const received = received_.reserve<char>(rows * taken);
    for (int other = 0; other < num_ranks(); ++other)
      copy_rows(own.as<char>() + (takes_all ? 0 : other * taken), own.strides[0] * element,
                sent + other * own.shape[0] * taken, taken, own.shape[0], taken);
    KT_RETURN_IF_ERROR(call([&] {
      all_to_all_(memory(received, rows * taken), memory(sent, num_ranks() * own.shape[0] * taken), received_bytes,
                  sent_bytes);
    }));
    copy_rows(received, taken, out.as<char>(), out.strides[0] * element, rows, taken);
    return {};
  }

 private:
  static py::memoryview memory(char* data, int64_t bytes) {
    return py::memoryview::from_memory(static_cast<void*>(data), bytes);
  }

  template <class Body>
  Status call(Body&& body) {
    KT_RETURN_IF_ERROR(failure_);
    const py::gil_scoped_acquire acquire;
    const auto began = std::chrono::steady_clock::now();
    try {
      body();
      note_wait(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    } catch (const py::error_already_set& error) {
      failure_ = {StatusCode::kLostRank, std::string("the connection of the ranks has failed: ") + error.what()};
    }
    return failure_;
  }

  const py::function all_gather_, all_to_all_;
  AlignedBuffer sent_, received_;
  Status failure_;
};

class NativeExchange {
 public:
  explicit NativeExchange(std::shared_ptr<Exchange> exchange) : exchange_(std::move(exchange)) {}

  static NativeExchange shared(int descriptor, const std::vector<pid_t>& processes, int rank, double patience_seconds) {
    if (rank < 0 || rank >= static_cast<int>(processes.size()))
      throw BindError{"invalid_value", "rank is " + std::to_string(rank) + "; there are " +
                                           std::to_string(processes.size()) + " processes"};
    std::shared_ptr<Exchange> opened;
    check(SharedExchange::open(descriptor, processes, rank, patience_seconds, &opened));
    return NativeExchange(std::move(opened));
  }
  static NativeExchange called(int rank, int num_ranks, py::function all_gather, py::function all_to_all) {
    return NativeExchange(
        std::make_shared<CalledExchange>(rank, num_ranks, std::move(all_gather), std::move(all_to_all)));
  }

  void gather_columns(py::handle matrix) const {
    const TensorView view = view_of(matrix, {.name = "matrix", .dtypes = kTypes, .shape = {-1, -1}, .written = true});
    if (view.shape[1] % exchange_->num_ranks() != 0) fail("matrix", view);
    run([&] { return exchange_->gather_columns(view); });
  }

  void gather_rows(py::handle own, const std::vector<int64_t>& counts, py::handle out) const {
    const TensorView from = view_of(own, {.name = "own", .dtypes = kTypes, .shape = {-1, -1}});
    int64_t rows = 0;
    for (const int64_t count : counts) rows += count;
    const TensorView to = view_of(out, {.name = "out", .dtypes = {from.dtype}, .shape = {rows, -1}, .written = true});
    const int64_t ranks = exchange_->num_ranks();
    if (static_cast<int64_t>(counts.size()) != ranks) {
      throw BindError{"invalid_value", "counts has " + std::to_string(counts.size()) + " numbers; there are " +
                                           std::to_string(ranks) + " ranks"};
    }
    if (from.shape[0] != counts[static_cast<size_t>(exchange_->rank())]) fail("own", from);
    if (to.shape[1] != from.shape[1] && to.shape[1] * ranks != from.shape[1]) fail("out", to);
    check_disjoint({{"out", to}}, {{"own", from}});
    run([&] { return exchange_->gather_rows(from, counts, to); });
  }

  void give_up() const { exchange_->give_up(); }
  bool is_near() const { return exchange_->is_near(); }
  double waited_seconds() const { return exchange_->waited_seconds(); }
  int64_t sent_bytes() const { return exchange_->sent_bytes(); }
  const std::shared_ptr<Exchange>& get() const { return exchange_; }

 private:
  static inline const std::vector<DType> kTypes{DType::kF32, DType::kBf16, DType::kI32, DType::kI64};

  [[noreturn]] void fail(const std::string& name, const TensorView& view) const {
    throw BindError{"invalid_value", name + " has shape " + shape_text(view) + ", which does not fit " +
                                         std::to_string(exchange_->num_ranks()) + " ranks"};
  }

  template <class Body>
  static void run(Body&& body) {
    Status status;
    {
      const py::gil_scoped_release release;
      status = body();
    }
    check(status);
  }

  std::shared_ptr<Exchange> exchange_;
};

}  // namespace

std::shared_ptr<Exchange> exchange_of(const py::handle& object) {
  return object.is_none() ? nullptr : object.cast<const NativeExchange&>().get();
}

void bind_ranks(py::module_& module) {
  py::class_<NativeExchange>(module, "Exchange")
      .def_static("shared", &NativeExchange::shared)
      .def_static("called", &NativeExchange::called)
      .def_static("file_bytes", &SharedExchange::file_bytes)
      .def("gather_columns", &NativeExchange::gather_columns)
      .def("gather_rows", &NativeExchange::gather_rows)
      .def("give_up", &NativeExchange::give_up)
      .def_property_readonly("is_near", &NativeExchange::is_near)
      .def_property_readonly("waited_seconds", &NativeExchange::waited_seconds)
      .def_property_readonly("sent_bytes", &NativeExchange::sent_bytes);
}

}  // namespace kt
