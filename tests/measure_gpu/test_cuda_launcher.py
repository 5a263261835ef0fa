"""The launcher's CUDA backend against a stand-in driver: what it asks of the driver, and what it says when refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.measure_gpu import fake

LOADING = """
import json, sys
from emmy.runtime.launcher import LaunchError, LoadedPlan
"""

TWO_LAUNCHES = (
    "sym m 1 500\n"
    "argument A 2 64 $0 *\nargument B 2 8192\nargument C 4 $0 128 *\n"
    "workspace parts 4 2 $0 * 128 *\n"
    "kernel k0 256 65536 $0 127 + 128 / 2 *\n"
    "map A f16 128 32 2 : 64 : $0\nmap B bf16 64 64 3 : 64 : 128\npass parts\nsize m\n"
    "kernel k1 32 0 $0 3 min 4 max\npass parts\npass C\n"
)


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_every_launch_gets_its_grid_memory_maps_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(fake.plan("k0 listed 0 0 3 1\nk1 listed 0 0 0 1\n", TWO_LAUNCHES))
    out = fake.run(
        LOADING
        + f"""
with LoadedPlan({str(tmp_path / "plan")!r}, "cuda") as plan:
    print(json.dumps([plan.arguments, plan.syms, plan.n_launches, plan.argument_bytes([300])]))
    call = plan.bind([0x1000, 0x2000, 0x3000], [300], stream=0x55)
    call(); call()
    plan.run([0x1000, 0x2000, 0x3000], [2])
""",
        tmp_path,
        FAKE_CUDA_LOG=str(tmp_path / "log"),
    )
    assert json.loads(out) == [["A", "B", "C"], ["m"], 2, [300 * 64 * 2, 8192 * 2, 300 * 128 * 4]]
    maps = [
        "map type 6 rank 2 dims 64 {m} stride 128 box 32 128 every 1 1 interleave 0 swizzle 2 promotion 3 fill 0 aligned 1",
        "map type 9 rank 2 dims 64 128 stride 128 box 64 64 every 1 1 interleave 0 swizzle 3 promotion 3 fill 0 aligned 1",
    ]
    launches = [
        "launch k0 grid {k0} 1 1 block 256 1 1 smem 65536 stream {stream} attributes 0",
        "given 1000 2000 {m}",
        "launch k1 grid {k1} 1 1 block 32 1 1 smem 0 stream {stream} attributes 0",
    ]
    lines = log(tmp_path)
    parts = next(line for line in lines if line.startswith("given") and not line.startswith("given 1000")).split()[1]
    assert int(parts, 16) > 0x10000  # the workspace's own address

    def text(pattern: list[str], **at: object) -> list[str]:
        return [line.format(**at) for line in pattern]

    seen = [line for line in lines if not line.startswith(f"given {parts}")]
    first, second = {"m": 300, "k0": 6, "k1": 4, "stream": "0x55"}, {"m": 2, "k0": 2, "k1": 4, "stream": "(nil)"}
    assert seen == [
        "retain 0",
        "load 2",
        "attribute k0 8 65536",
        f"allocate {2 * 500 * 128 * 4}",
        *text(maps, **first),
        *text(launches, **first),
        *text(launches, **first),  # the same arguments are not described to the copy engine again
        *text(maps, **second),
        "stream (nil) waits",  # for the runs before it, with which it shares the workspace
        *text(launches, **second),
        "free",
        "unload",
        "release 0",
    ]


def test_a_run_that_is_captured_waits_for_none_and_none_for_it(tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(fake.plan("k0 listed 0 0 3 1\nk1 listed 0 0 0 1\n", TWO_LAUNCHES))
    fake.run(
        LOADING
        + f"""
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
with LoadedPlan({str(tmp_path / "plan")!r}, "cuda") as plan:
    first, second = (plan.bind([0x1000, 0x2000, 0x3000], [300], stream=s) for s in (0x55, 0x66))
    first()
    driver.cuStreamBeginCapture_v2(ctypes.c_void_p(0x66), 0)
    second()
    driver.cuStreamEndCapture(ctypes.c_void_p(0x66), ctypes.byref(ctypes.c_void_p()))
    first()
    second()
""",
        tmp_path,
        FAKE_CUDA_LOG=str(tmp_path / "log"),
    )
    streams = [line.split(" stream ")[1].split()[0] for line in log(tmp_path) if line.startswith("launch k0")]
    assert streams == ["0x55", "0x66", "0x55", "0x66"]
    assert [line for line in log(tmp_path) if "waits" in line] == ["stream 0x66 waits"]


def test_a_box_of_several_panels_is_described_in_three_dimensions(tmp_path: Path) -> None:
    lines = "sym m 1 500\nargument A 2 256 $0 *\nkernel k0 32 0 1\nmap A f16 64 32 2 3 : 256 : $0\nmap A f16 64 64 3 : 256 : $0\n"
    (tmp_path / "plan").write_bytes(fake.plan("k0 nothing 0 0 0 1\n", lines))
    fake.run(
        LOADING + f'LoadedPlan({str(tmp_path / "plan")!r}, "cuda").run([0x1000], [300])',
        tmp_path,
        FAKE_CUDA_LOG=str(tmp_path / "log"),
    )
    maps = [line for line in log(tmp_path) if line.startswith(("map", "further"))]
    end = "interleave 0 swizzle {} promotion 3 fill 0 aligned 1"
    assert maps == [
        f"map type 6 rank 3 dims 32 300 stride 512 box 32 64 every 1 1 {end.format(2)}",
        "further dim 8 stride 64 box 3 every 1",
        f"map type 6 rank 2 dims 256 300 stride 512 box 64 64 every 1 1 {end.format(3)}",
    ]


def test_a_map_of_more_axes_has_strides_of_its_own(tmp_path: Path) -> None:
    """Rows of a token's head lie a whole token apart; batches follow, or panels and then batches and heads."""
    lines = "sym m 1 500\nargument A 2 12800 $0 *\nkernel k0 32 0 1\n"
    lines += "map A f16 64 32 2 : 128 : $0 : 1024 : 8 : 128\nmap A f16 64 64 3 2 : 128 : $0 : 128 : 4 : $0 128 * : 25 : 4 $0 * 128 *\n"
    (tmp_path / "plan").write_bytes(fake.plan("k0 nothing 0 0 0 1\n", lines))
    fake.run(
        LOADING + f'LoadedPlan({str(tmp_path / "plan")!r}, "cuda").run([0x1000], [300])',
        tmp_path,
        FAKE_CUDA_LOG=str(tmp_path / "log"),
    )
    end = "interleave 0 swizzle {} promotion 3 fill 0 aligned 1"
    assert [line for line in log(tmp_path) if line.startswith(("map", "further"))] == [
        f"map type 6 rank 3 dims 128 300 stride 2048 box 32 64 every 1 1 {end.format(2)}",
        "further dim 8 stride 256 box 1 every 1",
        f"map type 6 rank 5 dims 64 300 stride 256 box 64 64 every 1 1 {end.format(3)}",
        "further dim 2 stride 128 box 2 every 1",
        "further dim 4 stride 76800 box 1 every 1",
        "further dim 25 stride 307200 box 1 every 1",
    ]


@pytest.mark.parametrize(
    "box",
    [
        "64 32 2 0",
        "64 0 2 3",
        "64 32 2 -",
        "64 32",
        "1 8 0 : 8 : 2 : 8 : 2",
        "1 8 0 : 8 : 2" + " : 8" * 9,
        "1 8 0 1 : 8 : 2" + " : 8" * 7,
    ],
)
def test_a_map_without_a_box_is_refused(box: str, tmp_path: Path) -> None:
    end = "" if ":" in box else " : 16 : 16"
    lines = f"argument A 2 256\nkernel k0 32 0 1\nmap A f16 {box}{end}\n"
    (tmp_path / "plan").write_bytes(fake.plan("k0 nothing 0 0 0 1\n", lines))
    out = fake.run(
        LOADING
        + f"""
try:
    LoadedPlan({str(tmp_path / "plan")!r}, "cuda")
except LaunchError as e:
    print(e)
""",
        tmp_path,
    )
    assert "line 4 cannot be read" in out


def test_a_launch_asks_for_its_cluster_and_to_begin_early(tmp_path: Path) -> None:
    lines = "kernel k0 32 0 4\ncluster 2\nearly\nkernel k1 32 0 1\nearly\nkernel k2 32 0 8\ncluster 8\n"
    (tmp_path / "plan").write_bytes(fake.plan("".join(f"k{i} nothing 0 0 0 1\n" for i in range(3)), lines))
    fake.run(
        LOADING + f'LoadedPlan({str(tmp_path / "plan")!r}, "cuda").run([])',
        tmp_path,
        FAKE_CUDA_LOG=str(tmp_path / "log"),
    )
    asked = [line for line in log(tmp_path) if line.startswith(("launch", "with"))]
    assert [line.split()[1] if line.startswith("launch") else line for line in asked] == [
        "k0", "with 4 2 1 1", "with 6 1 0 0", "k1", "with 6 1 0 0", "k2", "with 4 8 1 1",
    ]  # fmt: skip


def test_a_plan_computes_on_the_memory_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(fake.matmul_plan("right", 3, 4, 5))
    out = fake.run(
        LOADING
        + f"""
import numpy as np
from emmy.runtime.cuda_driver import Context
gpu = Context()
a, b, c = np.arange(15, dtype=np.float32).reshape(3, 5), np.ones((5, 4), np.float32), np.zeros((3, 4), np.float32)
at = [gpu.allocate(x.nbytes) for x in (a, b, c)]
gpu.write(at[0], a); gpu.write(at[1], b); gpu.fill(at[2], 0xFF, c.nbytes)
call = LoadedPlan({str(tmp_path / "plan")!r}, "cuda").bind(at, stream=gpu.stream)
graph = gpu.capture(lambda: (call(), call()))
gpu.read(at[2], c); assert np.isnan(c).all()
print(gpu.time_ms(graph.launch), gpu.time_ms(call))
gpu.read(at[2], c); assert np.array_equal(c, a @ b)
""",
        tmp_path,
    )
    assert [round(float(x), 6) for x in out.split()] == [0.02, 0.01]


REFUSED = {
    "too_large": (
        "k0 too_large 3 4 5 1\n",
        "CUDA error 701, too many resources requested for launch, while launching k0",
    ),
    "missing": ("k1 right 3 4 5 1\n", "CUDA error 500, named symbol not found, while looking for kernel k0"),
    "other_gpu": ("", "CUDA error 209"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_driver_refuses_is_said_in_words(name: str, tmp_path: Path) -> None:
    kernels, words = REFUSED[name]
    whole = fake.matmul_plan("right", 3, 4, 5)
    text = whole[: whole.index(b"cubin")]
    (tmp_path / "plan").write_bytes(text + f"cubin {len(kernels)}\n{kernels}".encode())
    out = fake.run(
        LOADING
        + f"""
try:
    LoadedPlan({str(tmp_path / "plan")!r}, "cuda").run([1 << 20, 2 << 20, 3 << 20])
except LaunchError as e:
    print(e.cuda, e)
""",
        tmp_path,
    )
    assert words in out
    assert out.split()[0] == words.split()[2].rstrip(",")


def test_sizes_outside_the_range_that_a_plan_serves_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan").write_bytes(fake.plan("k0 nothing 0 0 0 1\nk1 nothing 0 0 0 1\n", TWO_LAUNCHES))
    out = fake.run(
        LOADING
        + f"""
plan = LoadedPlan({str(tmp_path / "plan")!r}, "cuda")
for m in (0, 501):
    try:
        plan.run([1 << 20, 2 << 20, 3 << 20], [m])
    except LaunchError as e:
        print(e)
""",
        tmp_path,
    )
    assert "m is 0, this plan serves 1..500" in out
    assert "m is 501, this plan serves 1..500" in out


def test_a_table_launches_the_plan_of_the_range_which_stays_bound(tmp_path: Path) -> None:
    one = "argument A 2 64\nargument C 4 128\nkernel k0 32 0 7\npass A\npass C\n"  # a single size asks for none
    many = "sym m 2 500\nargument A 2 64 $0 *\nargument C 4 $0 128 *\nkernel k0 64 0 $0\npass A\npass C\nsize m\n"
    for name, lines in (("one", one), ("many", many)):
        (tmp_path / name).write_bytes(fake.plan("k0 nothing 0 0 0 1\n", lines))
    out = fake.run(
        LOADING
        + f"""
from pathlib import Path
from emmy.runtime.table import LoadedTable, PlanRange
folder = Path({str(tmp_path)!r})
with LoadedTable("m", [PlanRange(1, 1, folder / "one"), PlanRange(2, 500, folder / "many")], "cuda") as table:
    print(json.dumps([table.arguments, table.syms, table.argument_bytes([1]), table.argument_bytes([3])]))
    for m in (1, 2, 500, 1):
        table.run([0x1000, 0x2000], [m], stream=0x55)
    call = table.bind([0x1000, 0x2000], [500])
    call._syms[0] = 501
    try:
        call()
    except LaunchError as e:
        print(e)
""",
        tmp_path,
        FAKE_CUDA_LOG=str(tmp_path / "log"),
    )
    first, refused = out.splitlines()
    assert json.loads(first) == [["A", "C"], ["m"], [128, 512], [3 * 128, 3 * 512]]
    assert "m is 501, this table serves 1..500" in refused
    launches = [line.split()[3:9] for line in log(tmp_path) if line.startswith("launch")]
    assert [(grid[0], grid[4]) for grid in launches] == [("7", "32"), ("2", "64"), ("500", "64"), ("7", "32")]
    assert sum(line.startswith("load") for line in log(tmp_path)) == 2 == log(tmp_path).count("unload")


BROKEN = {
    b"": "another kind of file",
    b"emmy-gpu-plan 1\n": "version is 1, this Emmy reads 2",
    b"emmy-gpu-plan 2\n": "ends without a cubin",
    b"emmy-gpu-plan 2\ncubin 7\nabc": "cubin is not of the size",
    b"emmy-gpu-plan 2\nargument A 2 3 +\ncubin 0\n": "line 2 cannot be read",
    b"emmy-gpu-plan 2\nargument A 2 $0\ncubin 0\n": "line 2 cannot be read",
    b"emmy-gpu-plan 2\nargument A 2 99999999999999999999\ncubin 0\n": "a number is too large",
    b"emmy-gpu-plan 2\npass A\ncubin 0\n": "line 2 cannot be read",
    b"emmy-gpu-plan 2\nargument A 2 3\nkernel k0 1 0 1\nmap A f64 1 1 0 : 1 : 1\ncubin 0\n": "line 4 cannot be read",
    b"emmy-gpu-plan 2\nkernel k0 1 0 1\nsize n\ncubin 0\n": "line 3 cannot be read",
    b"emmy-gpu-plan 2\nhello\ncubin 0\n": "line 2 cannot be read",
    b"emmy-gpu-plan 2\nearly\ncubin 0\n": "line 2 cannot be read",
    b"emmy-gpu-plan 2\nkernel k0 1 0 1\ncluster 0\ncubin 0\n": "line 3 cannot be read",
}


def test_what_is_no_gpu_plan_is_refused_with_the_line(tmp_path: Path) -> None:
    for i, data in enumerate(BROKEN):
        (tmp_path / f"{i}").write_bytes(data or b"\x7fELF nothing\n")
    out = fake.run(
        LOADING
        + f"""
for i in range({len(BROKEN) + 1}):
    try:
        LoadedPlan({str(tmp_path)!r} + f"/{{i}}", "cuda")
    except LaunchError as e:
        print(e)
""",
        tmp_path,
    )
    said = out.splitlines()
    assert len(said) == len(BROKEN) + 1
    for words, line in zip(BROKEN.values(), said, strict=False):
        assert words in line
    assert "missing" in said[-1]


def test_a_machine_without_a_driver_says_so(tmp_path: Path) -> None:
    script = (
        LOADING
        + f"""
try:
    LoadedPlan({str(tmp_path / "plan")!r}, "cuda")
except LaunchError as e:
    print(e)
from emmy.runtime.cuda_driver import gpus
print(gpus())
"""
    )
    import ctypes.util
    import subprocess
    import sys

    if ctypes.util.find_library("cuda"):
        pytest.skip("this machine has a driver")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "no NVIDIA driver: libcuda.so.1 is not found" in done.stdout
    assert "()" in done.stdout
