"""A small main for an exported function: it runs it on arrays from files and compares with float64 answers. Compiles nothing.

Files of a folder: `A.in` (an array as it is stored) for each input, `C.want` (float64) for each output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emmy.ir.dtype import DType, size_bytes
from emmy.ir.program import Program, Sym, Value

_CODES: dict[DType, int] = {"f32": 0, "f16": 1, "bf16": 2}

_COMMON = """\
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char *what, const char *which) {
  fprintf(stderr, "%s %s\\n", what, which);
  exit(2);
}

static void *must(void *memory) {
  if (!memory) fail("no memory", "");
  return memory;
}

/* The bytes of DIR/NAME, which must be so many. */
static void *read_file(const char *dir, const char *name, size_t bytes) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", dir, name);
  FILE *file = fopen(path, "rb");
  if (!file) fail("cannot open", path);
  void *data = must(malloc(bytes ? bytes : 1));
  if (fread(data, 1, bytes, file) != bytes || fgetc(file) != EOF) fail("not of the size that these sizes need:", path);
  fclose(file);
  return data;
}

static double number(const void *data, int64_t i, int dtype) { /* dtype 0: f32, 1: f16, 2: bf16 */
  if (!dtype) return ((const float *)data)[i];
  const uint16_t x = ((const uint16_t *)data)[i];
  if (dtype == 2) {
    const uint32_t wide = (uint32_t)x << 16;
    float y;
    memcpy(&y, &wide, 4);
    return y;
  }
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const double y = exponent == 31 ? (fraction ? NAN : INFINITY)
                   : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                  : ldexp(fraction, -24);
  return x >> 15 ? -y : y;
}

/* The largest error in units of what is allowed: at most 1 is right. */
static double error_of(const void *got, const double *want, int64_t n, int dtype, double absolute, double relative) {
  double worst = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = number(got, i, dtype), e = fabs(x - want[i]) / (absolute + relative * fabs(want[i]));
    if (x == want[i] || (isnan(x) && isnan(want[i]))) continue; /* the same infinity, or no number where none is wanted */
    if (!(e <= worst)) worst = isnan(e) ? INFINITY : e;
  }
  return worst;
}
"""

_HOST = """
static void *to_device(void *data, size_t bytes) { (void)bytes; return data; }
static void *from_device(void *data, size_t bytes) { (void)bytes; return data; }
static void done(int code) { if (code) fail("the function failed", ""); }
"""

_CUDA = """
#include <cuda_runtime.h>
static void done(int code) {
  if (!code) code = cudaDeviceSynchronize();
  if (code) fail("CUDA:", cudaGetErrorString((cudaError_t)code));
}
static void *to_device(void *data, size_t bytes) {
  void *there = NULL;
  done(cudaMalloc(&there, bytes ? bytes : 1));
  done(cudaMemcpy(there, data, bytes, cudaMemcpyHostToDevice));
  return there;
}
static void *from_device(void *data, size_t bytes) {
  void *here = must(malloc(bytes ? bytes : 1));
  done(cudaMemcpy(here, data, bytes, cudaMemcpyDeviceToHost));
  return here;
}
"""

_TIMED = """
  cudaEvent_t begin, end;
  float ms = 0;
  done(cudaEventCreate(&begin));
  done(cudaEventCreate(&end));
  cudaEventRecord(begin, NULL);
  for (int i = 0; i < 20; ++i) CALL;
  cudaEventRecord(end, NULL);
  done(0);
  cudaEventElapsedTime(&ms, begin, end);
  printf("%.2f us a call, 20 in a row on the same arrays\\n", ms * 1000 / 20);
"""


def check_text(
    name: str, program: Program, syms: Sequence[str], allowed: Mapping[str, tuple[float, float]], *, is_cuda: bool
) -> str:
    """The main's source. `allowed`: absolute and relative error of each output (`Op.tolerance`)."""
    arrays = [*program.inputs, *(program.value(o) for o in program.outputs)]
    lines = [
        "int main(int argc, char **argv) {",
        f'  if (argc != {2 + len(syms)}) fail("usage: check DIR", "{" ".join(syms)}");',
    ]
    lines += [f"  const int64_t {s} = atoll(argv[{2 + i}]);" for i, s in enumerate(syms)]
    lines += [f"  const int64_t n_{v.name} = {_elements(v, program)};" for v in arrays]
    for v in program.inputs:
        size = f"(size_t)n_{v.name} * {size_bytes(v.dtype)}"
        lines.append(f'  void *{v.name} = to_device(read_file(argv[1], "{v.name}.in", {size}), {size});')
    for o in program.outputs:
        size = f"(size_t)n_{o} * {size_bytes(program.value(o).dtype)}"
        lines.append(f"  void *{o} = to_device(memset(must(malloc({size})), 0xff, {size}), {size}); /* NaN */")
    call = f"{name}({', '.join([*(v.name for v in arrays), *syms, 'NULL', 'NULL'])})"
    lines += [
        f"  done({call});",
        f"  done({call}); /* a second call finds its workspace ready */",
        "  double worst = 0, error;",
    ]
    for o in program.outputs:
        v, (absolute, relative) = program.value(o), allowed[o]
        size = f"(size_t)n_{o} * {size_bytes(v.dtype)}"
        lines.append(
            f'  error = error_of(from_device({o}, {size}), (const double *)read_file(argv[1], "{o}.want", (size_t)n_{o} * 8), '
            f"n_{o}, {_CODES[v.dtype]}, {absolute!r}, {relative!r});"
        )
        lines += [
            f'  printf("{o}: largest error %.3f of what is allowed\\n", error);',
            "  if (!(error <= worst)) worst = error;",
        ]
    lines += [_TIMED.replace("CALL", call).strip("\n")] * is_cuda
    lines += ['  puts(worst <= 1 ? "right" : "WRONG");', "  return worst <= 1 ? 0 : 4;", "}", ""]
    return f'#include "{name}.h"\n\n' + _COMMON + (_CUDA if is_cuda else _HOST) + "\n" + "\n".join(lines)


def _elements(v: Value, program: Program) -> str:
    sizes = (program.dim(a) for a in v.axes)
    return " * ".join(d.name if isinstance(d, Sym) else str(d) for d in sizes) or "1"
