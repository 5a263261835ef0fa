// The launcher's CPU backend, which loads a plan's library, owns workspaces and scratch and shares blocks among threads; and
// the C ABI over all backends. Knows no op, no schedule and no measurement.
#include "backend.h"
#include "plan.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define EMMY_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define EMMY_PAUSE() asm volatile("yield")
#else
#define EMMY_PAUSE() ((void)0)
#endif

namespace {

// Memory that only grows. Large blocks ask for huge pages: packed panels are walked at strides of many pages.
class Block {
 public:
  Block() = default;
  Block(Block &&other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Block(const Block &) = delete;
  ~Block() { std::free(data_); }

  bool reserve(int64_t bytes) {
    if (bytes <= size_) return true;
    const std::size_t page = bytes >= kHuge ? kHuge : 64;
    const std::size_t rounded = (static_cast<std::size_t>(bytes) + page - 1) / page * page;
    void *fresh = std::aligned_alloc(page, rounded);
    if (!fresh) return false;
#ifdef MADV_HUGEPAGE
    if (page == kHuge) madvise(fresh, rounded, MADV_HUGEPAGE);
#endif
    std::free(data_);
    data_ = fresh;
    size_ = static_cast<int64_t>(rounded);
    return true;
  }
  void *data() const { return data_; }

 private:
  static constexpr int64_t kHuge = 2 << 20;
  void *data_ = nullptr;
  int64_t size_ = 0;
};

struct Job {
  const EmmyLaunch *launch = nullptr;
  void *const *buffers = nullptr;
  const int64_t *syms = nullptr;
  int64_t blocks = 0;
  std::atomic<int64_t> next{0};

  void work(void *scratch) {
    const EmmyArgs args{buffers, syms, scratch};
    for (int64_t b; (b = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) launch->run(&args, b);
  }
};

// Threads that wait for jobs: they spin for some microseconds, because launches follow one another closely, then sleep.
class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      ticket_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread &t : threads_) t.join();
  }

  void grow(int extra, int64_t scratch_bytes) {
    while (static_cast<int>(threads_.size()) < extra) {
      scratch_.push_back(std::make_unique<Block>());
      Block *own = scratch_.back().get();
      const int rank = static_cast<int>(threads_.size());
      threads_.emplace_back([this, own, rank, seen = ticket_.load()] { loop(*own, rank, seen); });
    }
    for (auto &s : scratch_)
      if (!s->reserve(scratch_bytes)) throw std::bad_alloc();
  }

  void run(Job &job, int extra, void *own_scratch) {
    job_ = &job;
    active_ = extra;
    busy_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ticket_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job.work(own_scratch);
    while (busy_.load(std::memory_order_acquire)) spin_or_yield();
    spins_ = 0;
  }

 private:
  static constexpr int kSpins = 2000;

  void loop(const Block &scratch, int rank, uint64_t seen) {
    for (;;) {
      for (int i = 0; i < kSpins && ticket_.load(std::memory_order_acquire) == seen; ++i) EMMY_PAUSE();
      if (ticket_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return ticket_.load(std::memory_order_acquire) != seen; });
      }
      seen = ticket_.load(std::memory_order_acquire);
      if (stop_) return;
      if (rank < active_) job_->work(scratch.data());
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  void spin_or_yield() {
    if (++spins_ < kSpins) EMMY_PAUSE();
    else std::this_thread::yield();
  }

  std::vector<std::thread> threads_;
  std::vector<std::unique_ptr<Block>> scratch_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> busy_{0};
  Job *job_ = nullptr;
  int active_ = 0;
  int spins_ = 0;
  bool stop_ = false;
};

class Cpu final : public Backend {
 public:
  ~Cpu() override {
    if (library_) dlclose(library_);
  }

  int32_t open(const char *path) override {
    library_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library_) return EMMY_NO_FILE;
    plan = static_cast<const EmmyPlan *>(dlsym(library_, "emmy_plan"));
    return plan && plan->version == EMMY_PLAN_VERSION ? EMMY_OK : EMMY_NO_PLAN;
  }

  EmmyInfo info() const override {
    return EmmyInfo{plan->n_arguments, plan->n_syms, plan->n_launches, plan->arguments, plan->syms};
  }

  int64_t argument_bytes(const int64_t *syms, int32_t argument) const override { return plan->buffer_bytes(syms, argument); }

  int32_t run(void *const *arguments, const int64_t *syms, int32_t threads, void *) override {
    if (int32_t code = prepare(arguments, syms, threads)) return code;
    for (int32_t i = 0; i < plan->n_launches; ++i) {
      Job job;
      job.launch = &plan->launches[i];
      job.buffers = buffers_.data();
      job.syms = syms;
      job.blocks = job.launch->blocks(syms);
      if (threads > 1 && job.blocks > 1) pool_->run(job, threads - 1, scratch_.data());
      else job.work(scratch_.data());
    }
    return EMMY_OK;
  }

 private:
  int32_t prepare(void *const *arguments, const int64_t *syms, int32_t threads) {
    buffers_.assign(arguments, arguments + plan->n_arguments);
    workspaces_.resize(static_cast<std::size_t>(plan->n_buffers - plan->n_arguments));
    for (std::size_t i = 0; i < workspaces_.size(); ++i) {
      if (!workspaces_[i].reserve(plan->buffer_bytes(syms, plan->n_arguments + static_cast<int32_t>(i)))) return EMMY_NO_MEMORY;
      buffers_.push_back(workspaces_[i].data());
    }
    int64_t bytes = 0;
    for (int32_t i = 0; i < plan->n_launches; ++i) bytes = std::max(bytes, plan->launches[i].scratch_bytes(syms));
    if (!scratch_.reserve(bytes)) return EMMY_NO_MEMORY;
    if (threads > 1) {
      if (!pool_) pool_ = std::make_unique<Pool>();
      pool_->grow(threads - 1, bytes);
    }
    return EMMY_OK;
  }

  void *library_ = nullptr;
  const EmmyPlan *plan = nullptr;
  std::vector<void *> buffers_;
  std::vector<Block> workspaces_;
  Block scratch_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace

struct EmmyHandle {
  std::unique_ptr<Backend> backend;
};

static thread_local struct {
  int32_t code = EMMY_OK;
  std::string text;
} last_failure;

int32_t emmy_fail(int32_t code, const std::string &text) {
  last_failure.code = code;
  last_failure.text = text;
  return code;
}

// The plan at `path`, opened.
static int32_t open_plan(const char *device, const char *path, std::unique_ptr<Backend> &out) {
  if (std::string_view(device) == "cpu") out = std::make_unique<Cpu>();
  else if (std::string_view(device) == "cuda") out.reset(emmy_new_cuda());
  else return EMMY_NO_BACKEND;
  return out->open(path);
}

static void hand_over(std::unique_ptr<Backend> backend, EmmyHandle **out, EmmyInfo *info) {
  *info = backend->info();
  *out = new EmmyHandle{std::move(backend)};
}

int32_t emmy_open(const char *device, const char *path, EmmyHandle **out, EmmyInfo *info) {
  last_failure.code = EMMY_OK;
  try {
    std::unique_ptr<Backend> backend;
    if (int32_t code = open_plan(device, path, backend)) return code;
    hand_over(std::move(backend), out, info);
    return EMMY_OK;
  } catch (const std::bad_alloc &) {
    return EMMY_NO_MEMORY;
  }
}

int32_t emmy_open_table(const char *device, const char *symbol, int32_t n, const char *const *paths, const int64_t *lo,
                        const int64_t *hi, EmmyHandle **out, EmmyInfo *info) {
  last_failure.code = EMMY_OK;
  try {
    std::vector<std::unique_ptr<Backend>> plans(static_cast<std::size_t>(std::max(n, 0)));
    for (std::size_t i = 0; i < plans.size(); ++i)
      if (paths[i])
        if (int32_t code = open_plan(device, paths[i], plans[i])) return code;
    std::unique_ptr<Backend> table;
    if (int32_t code = emmy_new_table(symbol, n, plans.data(), lo, hi, table)) return code;
    hand_over(std::move(table), out, info);
    return EMMY_OK;
  } catch (const std::bad_alloc &) {
    return EMMY_NO_MEMORY;
  }
}

int32_t emmy_choose(const EmmyHandle *plan, const int64_t *syms) { return plan->backend->choose(syms); }

double emmy_choice_ns(const EmmyHandle *plan, const int64_t *sizes, int32_t n, int32_t rounds) {
  const Backend &backend = *plan->backend;
  volatile int32_t chosen = 0;
  const auto begin = std::chrono::steady_clock::now();
  for (int32_t r = 0; r < rounds; ++r)
    for (int32_t i = 0; i < n; ++i) chosen = backend.choose(&sizes[i]);
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
  static_cast<void>(chosen);
  return spent.count() / (static_cast<double>(rounds) * n);
}

int64_t emmy_argument_bytes(const EmmyHandle *plan, const int64_t *syms, int32_t argument) {
  return plan->backend->argument_bytes(syms, argument);
}

int32_t emmy_run(EmmyHandle *plan, void *const *arguments, const int64_t *syms, int32_t threads, void *stream) {
  try {
    return plan->backend->run(arguments, syms, threads, stream);
  } catch (const std::bad_alloc &) {
    return EMMY_NO_MEMORY;
  } catch (const std::system_error &) {
    return EMMY_NO_THREAD;
  }
}

void emmy_close(EmmyHandle *plan) { delete plan; }

const char *emmy_message(int32_t code) {
  if (code != EMMY_OK && code == last_failure.code) return last_failure.text.c_str();
  switch (code) {
    case EMMY_OK: return "no error";
    case EMMY_NO_BACKEND: return "the launcher has no backend of this name; it has: cpu, cuda";
    case EMMY_NO_FILE: return "the plan cannot be loaded: it is missing, or built for another machine";
    case EMMY_NO_PLAN: return "the library exports no plan of this version; build it again with this Emmy";
    case EMMY_NO_MEMORY: return "out of memory for workspaces or scratch";
    case EMMY_BAD_SIZE: return "a size is outside the range that the plan serves";
    case EMMY_BAD_TABLE: return "the ranges are no table";
    case EMMY_NO_THREAD: return "the system starts no more threads";
  }
  return "unknown error code";
}
