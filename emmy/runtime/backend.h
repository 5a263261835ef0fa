/* What the launcher asks of a kind of device. One backend is one opened plan. */
#ifndef EMMY_BACKEND_H
#define EMMY_BACKEND_H
#include "launcher.h"

#include <string>

class Backend {
 public:
  virtual ~Backend() = default;
  virtual int32_t open(const char *path) = 0;
  virtual EmmyInfo info() const = 0;
  virtual int64_t argument_bytes(const int64_t *syms, int32_t argument) const = 0;
  virtual int32_t run(void *const *arguments, const int64_t *syms, int32_t threads, void *stream) = 0;
};

// Keeps `text` as what emmy_message says about `code` in this thread.
int32_t emmy_fail(int32_t code, const std::string &text);

Backend *emmy_new_cuda();

#endif
