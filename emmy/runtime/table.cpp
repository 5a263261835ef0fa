// Plans by ranges of one symbol, behind the same calls as one plan: each run first chooses the plan whose range holds the size,
// by binary search. Knows no backend but through its seam.
#include "backend.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

class Table final : public Backend {
 public:
  explicit Table(const char *symbol) : symbol_(symbol), symbols_{symbol_.c_str()} {}

  int32_t open(const char *) override { return EMMY_NO_FILE; }  // made of opened plans: see add

  // The plan that serves lo..hi, null: the caller does. Ranges come in order, each beginning where the one before ends.
  int32_t add(std::unique_ptr<Backend> plan, int64_t lo, int64_t hi) {
    if (lo > hi || (!plans_.empty() && lo != hi_ + 1))
      return emmy_fail(EMMY_BAD_TABLE, "range " + text(lo, hi) + " does not begin where the one before ends");
    if (plan) {
      const EmmyInfo i = plan->info();
      if (i.n_syms > 1 || (i.n_syms == 1 && symbol_ != i.syms[0]))
        return emmy_fail(EMMY_BAD_TABLE, "the plan of " + text(lo, hi) + " is asked for other sizes");
      if (first_ && !takes_the_same(i))
        return emmy_fail(EMMY_BAD_TABLE, "the plan of " + text(lo, hi) + " takes other arguments than the first one");
      if (!first_) first_ = plan.get();
    }
    begins_.push_back(lo);
    hi_ = hi;
    plans_.push_back(std::move(plan));
    return EMMY_OK;
  }

  EmmyInfo info() const override {
    EmmyInfo out = first_->info();
    for (const auto &p : plans_)
      if (p) out.n_launches = std::max(out.n_launches, p->info().n_launches);
    out.n_syms = 1;
    out.syms = symbols_;
    return out;
  }

  int32_t choose(const int64_t *syms) const override {
    const int64_t size = syms[0];
    if (size < begins_.front() || size > hi_) return -1;
    const auto at = static_cast<int32_t>(std::upper_bound(begins_.begin(), begins_.end(), size) - begins_.begin()) - 1;
    return plans_[at] ? at : -1;
  }

  bool is_empty() const { return !first_; }

  int64_t argument_bytes(const int64_t *syms, int32_t argument) const override {
    const int32_t at = choose(syms);
    return at < 0 ? -1 : plans_[at]->argument_bytes(syms, argument);
  }

  int32_t run(void *const *arguments, const int64_t *syms, int32_t threads, void *stream) override {
    const int32_t at = choose(syms);
    if (at < 0) {
      const bool inside = syms[0] >= begins_.front() && syms[0] <= hi_;
      return emmy_fail(EMMY_BAD_SIZE, symbol_ + " is " + std::to_string(syms[0]) + (inside ? ", which this table leaves to its caller"
                                                     : ", this table serves " + std::to_string(begins_.front()) + ".." + std::to_string(hi_)));
    }
    return plans_[at]->run(arguments, syms, threads, stream);
  }

 private:
  std::string text(int64_t lo, int64_t hi) const {
    return symbol_ + " " + std::to_string(lo) + ".." + std::to_string(hi);
  }

  bool takes_the_same(const EmmyInfo &i) const {
    const EmmyInfo first = first_->info();
    if (i.n_arguments != first.n_arguments) return false;
    for (int32_t a = 0; a < i.n_arguments; ++a)
      if (std::strcmp(i.arguments[a], first.arguments[a])) return false;
    return true;
  }

  const std::string symbol_;
  const char *const symbols_[1];
  std::vector<int64_t> begins_;
  int64_t hi_ = 0;
  std::vector<std::unique_ptr<Backend>> plans_;
  const Backend *first_ = nullptr;  // of the plans that are not null
};

}  // namespace

int32_t emmy_new_table(const char *symbol, int32_t n, std::unique_ptr<Backend> *plans, const int64_t *lo, const int64_t *hi,
                       std::unique_ptr<Backend> &out) {
  auto table = std::make_unique<Table>(symbol);
  for (int32_t i = 0; i < n; ++i)
    if (int32_t code = table->add(std::move(plans[i]), lo[i], hi[i])) return code;
  if (table->is_empty()) return emmy_fail(EMMY_BAD_TABLE, "a table without a range");
  out = std::move(table);
  return EMMY_OK;
}
