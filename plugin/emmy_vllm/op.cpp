// Emmy's operators for torch, on torch's stable ABI: one library serves every torch from 2.11 on. A table of kernels, named by a
// number that graphs hold, chooses by the number of rows; sizes that it leaves to stock go to torch's own operator. Nothing here
// waits for a GPU, and only torch allocates, so that all of it may be captured into a graph. Knows no op text and no pack.
#include "launcher.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

using torch::stable::Tensor;

extern "C" {
// The launcher's calls, and torch's for the current stream (null where torch has no CUDA).
typedef struct {
  int32_t (*choose)(const EmmyHandle *, const int64_t *);
  int64_t (*argument_bytes)(const EmmyHandle *, const int64_t *, int32_t);
  int32_t (*run)(EmmyHandle *, void *const *, const int64_t *, int32_t, void *);
  const char *(*message)(int32_t);
  int32_t (*current_stream)(int32_t, void **);
} EmmyCalls;

// An argument of a table: elements that do not depend on the open size, and whether that multiplies them.
typedef struct {
  int32_t dtype, is_open, is_output;
  int64_t elements;
} EmmyForm;
}

namespace {

EmmyCalls calls{};

class Table {
 public:
  Table(std::string name, EmmyHandle *handle, int32_t n_ranges, const EmmyForm *forms, int32_t n_forms)
      : name_(std::move(name)), handle_(handle), forms_(forms, forms + n_forms),
        served_(new std::atomic<int64_t>[n_ranges + 1]()), n_ranges_(n_ranges) {}

  const std::string &name() const { return name_; }
  const std::vector<EmmyForm> &forms() const { return forms_; }

  // Number of the range that serves this size, -1: stock does.
  int32_t choose(int64_t size) const { return handle_ && size > 0 ? calls.choose(handle_, &size) : -1; }

  // Whether the tensor is the argument's memory as a kernel trusts it, at this size.
  bool takes(const Tensor &x, int32_t argument, int64_t size) const {
    const EmmyForm &f = forms_[argument];
    return is_plain(x, f.dtype) && x.numel() == f.elements * (f.is_open ? size : 1);
  }
  static bool is_plain(const Tensor &x, int32_t dtype) {
    return static_cast<int32_t>(x.scalar_type()) == dtype && x.is_contiguous() &&
           reinterpret_cast<uintptr_t>(x.data_ptr()) % (x.is_cuda() ? 16 : 4) == 0;
  }

  void run(const Tensor &on, void *const *arguments, const int64_t *sizes, int32_t range) {
    void *stream = nullptr;
    int32_t threads = 1;
    if (on.is_cuda()) {
      if (!calls.current_stream || calls.current_stream(on.get_device_index(), &stream))
        throw std::runtime_error(name_ + ": torch does not say which CUDA stream is current");
    } else {
      threads = static_cast<int32_t>(torch::stable::get_num_threads());
    }
    std::lock_guard<std::mutex> alone(mutex_);  // a handle is used by one thread at a time
    if (int32_t code = calls.run(handle_, arguments, sizes, threads, stream))
      throw std::runtime_error("emmy: " + name_ + ": " + calls.message(code) +
                               ". Start again with EMMY_DISABLE=1 to serve without Emmy, and report this.");
    count(range);
  }

  void count(int32_t range) const { served_[range + 1].fetch_add(1, std::memory_order_relaxed); }
  // Calls left to stock, then calls of each range.
  void counts(int64_t *out) const {
    for (int32_t i = 0; i <= n_ranges_; ++i) out[i] = served_[i].load(std::memory_order_relaxed);
  }
  EmmyHandle *handle() const { return handle_; }

 private:
  const std::string name_;
  EmmyHandle *const handle_;
  const std::vector<EmmyForm> forms_;
  const std::unique_ptr<std::atomic<int64_t>[]> served_;
  const int32_t n_ranges_;
  std::mutex mutex_;
};

// Tables by number. A reader takes no lock: adding makes a new map, and the old ones stay, as do their tables.
using Tables = std::unordered_map<int64_t, Table *>;
std::atomic<const Tables *> tables{new Tables};
std::mutex adding;

Table &table_of(int64_t number) {
  const Tables &all = *tables.load(std::memory_order_acquire);
  const auto at = all.find(number);
  if (at == all.end())
    throw std::runtime_error("emmy: no table " + std::to_string(number) +
                             " is loaded in this process: this graph was compiled for another pack, or the plugin is off");
  return *at->second;
}

Tensor stock_linear(const Tensor &x, const Tensor &w) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(w),
                                    torch::stable::detail::from(std::optional<Tensor>())};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// y[..., n] = x[..., k] @ w[n, k]^T. The table's arguments are x, w, y.
Tensor linear(const Tensor &x, const Tensor &w, int64_t number) {
  Table &t = table_of(number);
  const int64_t n = w.size(0), k = w.size(1), rows = k ? x.numel() / k : 0;
  const int32_t range = t.choose(rows);
  if (range < 0 || !t.takes(x, 0, rows) || !t.takes(w, 1, rows) || x.size(x.dim() - 1) != k) {
    t.count(-1);
    return stock_linear(x, w);
  }
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = n;
  Tensor y = torch::stable::new_empty(x, shape);
  void *const arguments[] = {x.data_ptr(), w.data_ptr(), y.data_ptr()};
  t.run(x, arguments, &rows, range);
  return y;
}

// Runs a table on its arguments, outputs too, in its order. Refuses sizes that it leaves to stock: the caller has asked.
void launch(std::vector<Tensor> arguments, std::vector<int64_t> sizes, int64_t number) {
  Table &t = table_of(number);
  const int32_t range = sizes.empty() ? (t.handle() ? 0 : -1) : t.choose(sizes[0]);
  if (range < 0) throw std::runtime_error("emmy: " + t.name() + " leaves this size to its caller");
  if (arguments.size() != t.forms().size())
    throw std::runtime_error("emmy: " + t.name() + " takes " + std::to_string(t.forms().size()) + " arguments, not " +
                             std::to_string(arguments.size()));
  std::vector<void *> addresses;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const Tensor &x = arguments[i];
    const int64_t needed = calls.argument_bytes(t.handle(), sizes.data(), static_cast<int32_t>(i));
    if (!Table::is_plain(x, t.forms()[i].dtype) || x.numel() * static_cast<int64_t>(x.element_size()) < needed)
      throw std::runtime_error("emmy: " + t.name() + ": argument " + std::to_string(i) +
                               " is of another dtype, not contiguous, not aligned, or smaller than " + std::to_string(needed) + " bytes");
    addresses.push_back(x.data_ptr());
  }
  t.run(arguments[0], addresses.data(), sizes.data(), range);
}

}  // namespace

extern "C" {
void emmy_ops_connect(const EmmyCalls *given) { calls = *given; }

// A table under its number, in the place of an older one. handle NULL: stock serves all of it.
void emmy_ops_add(int64_t number, const char *name, EmmyHandle *handle, int32_t n_ranges, const EmmyForm *forms, int32_t n_forms) {
  std::lock_guard<std::mutex> alone(adding);
  auto more = std::make_unique<Tables>(*tables.load());
  (*more)[number] = new Table(name, handle, n_ranges, forms, n_forms);
  tables.store(more.release(), std::memory_order_release);
}

// Calls left to stock, then calls of each range: n_ranges + 1 numbers. 0 where there is no such table.
int32_t emmy_ops_counts(int64_t number, int64_t *out) {
  const Tables &all = *tables.load(std::memory_order_acquire);
  const auto at = all.find(number);
  if (at == all.end()) return 0;
  at->second->counts(out);
  return 1;
}
}

STABLE_TORCH_LIBRARY_IMPL(emmy, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("launch", TORCH_BOX(&launch));
}
STABLE_TORCH_LIBRARY_IMPL(emmy, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("launch", TORCH_BOX(&launch));
}
