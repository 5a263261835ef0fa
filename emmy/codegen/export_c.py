"""The host side of exported C code as text: a launcher that walks the table which Emmy's own launcher reads. Knows no op."""

from __future__ import annotations

from collections.abc import Sequence

INCLUDES = """\
#include <stdlib.h>
"""

# OpenMP's pragmas are comments to a compiler that is not told of it.
HOST = """
/* ---------------------------------------------------------------- the launcher */
enum { OK = 0, BAD_SIZE = 1, NO_MEMORY = 2 };

static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t workspace_of(const EmmyPlan *plan, const int64_t *syms) {
  int64_t bytes = 0;
  for (int32_t i = plan->n_arguments; i < plan->n_buffers; ++i) bytes += padded(plan->buffer_bytes(syms, i));
  return bytes;
}

static int run_blocks(const EmmyLaunch *launch, void *const *buffers, const int64_t *syms) {
  const int64_t blocks = launch->blocks(syms), bytes = padded(launch->scratch_bytes(syms));
  int code = OK;
#pragma omp parallel
  {
    void *scratch = bytes ? aligned_alloc(64, (size_t)bytes) : NULL;
    if (bytes && !scratch) code = NO_MEMORY;
#pragma omp for schedule(dynamic)
    for (int64_t block = 0; block < blocks; ++block)
      if (scratch || !bytes) launch->run(&(EmmyArgs){buffers, syms, scratch}, block);
    free(scratch);
  }
  return code;
}

static int run_plan(const EmmyPlan *plan, void *const *arguments, const int64_t *syms, void *workspace) {
  const int64_t bytes = workspace_of(plan, syms);
  void *own = NULL;
  if (bytes && !workspace && !(workspace = own = aligned_alloc(64, (size_t)bytes))) return NO_MEMORY;
  void **buffers = malloc((size_t)plan->n_buffers * sizeof *buffers);
  int code = buffers ? OK : NO_MEMORY;
  char *at = workspace;
  for (int32_t i = 0; buffers && i < plan->n_buffers; ++i) {
    buffers[i] = i < plan->n_arguments ? arguments[i] : (void *)at;
    if (i >= plan->n_arguments) at += padded(plan->buffer_bytes(syms, i));
  }
  for (int32_t i = 0; code == OK && i < plan->n_launches; ++i) code = run_blocks(&plan->launches[i], buffers, syms);
  free(buffers);
  free(own);
  return code;
}
"""


def host(names: tuple[str, ...]) -> str:
    """Functions `plan_0`, `plan_1`, ... that run the plan of a table NAME each; to stand behind the tables."""
    calls = [
        f"static int plan_{i}(void *const *arguments, const int64_t *syms, void *workspace) {{\n"
        f"  return run_plan(&{name}, arguments, syms, workspace);\n}}\n"
        for i, name in enumerate(names)
    ]
    return "\n".join([HOST, *calls])


ENTRY = "  (void)stream;"


def workspace_function(name: str, tables: Sequence[str], largest: Sequence[Sequence[int]]) -> str:
    """The function that says how much workspace any plan needs at its largest sizes."""
    lines = [f"int64_t {name}_workspace_bytes(void) {{", "  int64_t bytes = 0, of = 0;"]
    for table, sizes in zip(tables, largest, strict=True):
        lines.append(f"  of = workspace_of(&{table}, (const int64_t[]){{{', '.join(map(str, sizes))}}});")
        lines.append("  bytes = bytes < of ? of : bytes;")
    return "\n".join([*lines, "  return bytes;", "}", ""])


def notes(name: str) -> list[str]:
    """What a caller must know, for the header."""
    return [
        "Returns 0; 1 for a size that no kernel serves; 2 without memory. `stream`: NULL. OpenMP's threads share the work.",
        f"`workspace`: {name}_workspace_bytes() bytes at a multiple of 64; NULL: allocated for the call.",
    ]
