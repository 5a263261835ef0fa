/* See cuda.h beside this file. */
#pragma once
#include "cuda.h"
#include <stdlib.h>
#include <string.h>
typedef enum { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidDevice = 101, cudaErrorInsufficientDriver = 35 } cudaError_t;
typedef struct CUstream_st *cudaStream_t;
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
struct dim3 { unsigned x, y, z; dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };
enum { cudaLaunchAttributeClusterDimension = 4, cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaLaunchAttribute { int id; union { struct { unsigned x, y, z; } clusterDim; int programmaticStreamSerializationAllowed; } val; };
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; size_t dynamicSmemBytes; cudaStream_t stream; cudaLaunchAttribute *attrs; unsigned numAttrs; };
struct Listed { const void *kernel; const char *name; int size_at; }; /* kernels, as the test's main lists them */
extern Listed listed[];

static CUresult encode_tiled(CUtensorMap *map, int type, cuuint32_t rank, void *address, const cuuint64_t *dims, const cuuint64_t *strides,
                             const cuuint32_t *box, const cuuint32_t *every, int interleave, int swizzle, int promotion, int fill) {
  printf("map type %d rank %u dims %lu %lu stride %lu box %u %u every %u %u interleave %d swizzle %d promotion %d fill %d aligned %d\n", type,
         rank, dims[0], dims[1], strides[0], box[0], box[1], every[0], every[1], interleave, swizzle, promotion, fill,
         (int)((uintptr_t)map % 64 == 0));
  for (cuuint32_t i = 2; i < rank; ++i) printf("further dim %lu stride %lu box %u every %u\n", dims[i], strides[i - 1], box[i], every[i]);
  map->words[0] = (uint64_t)address;
  return 0;
}
static cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, int, int, cudaDriverEntryPointQueryResult *how) {
  if (strcmp(name, "cuTensorMapEncodeTiled")) abort();
  *out = (void *)encode_tiled;
  *how = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
static const Listed &found(const void *kernel) {
  for (const Listed *l = listed; l->kernel; ++l)
    if (l->kernel == kernel) return *l;
  abort();
}
static cudaError_t cudaFuncSetAttribute(const void *kernel, int attribute, int value) {
  printf("attribute %s %d %d\n", found(kernel).name, attribute, value);
  return cudaSuccess;
}
static cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *kernel, void **parameters) {
  const Listed &l = found(kernel);
  printf("launch %s grid %u %u %u block %u %u %u smem %u stream %p attributes %u\n", l.name, c->gridDim.x, c->gridDim.y, c->gridDim.z,
         c->blockDim.x, c->blockDim.y, c->blockDim.z, (unsigned)c->dynamicSmemBytes, (void *)c->stream, c->numAttrs);
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    const cudaLaunchAttribute &a = c->attrs[i];
    const bool cluster = a.id == cudaLaunchAttributeClusterDimension;
    printf("with %d %u %u %u\n", a.id, a.val.clusterDim.x, cluster ? a.val.clusterDim.y : 0, cluster ? a.val.clusterDim.z : 0);
  }
  if (l.size_at >= 0)
    printf("given %llx %llx %d\n", *(unsigned long long *)parameters[0], *(unsigned long long *)parameters[1], *(int *)parameters[l.size_at]);
  return cudaSuccess;
}
static cudaError_t cudaGetDevice(int *d) { *d = 0; return cudaSuccess; }
static cudaError_t cudaMalloc(void **out, size_t n) { printf("allocate %zu\n", n); *out = calloc(1, n); return cudaSuccess; }
static cudaError_t cudaMemset(void *, int, size_t) { return cudaSuccess; }
static cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
