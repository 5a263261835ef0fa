// Emmy's operators for torch, on torch's stable ABI: one library serves every torch from 2.11 on. A table of kernels, named by a
// number that graphs hold, chooses by the number of rows; sizes that it leaves to stock go to torch's own operator. Nothing here
// waits for a GPU, and only torch allocates, so that all of it may be captured into a graph. Knows no op text and no pack.
#include "launcher.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
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

static_assert(sizeof(std::atomic<int64_t>) == sizeof(int64_t));

namespace {

EmmyCalls calls{};

class Table {
 public:
  Table(std::string name, EmmyHandle *handle, const EmmyForm *forms, int32_t n_forms, int64_t *counts, const int64_t *alike,
        int32_t n_alike)
      : name_(std::move(name)), handle_(handle), forms_(forms, forms + n_forms), alike_(alike, alike + n_alike),
        counts_(reinterpret_cast<std::atomic<int64_t> *>(counts)) {}

  const std::string &name() const { return name_; }
  const std::vector<EmmyForm> &forms() const { return forms_; }
  // Whether there is a size to choose by.
  bool is_open() const {
    return std::any_of(forms_.begin(), forms_.end(), [](const EmmyForm &f) { return f.is_open; });
  }

  // Number of the range that serves this size, -1: stock does.
  int32_t choose(int64_t size) const { return handle_ && size > 0 ? calls.choose(handle_, &size) : -1; }

  // Whether a row's answer must not depend on how many rows are with it: then kernels that add alike serve every number of rows.
  bool is_invariant() const { return !alike_.empty(); }
  // Of so many rows how many a kernel takes at once, and the rows that it must be given for that, which may be more.
  std::pair<int64_t, int64_t> fit(int64_t rows) const {
    for (std::size_t i = 0; i < alike_.size(); i += 2)
      if (rows <= alike_[i + 1]) return {rows, std::max(rows, alike_[i])};
    return {alike_.back(), alike_.back()};
  }

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

  void count(int32_t range) { counts_[range + 1].fetch_add(1, std::memory_order_relaxed); }
  EmmyHandle *handle() const { return handle_; }

 private:
  const std::string name_;
  EmmyHandle *const handle_;
  const std::vector<EmmyForm> forms_;
  const std::vector<int64_t> alike_;  // lo, hi of ranges whose kernels add each sum in one and the same order
  std::atomic<int64_t> *const counts_;  // calls left to stock, then those of each range
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
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The same by kernels that add alike, whatever the number of rows: many are cut, few are padded. Stock has no part in it.
Tensor invariant_linear(Table &t, const Tensor &x, const Tensor &w) {
  const int64_t n = w.size(0), k = w.size(1);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  Tensor flat = torch::stable::contiguous(torch::stable::reshape(x, {-1, k}));
  const int64_t rows = flat.size(0);
  Tensor y = torch::stable::new_empty(x, {rows, n});
  for (int64_t at = 0; at < rows;) {
    const auto [taken, given] = t.fit(rows - at);
    Tensor part = torch::stable::narrow(flat, 0, at, taken), to = torch::stable::narrow(y, 0, at, taken);
    const bool is_plain = given == taken && t.takes(part, 0, given) && t.takes(to, 2, given);
    Tensor in = part, out = to;
    if (!is_plain) {
      in = torch::stable::new_zeros(x, {given, k});
      out = torch::stable::new_empty(x, {given, n});
      Tensor first = torch::stable::narrow(in, 0, 0, taken);
      torch::stable::copy_(first, part);
    }
    const int32_t range = t.choose(given);
    if (range < 0 || !t.takes(in, 0, given) || !t.takes(w, 1, given))
      throw std::runtime_error("emmy: " + t.name() + ": the deterministic lane has no kernel for this weight or input");
    void *const arguments[] = {in.data_ptr(), w.data_ptr(), out.data_ptr()};
    t.run(x, arguments, &given, range);
    if (!is_plain) torch::stable::copy_(to, torch::stable::narrow(out, 0, 0, taken));
    at += taken;
  }
  shape.back() = n;
  return torch::stable::reshape(y, shape);
}

// y[..., n] = x[..., k] @ w[n, k]^T. The table's arguments are x, w, y.
Tensor linear(const Tensor &x, const Tensor &w, int64_t number) {
  Table &t = table_of(number);
  if (t.is_invariant()) return invariant_linear(t, x, w);
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

std::vector<Tensor> stock_fused(const std::vector<Tensor> &inputs, int64_t number) {
  std::array<StableIValue, 2> stack{torch::stable::detail::from(inputs), torch::stable::detail::from(number)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("emmy::made_by_torch", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<std::vector<Tensor>>(stack[0]);
}

// The outputs of a table, new, of its inputs in its order. Sizes that it leaves to stock, and inputs of another form than a kernel
// trusts, are torch's: graphs are made so that this is not what they do all the time.
std::vector<Tensor> fused(std::vector<Tensor> inputs, int64_t number) {
  Table &t = table_of(number);
  int64_t rows = 0;
  std::size_t given = 0;
  for (const EmmyForm &f : t.forms()) {
    if (f.is_output) continue;
    if (f.is_open && !rows && given < inputs.size()) rows = inputs[given].numel() / f.elements;
    ++given;
  }
  const int32_t range = given == inputs.size() ? t.choose(rows) : -1;
  bool fits = range >= 0;
  given = 0;
  for (std::size_t i = 0; fits && i < t.forms().size(); ++i)
    if (!t.forms()[i].is_output) fits = t.takes(inputs[given++], static_cast<int32_t>(i), rows);
  if (!fits) {
    t.count(-1);
    return stock_fused(inputs, number);
  }
  std::vector<Tensor> made;
  std::vector<void *> addresses;
  given = 0;
  for (const EmmyForm &f : t.forms()) {
    if (f.is_output)
      made.push_back(torch::stable::new_empty(inputs[0], {f.is_open ? rows : 1, f.elements},
                                              static_cast<torch::headeronly::ScalarType>(f.dtype)));
    addresses.push_back(f.is_output ? made.back().data_ptr() : inputs[given++].data_ptr());
  }
  t.run(inputs[0], addresses.data(), &rows, range);
  return made;
}

// Runs a table on its arguments, outputs too, in its order. Refuses sizes that it leaves to stock: the caller has asked.
void launch(std::vector<Tensor> arguments, std::vector<int64_t> sizes, int64_t number) {
  Table &t = table_of(number);
  if (sizes.size() != t.is_open())
    throw std::runtime_error("emmy: " + t.name() + " takes " + (t.is_open() ? "one size" : "no size") + ", not " +
                             std::to_string(sizes.size()));
  const int32_t range = t.is_open() ? t.choose(sizes[0]) : t.handle() ? 0 : -1;
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

// A table under its number, in the place of an older one. handle NULL: stock serves all of it. counts: calls left to stock, then
// those of each range, which other processes may read. alike: lo, hi of ranges, n_alike numbers, that alone are used, each answer
// being the same by all of them. Forms and alike are copied; counts and handle must stay.
void emmy_ops_add(int64_t number, const char *name, EmmyHandle *handle, const EmmyForm *forms, int32_t n_forms, int64_t *counts,
                  const int64_t *alike, int32_t n_alike) {
  std::lock_guard<std::mutex> alone(adding);
  auto more = std::make_unique<Tables>(*tables.load());
  (*more)[number] = new Table(name, handle, forms, n_forms, counts, alike, n_alike);
  tables.store(more.release(), std::memory_order_release);
}
}

STABLE_TORCH_LIBRARY_IMPL(emmy, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("launch", TORCH_BOX(&launch));
  m.impl("fused", TORCH_BOX(&fused));
}
STABLE_TORCH_LIBRARY_IMPL(emmy, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("launch", TORCH_BOX(&launch));
  m.impl("fused", TORCH_BOX(&fused));
}
