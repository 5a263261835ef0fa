"""What damage to a pack gives: a sentence, or the kernel compiled anew. Nothing that does not match its digest ever runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emmy.codegen import nvrtc
from emmy.errors import CompileError, PackError, WrongCard
from emmy.ir.ops import parse_op
from emmy.pack import Machine, Pack
from emmy.pack.archive import MANIFEST, sha256
from emmy.pack.schema import Code
from tests.pack import packs

Damage = Callable[[Path], object]


def of(kind: str) -> Callable[[dict[str, bytes]], str]:
    return lambda found: next(name for name in sorted(found) if name.startswith(kind))


def changed(kind: str) -> Damage:
    return lambda p: packs.rewritten(p, lambda f: f.update({of(kind)(f): packs.flipped(f, of(kind)(f))}))


def cut(p: Path) -> None:
    p.write_bytes(p.read_bytes()[:-100])


def unsealed(p: Path) -> None:
    packs.rewritten(p, lambda f: f.update({MANIFEST: packs.flipped(f, MANIFEST)}), sealed=False)


def edited(change: Callable[[Any], object]) -> Damage:
    return lambda p: packs.with_manifest(p, change)


def first_range(raw: Any) -> Any:
    return next(r for c in raw["cases"] for r in c["ranges"] if r["code"])


REFUSED: dict[str, tuple[Damage, str]] = {
    "no file": (Path.unlink, "No such file"),
    "an empty file": (lambda p: p.write_bytes(b""), "no zip, or is cut off"),
    "a file that is cut off": (cut, "no zip, or is cut off"),
    "another kind of file": (lambda p: packs.rewritten(p, lambda f: f.pop(MANIFEST)), "first member is not manifest.json"),
    "a changed byte in the manifest": (unsealed, "not the one it was built with"),
    "a manifest that is no JSON": (lambda p: packs.rewritten(p, lambda f: f.update({MANIFEST: b"{"})), "is no JSON"),
    "a manifest of something else": (edited(lambda raw: raw.update(format="wheel")), "not the manifest of a pack"),
    "a newer schema": (edited(lambda raw: raw.update(schema=2)), "its schema is 2, this Emmy reads 1: update Emmy"),
    "a field that is missing": (edited(lambda raw: first_range(raw)["code"].pop("launch")), "lacks fields, or has unknown ones"),
    "a field of another type": (edited(lambda raw: first_range(raw).update(lo="1")), "is '1', which is not int"),
    "ranges with a gap": (edited(lambda raw: raw["cases"][-1]["ranges"].pop(1)), "overlap, leave sizes out, or go beyond 1..24"),
    "ranges beyond the op's": (edited(lambda raw: raw["cases"][-1]["ranges"][-1].update(hi=25)), "go beyond 1..24"),
    "a kernel of other sizes": (edited(lambda raw: raw["cases"][-1]["ranges"][1].update(op=packs.LOST)), "not of these sizes"),
    "an op there twice": (edited(lambda raw: raw["cases"].append(raw["cases"][0])), "it is there twice"),
    "an op that nobody knows": (edited(lambda raw: raw["cases"][0].update(op="matmull:9x9")), "no op that this Emmy knows"),
    "arguments of another shape": (edited(lambda raw: raw["cases"][0]["arguments"][0]["shape"].reverse()), "arguments are not those of"),
    "a launch line that is two": (edited(lambda raw: first_range(raw)["code"].update(launch=["pass A\ncubin 0"])), "cannot be read"),
    "a number that is none": (edited(lambda raw: first_range(raw)["evidence"].update(time_us=float("nan"))), "NaN is no number"),
    "a number that is endless": (edited(lambda raw: first_range(raw)["evidence"].update(time_us=10**400)), "evidence.time_us is 1000"),
    "a size of more than 64 bits": (edited(lambda raw: first_range(raw).update(hi=1 << 63)), "is 9223372036854775808, which is not int"),
    "half of a character": (edited(lambda raw: first_range(raw).update(why="\ud800")), "why is '\\ud800', which is not str"),
    "a manifest as deep as a well": (lambda p: packs.rewritten(p, lambda f: f.update({MANIFEST: b"[" * 99999})), "is no JSON"),
    "a manifest that swells": (lambda p: packs.rewritten(p, lambda f: f.update({MANIFEST: b" " * (33 << 20)})), "is larger than"),
    "a member that is missing": (lambda p: packs.rewritten(p, lambda f: f.pop(of("binary")(f))), "is missing"),
    "a member that nothing names": (lambda p: packs.rewritten(p, lambda f: f.update({f"source/{'0' * 64}.c": b""})), "named by nothing"),
    "a member there twice": (lambda p: packs.rewritten(p, lambda f: None, twice=MANIFEST), "there twice"),
    "a path out of the folder": (lambda p: packs.rewritten(p, lambda f: f.update({"source/../../x.c": b""})), "none of a pack is"),
    "an absolute path": (lambda p: packs.rewritten(p, lambda f: f.update({"/etc/x.so": b""})), "none of a pack is"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", REFUSED)
def test_a_damaged_pack_is_refused_in_a_sentence_that_names_it(kind: str, tmp_path: Path) -> None:
    damage, said = REFUSED[kind]
    path = packs.cpu_pack(tmp_path)
    damage(path)
    with pytest.raises(PackError) as e:
        Pack.open(path)
    assert said in str(e.value) and str(path) in str(e.value)


def answer(pack: Pack) -> np.ndarray[Any, Any]:
    op = parse_op(packs.FIXED)
    inputs = op.inputs("integer", 0)
    out = np.zeros((9, 16), np.float16)
    plan = pack.plan(op)
    assert plan is not None
    plan({**inputs, plan.case.arguments[-1].name: out})
    return out


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", ["binary", "source"])
def test_a_changed_binary_is_compiled_from_its_source_and_a_changed_source_is_not_needed(
    kind: str, tmp_path: Path
) -> None:
    right = answer(Pack.open(packs.cpu_pack(tmp_path)))
    path = packs.cpu_pack(tmp_path)
    packs.rewritten(path, lambda f: f.update({n: packs.flipped(f, n) for n in f if n.startswith(kind)}))
    pack = Pack.open(path)
    assert np.array_equal(answer(pack), right)
    assert bool(pack.rebuilt) == (kind == "binary")
    assert all("not what the manifest says" in why for why in pack.rebuilt.values())


def test_a_changed_binary_and_a_changed_source_refuse(tmp_path: Path) -> None:
    path = packs.cpu_pack(tmp_path)
    packs.rewritten(path, lambda f: f.update({n: packs.flipped(f, n) for n in f if n != MANIFEST}))
    with pytest.raises(PackError, match=r"source/\w+\.c is not what the manifest says"):
        answer(Pack.open(path))


def test_a_kernel_of_another_op_is_not_handed_memory(tmp_path: Path) -> None:
    """Digests and ranges match, but one op has the other's code."""

    def swap(raw: Any) -> None:
        guessed, last = raw["cases"][2]["ranges"][0], raw["cases"][-1]["ranges"][-1]
        guessed["code"] = last["code"]

    path = packs.with_manifest(packs.cpu_pack(tmp_path), swap)
    with pytest.raises(PackError, match=r"its kernel .* the kernel is of another op"):
        Pack.open(path, unmeasured=True).plan(packs.GUESSED)


def test_no_changed_byte_makes_anything_else_run(tmp_path: Path) -> None:
    whole = packs.cpu_pack(tmp_path).read_bytes()
    good = {
        c.binary: Pack.open(tmp_path / "p.emmypack").binary(c)
        for c in Pack.open(tmp_path / "p.emmypack").manifest.codes
    }
    rng = random.Random(0)
    ends = len(whole) - 3000  # names and sizes stand at the end
    refused = 0
    for at in [rng.randrange(len(whole)) for _ in range(60)] + [rng.randrange(ends, len(whole)) for _ in range(100)]:
        (tmp_path / "p.emmypack").write_bytes(
            whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        )
        try:
            pack = Pack.open(tmp_path / "p.emmypack")
            for code in pack.manifest.codes:
                assert pack.binary(code) == good[code.binary]
                assert sha256(pack.source(code).encode()) == code.source
        except PackError:
            refused += 1
    assert refused > 120


# ---------------------------------------------------------------- the device
def first(pack: Pack, op: str = "matmul:m") -> Code:
    return next(r.code for c in pack.cases for r in c.ranges if r.code and c.op.startswith(op))


def test_a_cubin_is_taken_as_it_is_only_on_its_architecture_and_a_driver_of_its_age(tmp_path: Path) -> None:
    path = packs.gpu_pack(tmp_path)
    for here, why in (
        (packs.H200, ""),
        (replace(packs.H200, cuda="13.2"), ""),
        (Machine("NVIDIA GeForce RTX 4090", "sm_89", "", "13.0"), "binaries are of sm_90a, this is sm_89"),
        (Machine("NVIDIA GeForce RTX 5090", "sm_120", "", "13.0"), "binaries are of sm_90a, this is sm_120"),
    ):
        pack = Pack.open(path, here=here, unmeasured=True)
        made = pack.library(first(pack)).read_bytes()
        assert list(pack.rebuilt.values()) == [why] * bool(why)
        assert made.endswith(pack.binary(first(pack))) == (not why)
        assert made.startswith("\n".join(first(pack).launch).encode())


def test_another_card_is_refused_unless_asked_for_and_no_card_is_no_such_device(tmp_path: Path) -> None:
    path = packs.gpu_pack(tmp_path)
    with pytest.raises(WrongCard, match=r"for NVIDIA H200 \(sm_90a\), this is NVIDIA H100 \(sm_90\)"):
        Pack.open(path, here=replace(packs.H200, product="NVIDIA H100")).plan("matmul:64x128x128:f16")
    with pytest.raises(WrongCard, match="Emmy compiles for sm_80"):
        pack = Pack.open(path, here=Machine("Tesla V100", "sm_70", "", "13.0"), unmeasured=True)
        pack.library(first(pack))


def test_what_only_its_architecture_has_cannot_be_compiled_for_another(tmp_path: Path) -> None:
    pack = Pack.open(packs.gpu_pack(tmp_path), here=Machine("GeForce", "sm_120", "", "13.0"), unmeasured=True)
    with pytest.raises(PackError, match=r"must be compiled from its source \(binaries are of sm_90a.*and cannot be"):
        pack.library(first(pack, "matmul:64"))


def test_a_driver_older_than_the_binaries_and_than_the_compiler_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = Pack.open(packs.gpu_pack(tmp_path), here=replace(packs.H200, cuda="12.4"))
    with pytest.raises(PackError, match=r"CUDA 13\.0, this driver runs up to 12\.4.*update the driver"):
        pack.library(first(pack))
    monkeypatch.setattr("emmy.pack.machine.nvrtc_version", lambda: "12.4")  # a compiler of the driver's age
    assert pack.library(first(pack)) and pack.rebuilt


def test_without_a_compiler_a_damaged_cubin_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise CompileError("the CUDA compiler is not installed. Install it with `pip install 'emmy[cuda]'`")

    path = packs.gpu_pack(tmp_path)
    packs.rewritten(path, lambda f: f.update({n: packs.flipped(f, n) for n in f if n.startswith("binary")}))
    monkeypatch.setattr("emmy.pack.machine.nvrtc_version", missing)
    pack = Pack.open(path, here=packs.H200)
    with pytest.raises(PackError, match="pip install"):
        pack.library(first(pack))


def test_a_cubin_of_another_architecture_under_a_right_digest_is_not_loaded(tmp_path: Path) -> None:
    path = packs.gpu_pack(tmp_path)
    code = first(Pack.open(path))
    other = nvrtc.compile_cubin(Pack.open(path).source(code), "sm_89").data

    def swap(found: dict[str, bytes]) -> None:
        found[MANIFEST] = found[MANIFEST].replace(code.binary.encode(), sha256(other).encode())
        found.pop(f"binary/sm_90a/{code.binary}.cubin")
        found[f"binary/sm_90a/{sha256(other)}.cubin"] = other

    pack = Pack.open(packs.rewritten(path, swap), here=packs.H200)
    assert sha256(other).encode() not in pack.library(first(pack)).read_bytes()
    assert "is of sm_89, the pack of sm_90a" in next(iter(pack.rebuilt.values()))
