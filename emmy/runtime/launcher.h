/* The launcher's C ABI: open a compiled plan, run it on buffers, close it. Errors are codes; `emmy_message` words the
 * last one of the calling thread. */
#ifndef EMMY_LAUNCHER_H
#define EMMY_LAUNCHER_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct EmmyHandle EmmyHandle; /* one plan, or plans by ranges of a size; used by one thread at a time */

enum {
  EMMY_OK = 0,
  EMMY_NO_BACKEND = 1, /* `device` names none */
  EMMY_NO_FILE = 2,    /* the library cannot be loaded */
  EMMY_NO_PLAN = 3,    /* it exports no plan, or one of another version */
  EMMY_NO_MEMORY = 4,
  EMMY_NO_THREAD = 5,
  EMMY_NO_DRIVER = 6,
  EMMY_BAD_SIZE = 7, /* a symbol's size outside the range that the plan serves */
  EMMY_BAD_TABLE = 8, /* ranges with a gap, or plans of different ops */
  EMMY_CUDA = 1000,  /* plus the CUDA driver's own code */
};

typedef struct {
  int32_t n_arguments, n_syms, n_launches;
  const char *const *arguments; /* names, valid until the plan is closed */
  const char *const *syms;
} EmmyInfo;

/* On success *out is the plan and *info describes it.
 * device "cpu":  `path` is a shared library that exports emmy_plan (plan.h);
 *        "cuda": a GPU plan, loaded into the current CUDA context, else into the first device's primary one. */
int32_t emmy_open(const char *device, const char *path, EmmyHandle **out, EmmyInfo *info);
/* Plans by ranges of the size `symbol`, as one: paths[i] serves lo[i]..hi[i], and lo[i+1] is hi[i] + 1; NULL leaves them to the
 * caller. A plan of one size may ask for none. Every run chooses by binary search. *info is the first plan's, with the symbol,
 * and the most launches. */
int32_t emmy_open_table(const char *device, const char *symbol, int32_t n, const char *const *paths, const int64_t *lo,
                        const int64_t *hi, EmmyHandle **out, EmmyInfo *info);
/* Number of the plan that serves these sizes, -1 when none does; 0 where there are no ranges. */
int32_t emmy_choose(const EmmyHandle *plan, const int64_t *syms);
/* Nanoseconds that one choice takes, the mean over `rounds` of choosing for each of n sizes. */
double emmy_choice_ns(const EmmyHandle *plan, const int64_t *sizes, int32_t n, int32_t rounds);
/* Bytes of one argument for these sizes; -1 when no plan serves them. */
int64_t emmy_argument_bytes(const EmmyHandle *plan, const int64_t *syms, int32_t argument);
/* Runs every launch, each after the one before it.
 * "cpu":  blocks shared among `threads` threads, 1 being the caller's alone; returns when all is done. No stream.
 * "cuda": launched on the CUDA stream `stream` (NULL: the default one); returns at once, and allocates nothing, so that it
 *         may be captured into a graph. Runs of one plan share its workspaces: one on another stream waits for the one before.
 *         Replays of captured graphs are the caller's to keep apart. */
int32_t emmy_run(EmmyHandle *plan, void *const *arguments, const int64_t *syms, int32_t threads, void *stream);
void emmy_close(EmmyHandle *plan);
const char *emmy_message(int32_t code);

#ifdef __cplusplus
}
#endif
#endif
