"""The host side of exported CUDA kernels as text: a launcher in CUDA's runtime API that says what a plan file's lines say.

Every number comes from the lines that Emmy's own launcher reads (`emmy/codegen/plan_head.py`). Knows no op and no file on disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from emmy.codegen.plan_head import HeadKernel, HeadMap, PlanHead, infix

ALIGN = 1024  # bytes, of a workspace and its parts
_DTYPES = {"f16": "FLOAT16", "f32": "FLOAT32", "bf16": "BFLOAT16"}
_SWIZZLES = ("NONE", "32B", "64B", "128B")

INCLUDES = """\
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdlib.h>

#include <mutex>

// Of a state's numbers a finish may read some only, as softmax's largest logit is not read: set but never used.
#pragma nv_diag_suppress 550
"""

HELPERS = """\
// ---------------------------------------------------------------- the host
[[maybe_unused]] static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
[[maybe_unused]] static int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }
"""

# libcuda's encoder through the runtime, so that nothing but the runtime is linked.
MAPS = """
static int encode(CUtensorMap *map, CUtensorMapDataType type, const void *at, cuuint32_t rank, const cuuint64_t *size,
                  const cuuint64_t *strides, const cuuint32_t *box, CUtensorMapSwizzle swizzle) {
  typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                             const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode call = nullptr;
  if (!call) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult how;
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &how);
    if (e != cudaSuccess) return e;
    if (how != cudaDriverEntryPointSuccess) return cudaErrorInsufficientDriver;
    call = (Encode)found;
  }
  const cuuint32_t every[5] = {1, 1, 1, 1, 1};
  const CUresult r = call(map, type, rank, (void *)at, size, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;  // an address that is not a multiple of 16
}
"""

LAUNCH = """
static int launch(const void *kernel, int64_t blocks, unsigned threads, unsigned smem_bytes, unsigned cluster, bool early,
                  void **parameters, cudaStream_t stream) {
  if (smem_bytes > 48 * 1024) {
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem_bytes);
    if (e != cudaSuccess) return e;
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (cluster > 1) {  // so many neighbouring blocks
    cudaLaunchAttribute &a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeClusterDimension;
    a.val.clusterDim.x = cluster;
    a.val.clusterDim.y = a.val.clusterDim.z = 1;
  }
  if (early) {  // it may begin before the launch before it has ended, and waits by itself
    cudaLaunchAttribute &a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelExC(&config, kernel, parameters);
}
"""

OWN = """
// A workspace of this device's, made when it is first asked for; it begins as zeros.
static int own_workspace(unsigned char **out) {
  static std::mutex mutex;
  static unsigned char *own[64];
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (device >= 64) return cudaErrorInvalidDevice;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!own[device]) {
    unsigned char *made = nullptr;
    if (cudaError_t e = cudaMalloc((void **)&made, WORKSPACE_BYTES)) return e;
    if (cudaError_t e = cudaMemset(made, 0, WORKSPACE_BYTES)) return e;
    if (cudaError_t e = cudaStreamSynchronize(nullptr)) return e;
    own[device] = made;
  }
  *out = own[device];
  return cudaSuccess;
}
"""


def architecture(arch: str) -> str:
    """nvcc's option for "sm_90a" and the like: machine code for it alone, since its instructions are in no other PTX."""
    return f"-gencode arch={arch.replace('sm', 'compute')},code={arch}"


def workspace_bytes(heads: Sequence[PlanHead]) -> int:
    """Bytes of one block for the workspaces of every plan, each at its largest size."""
    return sum(_padded(h.most_bytes(w)) for h in heads for w in h.workspaces)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN


def host(heads: Sequence[PlanHead]) -> str:
    """Functions `plan_0`, `plan_1`, ... that run a plan each, and what they call; to stand behind the kernels."""
    has_maps = any(isinstance(p, HeadMap) for h in heads for k in h.kernels for p in k.parameters)
    n_bytes = workspace_bytes(heads)
    own = OWN.replace("WORKSPACE_BYTES", str(n_bytes)) if n_bytes else ""
    out, at = [HELPERS + (MAPS if has_maps else "") + LAUNCH + own], 0
    for i, h in enumerate(heads):
        out.append(_plan(h, i, at))
        at += sum(_padded(h.most_bytes(w)) for w in h.workspaces)
    return "\n".join(out)


def _plan(h: PlanHead, number: int, offset: int) -> str:
    """The function that launches a plan's kernels one after another."""
    args = "void *const *arguments, const int64_t *syms, unsigned char *workspace, cudaStream_t stream"
    lines = [f"static int plan_{number}({args}) {{"]
    for i, s in enumerate(h.syms):
        lines += [f"  const int64_t {s.name} = syms[{i}];"]
        lines += [f"  if ({s.name} < {s.lo} || {s.name} > {s.hi}) return cudaErrorInvalidValue;"]
    lines += [f"  void *{b.name} = arguments[{i}];" for i, b in enumerate(h.arguments)]
    for w in h.workspaces:
        lines.append(f"  void *{w.name} = workspace + {offset};")
        offset += _padded(h.most_bytes(w))
    lines += [line for k in h.kernels for line in _launch(h, k)]
    unused = [f"(void){x};" for x in ("syms", "workspace")]
    return "\n".join([*lines, f"  {' '.join(unused)}", "  return cudaSuccess;", "}", ""])


def _launch(h: PlanHead, k: HeadKernel) -> list[str]:
    syms = [s.name for s in h.syms]
    lines, given = ["  {"], []
    for p in k.parameters:
        if isinstance(p, HeadMap):
            lines += _map(h, p, syms)
            given.append(f"&{p.of}_map")
        elif p[0] == "size":
            lines.append(f"    int len_{p[1]} = (int){p[1]};")
            given.append(f"&len_{p[1]}")
        else:
            given.append(f"&{p[1]}")
    lines.append(f"    void *parameters[] = {{{', '.join(given)}}};")
    how = f"{infix(k.blocks, syms)}, {k.threads}, {k.smem_bytes}, {k.cluster}, {str(k.early).lower()}"
    lines.append(f"    if (int e = launch((const void *){k.name}, {how}, parameters, stream)) return e;")
    return [*lines, "  }"]


def _map(h: PlanHead, p: HeadMap, syms: Sequence[str]) -> list[str]:
    """Statements that describe an array to the copy engine, its innermost dimension first."""
    item = next(b.item_bytes for b in h.buffers if b.name == p.of)
    columns, rows = infix(p.columns, syms), infix(p.rows, syms)
    further = [infix(x, syms) for x in p.further]
    wide = str(p.box_columns) if p.panels else columns
    sizes, box = [wide, rows], [p.box_columns, p.box_rows]
    strides = [further[0] if further else columns]  # in elements
    if p.panels:
        sizes, strides, box = [*sizes, f"{columns} / {wide}"], [*strides, wide], [*box, p.panels]
    for size, apart in zip(further[1::2], further[2::2], strict=True):
        sizes, strides, box = [*sizes, size], [*strides, apart], [*box, 1]
    name, long = f"{p.of}_map", "const cuuint64_t"
    arrays = f"{name}_size, {name}_strides, {name}_box, CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[p.swizzle]}"
    return [
        f"    {long} {name}_size[] = {{{', '.join(f'(cuuint64_t)({x})' for x in sizes)}}};",
        f"    {long} {name}_strides[] = {{{', '.join(f'(cuuint64_t)({x} * {item})' for x in strides)}}};",
        f"    const cuuint32_t {name}_box[] = {{{', '.join(map(str, box))}}};",
        f"    CUtensorMap {name};",
        f"    if (int e = encode(&{name}, CU_TENSOR_MAP_DATA_TYPE_{_DTYPES[p.dtype]}, {p.of}, {len(box)}, {arrays})) return e;",
    ]


def entry(n_bytes: int) -> str:
    """What the exported function does before it chooses a plan: `memory` is where workspaces lie."""
    lines = ["  unsigned char *memory = (unsigned char *)workspace;"]
    if n_bytes:
        lines += ["  if (!memory)", "    if (int e = own_workspace(&memory)) return e;"]
    return "\n".join(lines)


def notes(name: str, n_bytes: int, heads: Sequence[PlanHead]) -> list[str]:
    """What a caller must know, for the header."""
    lines = [
        "Arrays are in device memory. Returns a cudaError_t; cudaErrorInvalidValue: a size that no kernel serves, or an address",
        "that is no multiple of 16. All is launched on `stream` (a cudaStream_t, NULL: the default one); nothing waits.",
    ]
    if n_bytes:
        lines += [
            f"`workspace`: {name}_workspace_bytes() bytes of device memory at a multiple of {ALIGN}, zeros before the first call (each",
            "call leaves it ready for the next). NULL: memory of its own, allocated by the first call, which no graph may capture.",
            "Calls that share a workspace must not overlap.",
        ]
    else:
        lines.append("`workspace`: none is needed; NULL.")
    if any(k.early for h in heads for k in h.kernels):
        lines.append(
            "It may begin before the launch before it on the stream has ended: it waits itself before it reads what is not constant."
        )
    return lines
