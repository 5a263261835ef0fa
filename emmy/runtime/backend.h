/* What the launcher asks of a kind of device. One backend is one opened plan. */
#ifndef EMMY_BACKEND_H
#define EMMY_BACKEND_H
#include "launcher.h"

#include <memory>
#include <string>

class Backend {
 public:
  virtual ~Backend() = default;
  virtual int32_t open(const char *path) = 0;
  virtual EmmyInfo info() const = 0;
  virtual int64_t argument_bytes(const int64_t *syms, int32_t argument) const = 0;
  // Which plan these sizes are served by, -1 for none; one plan is number 0.
  virtual int32_t choose(const int64_t *) const { return 0; }
  virtual int32_t run(void *const *arguments, const int64_t *syms, int32_t threads, void *stream) = 0;
};

// Keeps `text` as what emmy_message says about `code` in this thread.
int32_t emmy_fail(int32_t code, const std::string &text);

Backend *emmy_new_cuda();

// The plans, which it takes, as one that serves each by its range.
int32_t emmy_new_table(const char *symbol, int32_t n, std::unique_ptr<Backend> *plans, const int64_t *lo, const int64_t *hi,
                       std::unique_ptr<Backend> &out);

#endif
