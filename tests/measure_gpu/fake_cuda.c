/* A stand-in for NVIDIA's driver on machines without a GPU: device memory is this machine's, time is counted, not taken.
 *
 * A "cubin" is text, a line a kernel: NAME BEHAVIOUR M N K MICROSECONDS. A kernel is given pointers A, B, C and computes
 * C = A @ B in f32, or goes wrong as its behaviour says. A real cubin's kernels do nothing, unless $FAKE_CUDA_MATMUL says "M N K":
 * then k0(A, B, C or partial sums) and k1(C, partial sums) compute C = A @ B in f16, whatever is in them, the faster the more
 * blocks. Every call that a launcher makes is appended to $FAKE_CUDA_LOG.
 */
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef int CUresult;
enum { OUT_OF_MEMORY = 2, INVALID = 1, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, OUT_OF_RESOURCES = 701, ECC = 214 };

typedef struct { char name[64], behaviour[32]; long m, n, k; double us; int smem; long runs; } Function;
typedef struct { Function functions[8]; int count, is_real; } Module;
typedef struct { Function *f; const float *a, *b; float *c; } Launch;
typedef struct { Launch *launches; int count; } Graph;

static int sticky, hangs, is_capturing;
static double now_us;
static Graph captured;
static void *current;

static void note(const char *format, ...) {
  const char *path = getenv("FAKE_CUDA_LOG");
  if (!path) return;
  FILE *f = fopen(path, "a");
  va_list args;
  va_start(args, format);
  vfprintf(f, format, args);
  va_end(args);
  fputc('\n', f);
  fclose(f);
}

static float from_half(uint16_t h) {
  int exponent = h >> 10 & 31;
  float x = exponent ? ldexpf(1024 + (h & 1023), exponent - 25) : ldexpf(h & 1023, -24);
  return h >> 15 ? -x : x;
}

static uint16_t to_half(float x) {
  if (x == 0) return 0;
  int exponent, sign = x < 0 ? 0x8000 : 0;
  frexpf(x, &exponent);
  int least = exponent > -13 ? exponent - 11 : -24; /* power of two of the last bit */
  int steps = (int)nearbyintf(ldexpf(fabsf(x), -least)); /* 2048 steps carry into the exponent, which is right */
  return sign | (least > -24 ? steps + ((least + 24) << 10) : steps);
}

static void compute_f16(const Launch *l) {
  long m = l->f->m, n = l->f->n, k = l->f->k;
  const uint16_t *a = (const void *)l->a, *b = (const void *)l->b;
  float *wide = malloc((m * k + k * n) * sizeof *wide);
  for (long i = 0; i < m * k; ++i) wide[i] = from_half(a[i]);
  for (long i = 0; i < k * n; ++i) wide[m * k + i] = from_half(b[i]);
  for (long i = 0; i < m; ++i)
    for (long j = 0; j < n; ++j) {
      float sum = 0;
      for (long x = 0; x < k; ++x) sum += wide[i * k + x] * wide[m * k + x * n + j];
      ((uint16_t *)l->c)[i * n + j] = to_half(sum);
    }
  free(wide);
}

static void compute(const Launch *l) {
  Function *f = l->f;
  const char *b = f->behaviour;
  ++f->runs;
  now_us += f->us;
  if (!strcmp(b, "illegal")) { sticky = ILLEGAL_ADDRESS; return; }
  if (!strcmp(b, "breaks_the_gpu")) { sticky = ECC; return; }
  if (!strcmp(b, "hang")) { hangs = 1; return; }
  if (!strcmp(b, "nothing")) return;
  if (!strcmp(b, "f16")) { compute_f16(l); return; }
  for (long i = 0; i < f->m; ++i)
    for (long j = 0; j < f->n; ++j) {
      float sum = 0;
      for (long k = 0; k < f->k; ++k) sum += l->a[i * f->k + k] * l->b[k * f->n + j];
      l->c[i * f->n + j] = sum;
    }
  if (!strcmp(b, "off_by_one")) l->c[5] += 1;
  if (!strcmp(b, "past_the_end")) l->c[f->m * f->n + 1000] = 1;
  if (!strcmp(b, "before_the_start")) l->c[-1] = 1;
  if (!strcmp(b, "modifies_an_input")) ((float *)l->b)[3] += 1;
  if (!strcmp(b, "wrong_after_a_while") && f->runs > 20) l->c[3] += 1;
}

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuGetExportTable(const void **table, const void *id) { return INVALID; } /* NVRTC asks for one */
CUresult cuDriverGetVersion(int *v) {
  const char *n = getenv("FAKE_CUDA_VERSION");
  *v = n ? atoi(n) : 13000;
  return 0;
}
CUresult cuGetErrorString(CUresult r, const char **text) {
  *text = r == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : r == ECC ? "uncorrectable ECC error"
        : r == OUT_OF_RESOURCES ? "too many resources requested for launch" : r == NOT_FOUND ? "named symbol not found" : "some error";
  return 0;
}
CUresult cuDeviceGetCount(int *n) { const char *c = getenv("FAKE_CUDA_COUNT"); *n = c ? atoi(c) : 1; return 0; }
CUresult cuDeviceGet(int *d, int i) { *d = i; return 0; }
CUresult cuDeviceGetName(char *name, int size, int d) {
  const char *n = getenv("FAKE_CUDA_NAME");
  snprintf(name, size, "%s", n ? n : "NVIDIA GeForce RTX 4090");
  return 0;
}
CUresult cuDeviceGetUuid(unsigned char *uuid, int d) {
  const char *only = getenv("CUDA_VISIBLE_DEVICES");
  if (only && strstr(only, "GPU-10111213")) d = 1;
  for (int i = 0; i < 16; ++i) uuid[i] = i + 16 * d;
  return 0;
}
CUresult cuDeviceTotalMem_v2(size_t *n, int d) { *n = 24ull << 30; return 0; }
CUresult cuDeviceGetAttribute(int *v, int attribute, int d) {
  *v = attribute == 16 ? 128 : attribute == 38 ? 1 << 20 : attribute == 75 ? 8 : attribute == 76 ? 9 : 0;
  return 0;
}
CUresult cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(0x1000 + (intptr_t)d); note("retain %d", d); return 0; }
CUresult cuDevicePrimaryCtxRelease_v2(int d) { note("release %d", d); return 0; }
CUresult cuCtxGetCurrent(void **c) { *c = current; return 0; }
CUresult cuCtxSetCurrent(void *c) { current = c; return 0; }
CUresult cuCtxSynchronize(void) { while (hangs) pause(); return sticky; }
CUresult cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = 24ull << 30; return 0; }
CUresult cuMemAlloc_v2(u64 *p, size_t n) {
  if (n > 1ull << 32) return OUT_OF_MEMORY;
  *p = (u64)(uintptr_t)aligned_alloc(256, (n + 255) / 256 * 256);
  note("allocate %zu", n);
  return sticky;
}
CUresult cuMemFree_v2(u64 p) { free((void *)(uintptr_t)p); note("free"); return sticky; }
CUresult cuMemcpyHtoD_v2(u64 to, const void *from, size_t n) { memcpy((void *)(uintptr_t)to, from, n); return sticky; }
CUresult cuMemcpyDtoH_v2(void *to, u64 from, size_t n) { memcpy(to, (void *)(uintptr_t)from, n); return sticky; }
CUresult cuMemsetD8_v2(u64 p, unsigned char v, size_t n) { memset((void *)(uintptr_t)p, v, n); return sticky; }
CUresult cuMemsetD8Async(u64 p, unsigned char v, size_t n, void *s) { return cuMemsetD8_v2(p, v, n); }
CUresult cuStreamCreate(void **s, unsigned flags) { *s = (void *)0x77; return 0; }
CUresult cuStreamSynchronize(void *s) { while (hangs) pause(); return sticky; }
CUresult cuStreamBeginCapture_v2(void *s, int mode) { is_capturing = 1; captured = (Graph){0, 0}; return sticky; }
CUresult cuStreamEndCapture(void *s, Graph **g) {
  is_capturing = 0;
  *g = malloc(sizeof **g);
  **g = captured;
  return sticky;
}
CUresult cuGraphInstantiateWithFlags(Graph **e, Graph *g, u64 flags) { *e = malloc(sizeof **e); **e = *g; return sticky; }
CUresult cuGraphDestroy(Graph *g) { free(g); return 0; }
CUresult cuGraphExecDestroy(Graph *e) { free(e->launches); free(e); return 0; }
CUresult cuGraphLaunch(Graph *e, void *s) {
  for (int i = 0; i < e->count; ++i) compute(&e->launches[i]);
  return sticky;
}
CUresult cuEventCreate(double **e, unsigned flags) { *e = calloc(1, sizeof **e); return 0; }
CUresult cuEventRecord(double *e, void *s) { *e = now_us; return sticky; }
CUresult cuEventDestroy_v2(double *e) { free(e); return 0; }
CUresult cuStreamIsCapturing(void *s, int *status) { *status = is_capturing; return sticky; }
CUresult cuStreamWaitEvent(void *s, double *e, unsigned flags) { note("stream %p waits", s); return sticky; }
CUresult cuEventElapsedTime(float *ms, double *a, double *b) { *ms = (float)((*b - *a) / 1e3); return sticky; }

CUresult cuModuleLoadData(Module **out, const char *image) {
  Module *m = calloc(1, sizeof *m);
  if (!memcmp(image, "\x7f" "ELF", 4)) { /* a real cubin: its kernels can be launched, and do nothing */
    m->is_real = 1;
    *out = m;
    return sticky;
  }
  for (Function *f = m->functions; sscanf(image, "%63s %31s %ld %ld %ld %lf", f->name, f->behaviour, &f->m, &f->n, &f->k, &f->us) == 6; ++f) {
    ++m->count;
    if (!(image = strchr(image, '\n'))) break;
    ++image;
  }
  if (!m->count) return 209; /* no binary for this GPU */
  *out = m;
  note("load %d", m->count);
  return sticky;
}
CUresult cuModuleUnload(Module *m) { note("unload"); return sticky; }
CUresult cuModuleGetFunction(Function **f, Module *m, const char *name) {
  if (m->is_real) {
    *f = &m->functions[m->count++];
    snprintf((*f)->name, sizeof (*f)->name, "%s", name);
    const char *sizes = getenv("FAKE_CUDA_MATMUL");
    strcpy((*f)->behaviour, sizes ? "f16" : "nothing");
    if (sizes) sscanf(sizes, "%ld %ld %ld", &(*f)->m, &(*f)->n, &(*f)->k);
    (*f)->us = 10;
    return 0;
  }
  for (int i = 0; i < m->count; ++i)
    if (!strcmp(m->functions[i].name, name)) { *f = &m->functions[i]; return 0; }
  return NOT_FOUND;
}
CUresult cuFuncSetAttribute(Function *f, int attribute, int value) {
  note("attribute %s %d %d", f->name, attribute, value);
  if (value > 232448) return INVALID;
  f->smem = value;
  return 0;
}
CUresult cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, void *address, const uint64_t *dims, const uint64_t *strides,
                                const uint32_t *box, const uint32_t *every, int interleave, int swizzle, int promotion, int fill) {
  note("map type %d rank %u dims %lu %lu stride %lu box %u %u every %u %u interleave %d swizzle %d promotion %d fill %d aligned %d", type,
       rank, dims[0], dims[1], strides[0], box[0], box[1], every[0], every[1], interleave, swizzle, promotion, fill,
       (int)((uintptr_t)map % 64 == 0));
  for (uint32_t i = 2; i < rank; ++i) note("further dim %lu stride %lu box %u every %u", dims[i], strides[i - 1], box[i], every[i]);
  map[0] = (uint64_t)(uintptr_t)address;
  return box[1] > 256 ? INVALID : 0;
}
typedef struct { int id, pad; unsigned value[16]; } Attribute;
typedef struct { unsigned gx, gy, gz, bx, by, bz, smem; void *stream; const Attribute *attributes; unsigned n_attributes; } Config;
CUresult cuLaunchKernelEx(const Config *c, Function *f, void **parameters, void **extra) {
  note("launch %s grid %u %u %u block %u %u %u smem %u stream %p attributes %u", f->name, c->gx, c->gy, c->gz, c->bx, c->by, c->bz,
       c->smem, c->stream, c->n_attributes);
  for (const Attribute *a = c->attributes; a < c->attributes + c->n_attributes; ++a)
    note("with %d %u %u %u", a->id, a->value[0], a->value[1], a->value[2]);
  if (!strcmp(f->behaviour, "too_large")) return OUT_OF_RESOURCES;
  if (!strcmp(f->behaviour, "listed")) { /* shows what it is given: pointers by their place, then a size, as the test knows */
    note("given %llx %llx %d", *(u64 *)parameters[0], *(u64 *)parameters[1], *(int *)parameters[f->k]);
    return 0;
  }
  Launch l = {f};
  static const float *last_a, *last_b; /* of k0, for the k1 that joins its partial sums */
  if (!strcmp(f->behaviour, "f16")) f->us = 10 + 8.0 / c->gx;
  if (!strcmp(f->behaviour, "f16") && !strcmp(f->name, "k1")) l = (Launch){f, last_a, last_b, *(float **)parameters[0]};
  else if (strcmp(f->behaviour, "nothing")) l = (Launch){f, *(const float **)parameters[0], *(const float **)parameters[1], *(float **)parameters[2]};
  last_a = l.a, last_b = l.b;
  if (is_capturing) {
    captured.launches = realloc(captured.launches, (captured.count + 1) * sizeof l);
    captured.launches[captured.count++] = l;
  } else {
    compute(&l);
  }
  return sticky;
}
