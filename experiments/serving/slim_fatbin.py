"""Leaves in a shared object only the GPU code that one architecture runs, so that the file packs to a fraction.

    python experiments/serving/slim_fatbin.py FROM.so TO.so 90

Each container of the section .nv_fatbin keeps the entries that a driver for the architecture would choose: the cubins of the
highest one that fits, else the newest PTX that fits, else the smallest entry, since no container may be empty. Its size field
says so, and the bytes behind are zeros: the file's size and all offsets stay. Needs readelf.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2


@dataclass(frozen=True, slots=True)
class Entry:
    """Code for one architecture, 90 for sm_90, at a place in the file."""

    at: int
    n_bytes: int
    kind: int
    arch: int


def containers(data: bytes, begin: int, end: int) -> Iterator[tuple[int, int, list[Entry]]]:
    """Of each container where it is, where its entries begin, and the entries."""
    at = begin
    while at < end - 16:
        if struct.unpack_from("<I", data, at)[0] != MAGIC:
            at += 8
            continue
        head, body = struct.unpack_from("<HQ", data, at + 6)
        first, stop = at + head, at + head + body
        entries, here = [], first
        while here < stop:
            kind, _, own_head, size = struct.unpack_from("<HHIQ", data, here)
            entries.append(Entry(here, own_head + size, kind, struct.unpack_from("<I", data, here + 28)[0]))
            here += own_head + size
        yield at, first, entries
        at = stop


def chosen(entries: Sequence[Entry], arch: int) -> list[Entry]:
    """What a driver for the architecture would take; cubins run on later minor versions of their major one, PTX on all later ones."""
    cubins = [e for e in entries if e.kind == CUBIN and e.arch <= arch and e.arch // 10 == arch // 10]
    ptx = [e for e in entries if e.kind == PTX and e.arch <= arch]
    best = max((e.arch for e in cubins), default=0)
    return [e for e in cubins if e.arch == best] or ([max(ptx, key=_arch)] if ptx else [min(entries, key=_bytes)])


def _arch(e: Entry) -> int:
    return e.arch


def _bytes(e: Entry) -> int:
    return e.n_bytes


def slim(data: bytearray, begin: int, end: int, arch: int) -> tuple[int, int]:
    """Bytes of code that were kept and that were there."""
    kept = there = 0
    for at, first, entries in list(containers(bytes(data), begin, end)):
        body = b"".join(data[e.at : e.at + e.n_bytes] for e in chosen(entries, arch))
        size = sum(e.n_bytes for e in entries)
        data[first : first + size] = body.ljust(size, b"\0")
        struct.pack_into("<Q", data, at + 8, len(body))
        kept, there = kept + len(body), there + size
    return kept, there


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("arch", type=int, help="90 for sm_90")
    args = parser.parse_args()
    sections = subprocess.check_output(["readelf", "-SW", args.source], text=True)
    found = re.search(r"\.nv_fatbin\s+PROGBITS\s+[0-9a-f]+\s+([0-9a-f]+)\s+([0-9a-f]+)", sections)
    assert found, f"{args.source} holds no GPU code"
    begin, size = (int(x, 16) for x in found.groups())
    data = bytearray(args.source.read_bytes())
    kept, there = slim(data, begin, begin + size, args.arch)
    args.target.write_bytes(data)
    sys.stderr.write(f"{args.target.name}: {kept / 2**20:.1f} of {there / 2**20:.1f} MiB kept for sm_{args.arch}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
