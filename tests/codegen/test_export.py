"""Exported source: what runs without Emmy gives the right answers, and asks of a GPU what Emmy's own launcher asks."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import emmy
from emmy.codegen import export_cuda
from emmy.codegen.build import source
from emmy.codegen.gpu_plan import plan_lines
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.codegen.plan_head import infix, read_head, value
from emmy.errors import DataError, UsageError
from emmy.exporting import ExportedFiles
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from tests.measure_gpu import fake

CPU = {
    "an epilogue in bf16": ("matmul:33x24x40:bf16:nk,bias,gelu_tanh", "k0/split(m,core,16)"),
    "partial sums joined by a second launch": ("matmul:16x24x64:f32", "k0/splitk(C,4) k0/split(m,core,8)"),
    "a gated pair": ("geglu:9x16x24:f16:nk", "k0/split(n,core,8)"),
    "a table": ("matmul:m(1..40)x24x32:f32", "m 1: k0/split(n,core,8) | m 2..40: k0/split(m,core,16)"),
    "an open size": ("matmul:m(1..40)x24x32:f32:residual", ""),
}
TILED = (
    "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,32) k0/split(m,warp,32) k0/split(n,warp,32) "
    "k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(mma,16,8,16)"
)
FINALIZE = f"k0/splitk(C,2) {TILED} k1/split(m,grid,4) k1/split(n,grid,64)"
STREAMK = (
    "k0/split(m,grid,128) k0/split(n,grid,128) k0/split(k,serial,64) k0/split(m,warpgroup,128) k0/split(n,warpgroup,128) "
    "k0/raster(4) k0/stage(A,tma,6) k0/stage(B,tma,5,panels) k0/specialize(1,0,0) k0/streamk(132) k0.C/atom(wgmma,64,128,16)"
)


def sh(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=False)


def built(op: str, schedule: str, folder: Path) -> ExportedFiles:
    made = emmy.export(op, schedule, gpu="cpu", out=folder, name="f", data=True)
    for command in (made.compiled_with, made.linked_with):
        done = sh(command.replace("-O3", "-O1"), folder)
        assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize("name", CPU)
def test_exported_c_is_right_without_emmy_and_notices_a_wrong_answer(name: str, tmp_path: Path) -> None:
    made = built(*CPU[name], tmp_path)
    size = " 40" if "m(" in CPU[name][0] else ""
    done = sh(f"env -i ./check data{size}", tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "right"), done.stdout + done.stderr
    assert made.data is not None
    (want,) = made.data.glob("*.want")
    data = bytearray(want.read_bytes())
    data[-2:] = b"\xf0\x3f"  # the last answer is another one
    want.write_bytes(bytes(data))
    done = sh(f"./check data{size}", tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (4, "WRONG")


def test_a_table_in_c_serves_its_sizes_and_refuses_others(tmp_path: Path) -> None:
    built(*CPU["a table"], tmp_path)
    sh("gcc -shared f.o -o f.so -lm -fopenmp", tmp_path)
    f = ctypes.CDLL(str(tmp_path / "f.so")).f
    op = parse_op(CPU["a table"][0])
    for m in (1, 2, 17, 40):
        x = op.inputs("integer", m, {"m": m})
        want = op.reference(x)["C"]
        got = want.astype("f4") * 0 + 7
        buffers = [ctypes.c_void_p(a.ctypes.data) for a in (x["A"], x["B"], got)]
        assert f(*buffers, ctypes.c_int64(m), None, None) == 0
        assert (got == want).all()
    assert [f(*buffers, ctypes.c_int64(m), None, None) for m in (0, 41)] == [1, 1]


def test_a_workspace_of_the_callers_is_as_good_as_one_of_its_own(tmp_path: Path) -> None:
    op, schedule = CPU["partial sums joined by a second launch"]
    built(op, schedule, tmp_path)
    sh("gcc -shared f.o -o f.so -lm -fopenmp", tmp_path)
    lib = ctypes.CDLL(str(tmp_path / "f.so"))
    lib.f_workspace_bytes.restype = ctypes.c_int64
    n = lib.f_workspace_bytes()
    assert n == 4 * 16 * 24 * 4
    x = parse_op(op).inputs("integer", 1)
    want = parse_op(op).reference(x)["C"]
    got, space = want.astype("f4") * 0, ctypes.create_string_buffer(n + 64)
    at = (ctypes.addressof(space) + 63) // 64 * 64
    assert lib.f(*(ctypes.c_void_p(a.ctypes.data) for a in (x["A"], x["B"], got)), ctypes.c_void_p(at), None) == 0
    assert (got == want).all()
    assert any(space.raw)


def test_no_number_and_an_infinity_are_right_where_they_are_wanted_and_wrong_elsewhere(tmp_path: Path) -> None:
    op = "formula:m=4,n=64;X[m,n]:f32;Y[m,n]:f32=sqrt(X[m,n])"
    made = built(op, "", tmp_path)
    assert made.data is not None
    want = np.fromfile(made.data / "Y.want")
    assert np.isnan(want).any() and sh("./check data", tmp_path).returncode == 0
    given = np.fromfile(made.data / "X.in", np.float32)
    given[0], want[0] = np.inf, np.inf
    given.tofile(made.data / "X.in")
    for first, code in ((np.inf, 0), (np.nan, 4), (1.0, 4)):
        want[0] = first
        want.tofile(made.data / "Y.want")
        assert sh("./check data", tmp_path).returncode == code


@pytest.mark.parametrize(
    "name", ["int", "template", "malloc", "C", "error_of", "run_plan", "workspace", "emmy_x", "2x", ""]
)
def test_a_name_that_the_code_or_its_language_has_already_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"the exported name '{name}'"):
        emmy.export("matmul:16x8x8:f32", "", out=tmp_path / "out", name=name)
    assert not (tmp_path / "out").exists()


def test_an_export_replaces_an_earlier_one_of_its_name_and_mixes_with_nothing_else(tmp_path: Path) -> None:
    built(*CPU["an open size"], tmp_path / "own")
    built("matmul:16x8x8:f32", "", tmp_path / "own")  # of the same name; what was compiled of it is replaced, too
    for name, folder in (("g", tmp_path / "own"), ("f", tmp_path)):
        with pytest.raises(UsageError, match=r"holds .*own.*|holds README.md, check, check.c, \.\.\."):
            emmy.export("matmul:16x8x8:f32", "", out=folder, name=name)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text("mine")
    with pytest.raises(UsageError, match=r"holds README.md, which this export would be mixed with"):
        emmy.export("matmul:16x8x8:f32", "", out=tmp_path / "docs")
    with pytest.raises(UsageError, match="the folder's name is empty"):
        emmy.export("matmul:16x8x8:f32", "", out="")


# ---------------------------------------------------------------- CUDA
def test_exported_kernels_are_those_that_are_measured_but_for_their_names(tmp_path: Path) -> None:
    op, target = "matmul:m(1..256)x128x256:f16", load_target("h200")
    made = emmy.export(op, gpu="h200", out=tmp_path, name="some_name")
    schedule = re.search(r"// schedule: (.*)", made.source.read_text())
    assert schedule is not None
    measured = source(parse_op(op), schedule[1], target)
    assert measured.text in made.source.read_text().replace("some_name_k0", "k0")
    assert measured.digest in made.header.read_text()


def test_what_the_exported_launcher_asks_of_cuda_is_what_emmys_own_asks(tmp_path: Path) -> None:
    lines = (
        "sym m 1 500\nargument A 2 256 $0 *\nargument B 2 8192\nargument C 4 $0 128 *\n"
        "workspace parts 4 2 $0 * 128 *\nworkspace flags 4 7\n"
        "kernel k0 256 65536 $0 127 + 128 / 2 *\ncluster 2\nearly\n"
        "map A f16 128 32 2 : 256 : $0\nmap B bf16 64 64 3 : 64 : 128\npass parts\nsize m\n"
        "kernel k1 32 0 $0 3 min 4 max 9 % 1 -\nearly\n"
        "map A f16 64 32 1 4 : 256 : $0 : 512 : 3 : $0 512 * : 5 : 7\npass C\nsize m\npass flags\n"
    )
    (tmp_path / "plan").write_bytes(fake.plan("k0 listed 0 0 3 1\nk1 listed 0 0 2 1\n", lines))
    fake.run(
        "from emmy.runtime.launcher import LoadedPlan\n"
        f'plan = LoadedPlan({str(tmp_path / "plan")!r}, "cuda")\n'
        "for m, stream in ((300, 0x55), (2, 0)):\n    plan.run([0x1000, 0x2000, 0x3000], [m], stream=stream)\n",
        tmp_path,
        FAKE_CUDA_LOG=str(tmp_path / "log"),
    )
    head = read_head(["emmy-gpu-plan 2", *lines.splitlines()])
    (tmp_path / "host.cpp").write_text(
        f'{export_cuda.INCLUDES}extern "C" void k0() {{}}\nextern "C" void k1() {{ puts(""); }}\n'
        'Listed listed[] = {{(void *)k0, "k0", 3}, {(void *)k1, "k1", 2}, {}};\n'
        f"{export_cuda.host([head])}\n"
        "int main() {\n"
        "  void *arguments[] = {(void *)0x1000, (void *)0x2000, (void *)0x3000};\n"
        "  unsigned char *memory = NULL;\n"
        "  if (own_workspace(&memory) || own_workspace(&memory)) return 1;\n"
        "  const int64_t sizes[][1] = {{300}, {2}, {501}};\n"
        "  if (plan_0(arguments, sizes[0], memory, (cudaStream_t)0x55) || plan_0(arguments, sizes[1], memory, NULL)) return 1;\n"
        "  return plan_0(arguments, sizes[2], memory, NULL) != cudaErrorInvalidValue;\n}\n"
    )
    stub = Path(__file__).parent / "export_stub"
    done = sh(f"g++ -std=c++17 -w -I{stub} host.cpp -o host && ./host", tmp_path)
    assert done.returncode == 0, done.stderr

    def asked(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(("map", "further", "launch", "with", "given"))]

    ours, own = asked(done.stdout), asked((tmp_path / "log").read_text())
    for kind in (
        "map",
        "l",
        "w",
        "g",
        "p",
    ):  # Emmy's own describes all arrays to the copy engine before the first launch
        assert [x for x in ours if x.startswith(kind)] == [x for x in own if x.startswith(kind)]
    assert len(own) == 2 * (3 + 3 + 2 + 3 + 2)
    assert "attribute k0 8 65536" in done.stdout and done.stdout.count("allocate") == 1
    assert f"allocate {2 * 500 * 128 * 4 + 1024}" in done.stdout


def test_a_plans_head_is_read_as_it_was_written() -> None:
    op, target = parse_op("matmul:m(1..4096)x256x512:f16"), load_target("h200")
    plan = replay(op.program(), FINALIZE, target)
    kernels = tuple(k for k in source(op, FINALIZE, target).kernels if isinstance(k, GpuKernel))
    head = read_head(plan_lines(plan, kernels))
    assert [b.name for b in head.arguments] == ["A", "B", "C"]
    assert [(k.name, k.threads, k.smem_bytes) for k in head.kernels] == [
        (k.name, k.threads, k.smem_bytes) for k in kernels
    ]
    assert head.most_bytes(head.workspaces[0]) == 2 * 4096 * 256 * 4
    assert value(head.kernels[0].blocks, [65]) == 2 * 4 * 2
    assert infix(("$0", "63", "+", "64", "/"), ["m"]) == "((m + INT64_C(63)) / INT64_C(64))"
    with pytest.raises(DataError, match="line 2 of a plan file"):
        read_head(["emmy-gpu-plan 2", "kernel"])


@pytest.mark.parametrize("name", ["1st", "emmy_f", "plan_x", "a-b", "int", "main", ""])
def test_a_name_that_no_function_may_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"exported name .*: needed is"):
        emmy.export("matmul:8x8x8:f32", "", gpu="cpu", out=tmp_path, name=name)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("gpu", ["rtx4090", "rtx5090", "h100", "h200"])
@pytest.mark.parametrize("case", range(5))
def test_nvcc_builds_an_exported_plan(gpu: str, case: int, tmp_path: Path) -> None:
    op, schedule = (
        ("matmul:512x4096x3840:f16:nk", None),
        ("matmul:m(1..512)x256x512:f16", f"m 1..64: {FINALIZE} | m 65..512: {TILED}"),
        ("geglu:64x512x256:bf16:nk", None),
        ("attention:8x256x256x64:f16:causal,kv2", None),
        ("rms_norm:64x512:f16:residual", None),
    )[case]
    made = emmy.export(op, schedule, gpu=gpu, out=tmp_path)
    nvcc_builds(made)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_builds_what_two_exports_share_a_program_with(tmp_path: Path) -> None:
    for name in ("one", "two"):
        nvcc_builds(emmy.export("matmul:512x3840x15360:f16", STREAMK, gpu="h200", out=tmp_path / name, name=name))
    done = sh("nvcc -shared one/one.o two/two.o -o both.so", tmp_path)
    assert done.returncode == 0, done.stderr


def nvcc_builds(made: ExportedFiles) -> None:
    for command in (made.compiled_with, made.linked_with):
        done = sh(command, made.folder)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
