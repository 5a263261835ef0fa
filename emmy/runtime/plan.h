/* What a compiled plan exports: one symbol, `emmy_plan`. Generated sources contain this text; the launcher includes it. */
#ifndef EMMY_PLAN_H
#define EMMY_PLAN_H
#include <stdint.h>

#define EMMY_PLAN_VERSION 1

typedef struct {
  void *const *buffers;  /* arguments in the plan's order, then workspaces */
  const int64_t *syms;   /* sizes known at run time */
  void *scratch;         /* of this thread, aligned to 64 bytes */
} EmmyArgs;

typedef struct {
  const char *name;
  void (*run)(const EmmyArgs *args, int64_t block);
  int64_t (*blocks)(const int64_t *syms);        /* how many independent blocks there are */
  int64_t (*scratch_bytes)(const int64_t *syms); /* that each thread needs */
} EmmyLaunch;

typedef struct {
  int32_t version;     /* EMMY_PLAN_VERSION: of this layout */
  int32_t n_arguments; /* inputs and outputs: the caller's */
  int32_t n_buffers;   /* those and workspaces: the launcher's */
  int32_t n_syms;
  int32_t n_launches; /* run in order, each after the one before it */
  const char *const *arguments; /* names */
  const char *const *syms;
  int64_t (*buffer_bytes)(const int64_t *syms, int32_t buffer);
  const EmmyLaunch *launches;
} EmmyPlan;

#endif
