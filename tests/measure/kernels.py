"""Hand-written kernels of a plain f32 matmul, good and bad, and a builder that compiles them by name in place of a schedule."""

from __future__ import annotations

import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from emmy.errors import CompileError, IllegalMove
from emmy.ir.ops import parse_op
from emmy.measure.compile_pool import Builder, Built
from emmy.records import Candidate

OP = "matmul:33x17x9:f32"

_HEAD = """
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void right(const float *A, const float *B, float *C) {
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) {
      float sum = 0;
      for (int k = 0; k < K; ++k) sum += A[m * K + k] * B[k * N + n];
      C[m * N + n] = sum;
    }
}
"""

# The body of a function that is given A, B and C. "hang" leaves a file in FOLDER when it begins.
KERNELS = {
    "right": "right(A, B, C);",
    "slow": "for (volatile int i = 0; i < 400000; ++i) {} right(A, B, C);",
    "hang": 'fclose(fopen(FOLDER "/hanging", "w")); for (volatile int i = 0;; ++i) {}',
    "hang_printing": 'for (;;) puts("still here");',
    "hang_with_child": "if (fork() == 0) { sleep(60); _exit(0); } for (volatile int i = 0;; ++i) {}",
    "segfault": "right(A, B, C); *(volatile int *)8 = 1;",
    "abort": 'fputs("no more\\n", stderr); abort();',
    "exit": "right(A, B, C); exit(7);",
    "kill": "kill(getpid(), SIGKILL); for (;;) {}",
    "past_the_end": "right(A, B, C); C[M * N] = 1;",
    "far_past_the_end": "right(A, B, C); C[M * N + 64] = 1;",
    "before_the_start": "right(A, B, C); C[-3] = 1;",
    "far_before_the_start": "right(A, B, C); C[-5000] = 1;",
    "past_an_input": "right(A, B, C); ((float *)B)[K * N + 1] = 1;",
    "reads_past_an_input": "right(A, B, C); C[0] += 0 * B[K * N];",
    "modifies_an_input": "right(A, B, C); ((float *)A)[2 * K + 1] += 1;",
    "reorders_an_input": "right(A, B, C); float x = B[3]; ((float *)B)[3] = B[4]; ((float *)B)[4] = x;",
    "leaves_a_row": "float T[M * N]; right(A, B, T); memcpy(C, T, (M - 1) * N * sizeof(float));",
    "off_by_one": "right(A, B, C); C[5 * N + 2] += 1;",
    "slightly_off": "right(A, B, C); for (int i = 0; i < M * N; ++i) C[i] *= 1.0005f;",
    "constant": "for (int i = 0; i < M * N; ++i) C[i] = 1;",
    "answers_once": "static int done; if (!done) right(A, B, C); done = 1;",
    "remembers_by_address": (
        "static const float *of; static float kept[M * N];"
        "if (of != B) { right(A, B, kept); of = B; } memcpy(C, kept, sizeof kept);"
    ),
    "wrong_after_a_while": "static int n; right(A, B, C); if (++n > 20) C[3] += 1;",
    "prints": 'right(A, B, C); printf("{\\"v\\":1,\\"id\\":1}\\n"); fflush(stdout); fputs("noise\\n", stderr);',
    "writes_on_every_descriptor": (
        'right(A, B, C); for (int fd = 3; fd < 1024; ++fd) (void)!write(fd, "garbage\\n", 8);'
    ),
    "answers_half_a_line": 'for (int fd = 3; fd < 1024; ++fd) (void)!write(fd, "{\\"v\\":1,", 7); for (;;) {}',
    "closes_every_descriptor": "right(A, B, C); for (int fd = 3; fd < 1024; ++fd) close(fd);",
    "no_such_syntax": "this is not C;",
}


_PLAN = """
static void run(const EmmyArgs *args, int64_t block) {
  const float *A = args->buffers[0], *B = args->buffers[1];
  float *C = args->buffers[2];
  BODY
}
static int64_t one(const int64_t *syms) { return 1; }
static int64_t none(const int64_t *syms) { return 0; }
static int64_t bytes(const int64_t *syms, int32_t i) {
  return sizeof(float) * (i == 0 ? M * K : i == 1 ? K * N : M * N);
}
static const EmmyLaunch launches[] = {{.name = "k0", .run = run, .blocks = one, .scratch_bytes = none}};
static const char *const names[] = {"A", "B", "C"};
const EmmyPlan emmy_plan = {
  .version = EMMY_PLAN_VERSION, .n_arguments = 3, .n_buffers = 3, .n_launches = 1,
  .arguments = names, .buffer_bytes = bytes, .launches = launches,
};
"""


def source(name: str) -> str:
    """One of the kernels as a plan that the launcher can load."""
    interface = resources.files("emmy.runtime").joinpath("plan.h").read_text(encoding="utf-8")
    return _HEAD + interface + _PLAN.replace("BODY", KERNELS[name])


def builder(folder: Path) -> Builder:
    """Compiles the kernel a schedule names. "refused" stands for a schedule that no kernel can be made of."""

    def build(candidate: Candidate) -> Built:
        name = candidate.schedule
        if name == "refused":
            raise IllegalMove(0, "k0/split(m,core,0)", "a step of 0 makes no progress; allowed 1..33")
        sizes = parse_op(candidate.op).program().sizes()
        defines = [f'-DFOLDER="{folder}"', *(f"-D{axis.upper()}={size}" for axis, size in sizes.items())]
        stem = f"{name}-{'x'.join(str(size) for size in sizes.values())}"
        library = folder / f"{stem}.so"
        with tempfile.TemporaryDirectory(dir=folder) as new:  # the same candidate may be compiled twice at once
            text, made = Path(new, f"{stem}.c"), Path(new, "made.so")
            text.write_text(source(name))
            command = ["gcc", "-O1", "-w", *defines, "-shared", "-fPIC", str(text), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CompileError(done.stderr)
            made.replace(library)
        return Built(library, f"digest of {name}", {"code_bytes": float(library.stat().st_size)})

    return build
