"""CUDA source to cubin: for every architecture, once, with what the compiler said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from emmy.codegen import nvrtc
from emmy.codegen.nvrtc import Cubin, compile_cubin, compile_many
from emmy.codegen.ptx import ARCHS, HELPERS, helper, prelude, used, wgmma_name
from emmy.codegen.ptx.wgmma import NS
from emmy.errors import CompileError
from tests.cuda.calls import call, kernel
from tests.emulator.cases import CASES
from tests.tiers import in_every_run

SIMPLE = "EMMY_KERNEL(32, 1) k(float* x) { x[threadIdx.x] = 1.f; }"


def source(text: str, arch: str) -> str:
    return prelude(used(text), arch) + text


@pytest.mark.parametrize("arch", [pytest.param(a, marks=in_every_run(a not in ("sm_86", "sm_89"))) for a in ARCHS])
def test_every_helper_of_an_architecture_compiles_for_it(arch: str) -> None:
    text = kernel("\n".join(call(h) for h in HELPERS.values() if arch in h.archs and "setmaxnreg" not in h.name))
    assert compile_cubin(source(text, arch), arch).kernels[0].name == "k"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_an_architecture_has_the_helpers_it_says_it_has_and_no_others(arch: str) -> None:
    def text(name: str) -> str:
        h = helper(name)
        return prelude([name], next(a for a in reversed(ARCHS) if a in h.archs)) + kernel(call(h))

    names = list(HELPERS)
    results = compile_many((text(n), arch) for n in names)
    compiled = {n for n, r in zip(names, results, strict=True) if isinstance(r, Cubin)}
    assert compiled == {n for n in names if arch in helper(n).archs}


@pytest.mark.slow
def test_every_warpgroup_matrix_instruction_compiles() -> None:
    names = [wgmma_name(n, "f16", "smem") for n in NS]
    for n in (8, 72, 256):
        names += [wgmma_name(n, "bf16", "smem", a_mn=a, b_mn=b) for a in (False, True) for b in (False, True)]
        names += [wgmma_name(n, dtype, "reg", b_mn=b) for dtype in ("f16", "bf16") for b in (False, True)]
    texts = [source(kernel(call(helper(n))), "sm_90a") for n in names]
    for name, r in zip(names, compile_many((t, "sm_90a") for t in texts), strict=True):
        assert isinstance(r, Cubin), f"{name}: {r}"


def test_a_cubin_comes_from_the_cache_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path))
    first = compile_cubin(source(SIMPLE, "sm_89"), "sm_89")
    again = compile_cubin(source(SIMPLE, "sm_89"), "sm_89")
    other = compile_cubin(source(SIMPLE, "sm_80"), "sm_80")
    assert first.compile_s > 0 and again.compile_s == 0 and other.compile_s > 0
    assert (first.data, first.log) == (again.data, again.log)
    assert other.kernels[0].arch == 80


def test_nothing_half_written_is_left_when_a_compilation_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path))
    with pytest.raises(CompileError, match=r'(?s)NVRTC rejected the source.*sm_89.*identifier "nonsense" is undefined'):
        compile_cubin("EMMY_KERNEL(32, 1) k() { nonsense; }".replace("EMMY_KERNEL(32, 1)", "__global__ void"), "sm_89")
    assert [p for p in tmp_path.rglob("*") if p.is_file() and "locks" not in p.parts] == []


def test_many_are_compiled_at_once_and_come_back_in_order() -> None:
    jobs = [(source(SIMPLE.replace("1.f", f"{i}.f"), arch), arch) for i in range(2) for arch in ARCHS]
    jobs.insert(3, ("nonsense", "sm_80"))
    results = list(compile_many(jobs, workers=3))
    assert isinstance(results.pop(3), CompileError)
    assert [r.arch for r in results if isinstance(r, Cubin)] == [*ARCHS, *ARCHS]


def test_an_architecture_that_is_not_supported_is_refused() -> None:
    with pytest.raises(CompileError, match=r"'sm_75' is not supported\. Supported are sm_80"):
        compile_cubin(SIMPLE, "sm_75")


def test_without_the_wheels_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    nvrtc.nvrtc_version.cache_clear()
    with pytest.raises(CompileError, match=r"the CUDA compiler is not installed.*pip install 'emmy\[cuda\]'"):
        compile_cubin(source(SIMPLE, "sm_80"), "sm_80")
    nvrtc.nvrtc_version.cache_clear()


def test_spilled_registers_refuse_a_candidate() -> None:
    text = """EMMY_KERNEL(1024, 2) k(const float* in, float* out) {
  float v[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; ++i) out[i * 1024 + threadIdx.x] = v[i] * v[(i * 7 + 3) % 64];
}"""
    cubin = compile_cubin(source(text, "sm_80"), "sm_80")
    assert cubin.spill_bytes > 100
    assert cubin.refusal is not None and "bytes a thread at 32 registers" in cubin.refusal
    assert compile_cubin(source(SIMPLE, "sm_80"), "sm_80").spill_bytes == 0


def test_serialised_warpgroup_instructions_refuse_a_candidate() -> None:
    case = CASES["wgmma_ring"]
    text = case.kernel.replace("    emmy_wgmma_commit();", "    acc[0] += 1.f;\n    emmy_wgmma_commit();")
    cubin = compile_cubin(case.source(text), "sm_90a")
    assert cubin.refusal is not None and "wgmma" in cubin.refusal
