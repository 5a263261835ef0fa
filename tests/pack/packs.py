"""Small packs to test with, and the same with something else in the place of a member."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from emmy.codegen.build import source
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.pack import Choice, Evidence, Machine, Offer, Pack
from emmy.pack.archive import MANIFEST, sha256

TILED = (
    "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,32) k0/split(m,warp,32) k0/split(n,warp,32) "
    "k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(mma,16,8,16)"
)
WGMMA = (
    "k0/split(m,grid,64) k0/split(n,grid,128) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/split(n,warpgroup,128) "
    "k0/stage(A,tma,4) k0/stage(B,tma,4,panels) k0/specialize(1,0,0) k0.C/atom(wgmma,64,128,16)"
)
H200 = Machine("NVIDIA H200", "sm_90", "", "13.0")
OPEN, FIXED, LOST, GUESSED = (
    "matmul:m(1..24)x16x32:f32",
    "geglu:9x16x24:f16:nk",
    "matmul:3x16x32:f32",
    "matmul:5x16x32:f32",
)


def evidence(op: str, schedule: str, target: str, **changes: Any) -> Evidence:
    made: dict[str, Any] = {
        "origin": "measured", "op": op, "source": source(parse_op(op), schedule, load_target(target)).digest, "time_us": 10.0,
        "samples_us": (9.0, 10.0, 11.0), "low_us": None, "high_us": None, "stock": "torch", "stock_us": 12.0, "ratio": 1.2,
        "ratio_low": 1.1, "ratio_high": 1.3, "rivals": {}, "error": 0.2, "protocol": {"cache": "cold", "repeats": 7},
        "product": load_target(target).product, "driver": "", "toolkit": "", "emmy": "0.1.0",
        "time_utc": "2026-11-30T00:00:00.000+00:00", "rows": 1, "row": "0" * 32, "note": "",
    }  # fmt: skip
    return Evidence(**{**made, **changes})


def won(op: str, schedule: str, target: str, lo: int = 0, hi: int = 0, **changes: Any) -> Choice:
    return Choice(lo, hi, parse_op(op), schedule, "", evidence(op, schedule, target, **changes))


def cpu_offers() -> tuple[Offer, ...]:
    """One row is stock's, then two ranges; a fixed op; one that lost; one that is only predicted."""
    tiles = "k0/split(m,core,8)"
    part = OPEN.replace("1..24", "{}").format
    left = Choice(1, 1, parse_op("matmul:1x16x32:f32"), "", "no win: 0.9 times")
    ranges = (left, won(part("2..8"), tiles, "cpu", 2, 8), won(part("9..24"), "k0/split(n,core,8)", "cpu", 9, 24))
    return (
        Offer(parse_op(OPEN), "m", ranges),
        Offer(parse_op(FIXED), "", (won(FIXED, "k0/split(n,core,8)", "cpu"),)),
        Offer(parse_op(LOST), "", (Choice(0, 0, parse_op(LOST), tiles, "no win: 0.9 times"),)),
        Offer(parse_op(GUESSED), "", (won(GUESSED, "k0/split(n,core,8)", "cpu", origin="predicted"),)),
    )


@cache
def _cpu() -> bytes:
    return _bytes(lambda path: Pack.build(cpu_offers(), path, load_target("cpu")))


@cache
def _gpu() -> bytes:
    mma, wgmma = "matmul:m(1..256)x64x96:f16", "matmul:64x128x128:f16"
    offers = (
        Offer(parse_op(mma), "m", (won(mma, TILED, "h200", 1, 256),)),
        Offer(parse_op(wgmma), "", (won(wgmma, WGMMA, "h200"),)),
    )
    return _bytes(lambda path: Pack.build(offers, path, load_target("h200")))


def _bytes(build: Callable[[Path], object]) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "made.emmypack")
        assert [p.name for p in Path(folder).iterdir()] == ["made.emmypack"]
        return (Path(folder) / "made.emmypack").read_bytes()


def cpu_pack(folder: Path) -> Path:
    return _put(folder, _cpu())


def gpu_pack(folder: Path) -> Path:
    """Two small products for an H200, one of them with instructions that only its architecture has."""
    return _put(folder, _gpu())


def _put(folder: Path, data: bytes) -> Path:
    path = folder / "p.emmypack"
    path.write_bytes(data)
    return path


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as z:
        return {name: z.read(name) for name in z.namelist()}


def rewritten(
    path: Path, change: Callable[[dict[str, bytes]], object], *, sealed: bool = True, twice: str = ""
) -> Path:
    """The pack with other members, as somebody who knows the format would write it: `sealed` with the manifest's digest."""
    found = members(path)
    change(found)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in found.items():
            z.writestr(name, data)
        if twice:
            z.writestr(twice, found[twice])
        digest = sha256(found.get(MANIFEST, b"")) if sealed else "0" * 64
        z.comment = f"emmy-pack sha256 {digest}".encode()
    path.write_bytes(out.getvalue())
    return path


def with_manifest(path: Path, change: Callable[[Any], object]) -> Path:
    """The pack with another manifest, and what that names."""

    def edit(found: dict[str, bytes]) -> None:
        raw = json.loads(found[MANIFEST])
        change(raw)
        found[MANIFEST] = json.dumps(raw).encode()
        codes = [r["code"] for c in raw["cases"] for r in c["ranges"] if r["code"]]
        named = {code[kind] for code in codes for kind in ("source", "binary")}
        for name in [n for n in found if n != MANIFEST and Path(n).stem not in named]:
            del found[name]

    return rewritten(path, edit)


def flipped(data: Mapping[str, bytes], name: str) -> bytes:
    """The member with one bit changed in its middle."""
    raw = bytearray(data[name])
    raw[len(raw) // 2] ^= 1
    return bytes(raw)
