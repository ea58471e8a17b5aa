#include "bind/ranks.h"

#include <pybind11/stl.h>
#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "bind/binders.h"
#include "bind/dlpack.h"
#include "bind/layer.h"
#include "ranks/shared_exchange.h"
#include "ranks/socket_exchange.h"

namespace py = pybind11;

namespace kt {
namespace {

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
  static NativeExchange connected(int rank, const std::vector<int>& sockets, const std::vector<std::string>& names) {
    if (sockets.size() != names.size() || rank < 0 || rank >= static_cast<int>(sockets.size()))
      throw BindError{"invalid_value", "rank is " + std::to_string(rank) + "; there are " +
                                           std::to_string(sockets.size()) + " sockets and " +
                                           std::to_string(names.size()) + " names"};
    return NativeExchange(std::make_shared<SocketExchange>(rank, sockets, names));
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
      .def_static("connected", &NativeExchange::connected)
      .def_static("file_bytes", &SharedExchange::file_bytes)
      .def("gather_columns", &NativeExchange::gather_columns)
      .def("gather_rows", &NativeExchange::gather_rows)
      .def("give_up", &NativeExchange::give_up)
      .def_property_readonly("waited_seconds", &NativeExchange::waited_seconds)
      .def_property_readonly("sent_bytes", &NativeExchange::sent_bytes);
}

}  // namespace kt
