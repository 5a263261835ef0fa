"""Faults planted in the tests' kernels: one edit of the text each, and how the emulator may notice it.

`kinds` are the errors that count as noticing; "wrong" is a wrong result. The first schedule that notices decides.
"""

from __future__ import annotations

from dataclasses import dataclass

Edit = tuple[str, str]


@dataclass(frozen=True)
class Bug:
    case: str
    what: str
    edits: tuple[Edit, ...]
    kinds: tuple[str, ...]


def _bugs(case: str, *rows: tuple[str, str, str, str]) -> tuple[Bug, ...]:
    """Rows of (what, text, its replacement, kinds by spaces)."""
    return tuple(Bug(case, what, ((old, new),), tuple(kinds.split())) for what, old, new, kinds in rows)


_SYNC = "    emmy_syncthreads();\n"
_MEET = "    emmy_syncwarp();\n"
_FENCE = "    emmy_fence_async();\n" + _MEET
_ARRIVE = "    if (lane == 0) emmy_mbar_arrive(empty + s % 3 * 8);\n"
_RELEASE = _FENCE + _ARRIVE

BUGS: tuple[Bug, ...] = (
    *_bugs(
        "ring",
        ("no syncthreads in the loop", _SYNC, "", "race"),
        ("cp.async waits for one group too few", "emmy_cp_async_wait<1>()", "emmy_cp_async_wait<2>()", "race"),
        ("cp.async is not waited for", "emmy_cp_async_wait<1>();", "", "race"),
        ("cp.async is not committed", "k, s + 2);\n    emmy_cp_async_commit();", "k, s + 2);", "race copy"),
        ("the slot in use is refilled", "(s + 2) % 3 * 6144", "(s + 3) % 3 * 6144", "race"),
        ("the next slot is read", "slot = smem + s % 3", "slot = smem + (s + 1) % 3", "race"),
        ("a ring of four in room for three", "(s + 2) % 3 * 6144", "(s + 2) % 4 * 6144", "bounds"),
        ("slots are not aligned", "s % 3 * 6144", "s % 3 * 6148", "alignment"),
        ("B is written without its swizzle", "place(t / 4, t % 4)", "t * 16", "wrong"),
        ("A is read without its swizzle", "slot + place(wm", "slot + 0 * place(0, 0) + 64 * (wm", "alignment wrong"),
        ("a fragment's rows repeat", "wm + i * 16 + lane % 16", "wm + i * 16 + lane % 8", "wrong"),
        ("halves of a fragment are exchanged", "kk * 2 + lane / 8 % 2", "kk * 2 + 1 - lane / 8 % 2", "wrong"),
        ("a fragment is transposed", "emmy_ldmatrix_x4(fb", "emmy_ldmatrix_x4_trans(fb", "wrong"),
        (
            "half of a warp multiplies",
            "emmy_mma_f32_f16(acc",
            "if (lane < 16) emmy_mma_f32_f16(acc",
            "divergent deadlock",
        ),
        ("half of the warps synchronise", _SYNC, "    if (warp < 2) emmy_syncthreads();\n", "race deadlock divergent"),
        ("a store leaves out the guard", "r, row < m)", "r, true)", "bounds"),
        (
            "a load reads rows that are not there",
            "? 16 : 0",
            "? 16 : 16 + 0 * (from = a + (i64)(m0 + row) * k, 1)",
            "bounds",
        ),
        ("a result's row is off", "lane / 4 + h * 8", "lane / 4 + h * 4", "wrong"),
        ("a store is not aligned", "(i64)row * n + col", "(i64)row * n + col + 1", "alignment bounds"),
        ("the last step is left out", "steps = k / 32", "steps = k / 32 - 1", "wrong"),
    ),
    *_bugs(
        "tma_ring",
        (
            "a reader waits for the wrong parity",
            "s / 3 & 1);\n    multiply",
            "(s / 3 & 1) ^ 1);\n    multiply",
            "race deadlock",
        ),
        ("a reader does not wait", "    emmy_mbar_wait(full + s % 3 * 8, s / 3 & 1);\n", "", "race"),
        ("the producer does not wait", "        emmy_mbar_wait(empty + s % 3 * 8, (s / 3 & 1) ^ 1);\n", "", "race"),
        ("the producer waits for the wrong parity", "(s / 3 & 1) ^ 1", "s / 3 & 1", "deadlock"),
        ("too few bytes are expected", "expect_tx(bar, 12288)", "expect_tx(bar, 8192)", "race"),
        ("too many bytes are expected", "expect_tx(bar, 12288)", "expect_tx(bar, 16384)", "deadlock"),
        (
            "a copy reports to the next slot's barrier",
            "bar = full + s % 3 * 8",
            "bar = full + (s + 1) % 3 * 8",
            "race deadlock",
        ),
        ("a lane releases for its warp early", "    emmy_syncwarp();\n", "", "race"),
        (
            "a slot is released before it is read",
            "    multiply(acc, slot, slot + 8192, warp, lane);\n" + _RELEASE,
            _RELEASE + "    multiply(acc, slot, slot + 8192, warp, lane);\n",
            "race",
        ),
        (
            "one release is enough for four readers",
            "emmy_mbar_init(empty + 8 * s, 4)",
            "emmy_mbar_init(empty + 8 * s, 1)",
            "race deadlock barrier",
        ),
        (
            "five releases by four readers",
            "emmy_mbar_init(empty + 8 * s, 4)",
            "emmy_mbar_init(empty + 8 * s, 5)",
            "deadlock",
        ),
        ("every lane releases", "if (lane == 0) emmy_mbar_arrive", "emmy_mbar_arrive", "race deadlock barrier"),
        ("barriers are not fenced", "    emmy_mbar_fence_init();\n", "", "proxy"),
        ("barriers are used before they are seen", "  emmy_syncthreads();\n", "", "race barrier"),
        (
            "a slot's address is not aligned to its swizzle",
            "const u32 slot = smem + s % 3 * 12288, bar",
            "const u32 slot = smem + s % 3 * 12288 + 128, bar",
            "alignment bounds",
        ),
        ("coordinates are exchanged", "&a, bar, s * 64, m0", "&a, bar, m0, s * 64", "wrong"),
        ("A is read without its swizzle", "chunk ^ (row & 7)", "chunk ^ 0", "wrong"),
        ("readers do not fence before a TMA refill", _FENCE, _MEET, "proxy"),
        ("no proxy fence before a TMA store", "  emmy_fence_async();\n  emmy_bar", "  emmy_bar", "proxy"),
        ("no barrier before a TMA store", "  emmy_bar_sync(1, 128);\n", "", "race"),
        (
            "a named barrier counts a warp that does not come",
            "emmy_bar_sync(1, 128)",
            "emmy_bar_sync(1, 160)",
            "deadlock",
        ),
        ("a TMA store is not waited for", "    emmy_bulk_wait_read<0>();\n", "", "copy"),
        ("a TMA store is not committed", "    emmy_bulk_commit();\n", "", "copy"),
        ("a TMA store's tile is beside the tile", "&c, out, n0, m0", "&c, out, n0 + 16, m0", "wrong"),
        ("a barrier is initialised twice", "emmy_mbar_init(full + 8 * s, 1);", "emmy_mbar_init(full, 1);", "barrier"),
        (
            "the tile overwrites the barriers",
            "out = smem + 3 * 12288",
            "out = smem + 3 * 12288 + 1024",
            "barrier alignment bounds",
        ),
    ),
    Bug(
        "tma_ring",
        "one lane fences for its warp's readers",
        ((_FENCE, _MEET), (_ARRIVE, "    if (lane == 0) emmy_fence_async();\n" + _ARRIVE)),
        ("proxy",),
    ),
    Bug("tma_ring", "readers fence after they let go", ((_FENCE, _MEET), (_ARRIVE, _ARRIVE + _FENCE)), ("proxy",)),
    Bug(
        "tma_ring",
        "the producer fences for its readers",
        (
            (_FENCE, _MEET),
            ("        emmy_mbar_expect_tx(bar", "        emmy_fence_async();\n        emmy_mbar_expect_tx(bar"),
        ),
        ("proxy",),
    ),
    *_bugs(
        "wgmma_staged",
        ("no proxy fence before wgmma", "  emmy_fence_async();\n", "", "proxy"),
        ("no barrier before wgmma", "  emmy_syncthreads();\n", "", "race"),
        (
            "a thread fences before its copies are there",
            "  emmy_cp_async_wait<0>();\n  emmy_fence_async();\n",
            "  emmy_fence_async();\n  emmy_cp_async_wait<0>();\n",
            "proxy",
        ),
        (
            "one thread fences for all writers",
            "  emmy_fence_async();\n",
            "  if (t == 0) emmy_fence_async();\n",
            "proxy",
        ),
        ("a descriptor's groups of rows lie closer", "1024, 128)", "1024, 64)", "wrong"),
    ),
    *_bugs(
        "wgmma_ring",
        ("no wgmma.fence", "    emmy_wgmma_fence();\n", "", "registers"),
        ("a slot is released before its wgmma is complete", "emmy_wgmma_wait<1>()", "emmy_wgmma_wait<2>()", "race"),
        ("the slot in use is released", "(s - 1) % 3 * 8", "s % 3 * 8", "race deadlock"),
        ("sums are read while wgmma works on them", "  emmy_wgmma_wait<0>();\n", "", "wrong copy"),
        ("wgmma is not committed", "    emmy_wgmma_commit();\n", "", "race wrong copy"),
        (
            "a descriptor begins amid the rows of its swizzle",
            "emmy_desc_k_sw128(slot + group * 8192)",
            "emmy_desc_k_sw128(slot + group * 8192 + 512)",
            "copy",
        ),
        ("a descriptor steps twice as far", "kk * 32)", "kk * 64)", "copy"),
        ("a descriptor steps half as far", "kk * 2048)", "kk * 1024)", "wrong"),
        (
            "a descriptor's rows lie closer",
            "emmy_desc_k_sw128(slot + group * 8192)",
            "(emmy_desc_k_sw128(slot + group * 8192) ^ 96ull << 32)",
            "wrong",
        ),
        (
            "a descriptor without the swizzle",
            "emmy_desc_k_sw128(slot + group * 8192)",
            "emmy_desc_k(slot + group * 8192, 16, 1024)",
            "wrong",
        ),
        ("B is taken as K-major", "ss_tb(acc", "ss(acc", "wrong bounds race"),
        ("the first step adds to what was there", "s > 0 || kk > 0", "true", "wrong"),
        ("sums start again at every step", "s > 0 || kk > 0", "kk > 0", "wrong"),
        ("both groups multiply the same rows", "slot + group * 8192", "slot", "wrong"),
        ("no proxy fence before a TMA store", "  emmy_fence_async();\n", "", "proxy"),
        ("registers are taken that nobody gave", "    emmy_setmaxnreg_dec<40>();\n", "", "deadlock"),
        ("registers in the wrong steps", "emmy_setmaxnreg_inc<232>", "emmy_setmaxnreg_inc<236>", "registers"),
        (
            "a slot is never released",
            "    if (s > 0 && threadIdx.x % 128 == 0) emmy_mbar_arrive(empty + (s - 1) % 3 * 8);\n",
            "",
            "deadlock",
        ),
        ("a matrix is stored at the wrong rows", "warp * 16 + lane % 16", "lane % 16", "race wrong"),
    ),
    *_bugs(
        "multicast",
        ("the mask names one block", "rank * 32, 3)", "rank * 32, 1)", "race deadlock"),
        ("the mask names a block that is not there", "rank * 32, 3)", "rank * 32, 7)", "copy"),
        ("both blocks fetch the same half", "slot + rank * 4096", "slot", "race"),
        ("both blocks fetch the same rows", "m0 + rank * 32", "m0", "wrong"),
        ("only half of the bytes are expected", "expect_tx(bar, 12288)", "expect_tx(bar, 8192)", "race"),
        (
            "a slot is released to the other block only",
            "if (lane < 2) emmy_mbar_arrive_cluster(empty + s % 3 * 8, lane)",
            "if (lane < 2) emmy_mbar_arrive_cluster(empty + s % 3 * 8, 1 - rank)",
            "deadlock race barrier",
        ),
        (
            "barriers are used before the other block made them",
            "  emmy_cluster_arrive_relaxed();\n  emmy_cluster_wait();\n",
            "",
            "race proxy barrier",
        ),
        (
            "a block leaves while the other writes to it",
            "  emmy_cluster_arrive();\n  emmy_cluster_wait();\n}",
            "}",
            "exit",
        ),
    ),
    Bug(
        "multicast",
        "the other block's readers are not waited for",
        (
            ("emmy_mbar_init(empty + 8 * s, 8)", "emmy_mbar_init(empty + 8 * s, 4)"),
            (
                "if (lane < 2) emmy_mbar_arrive_cluster(empty + s % 3 * 8, lane)",
                "if (lane == 0) emmy_mbar_arrive(empty + s % 3 * 8)",
            ),
        ),
        ("race",),
    ),
    *_bugs(
        "pingpong",
        (
            "no turn is taken",
            "    emmy_mbar_wait(turn + 8 * group, (tile / 2 & 1) ^ (group == 0));\n",
            "",
            "race wrong barrier",
        ),
        ("both groups wait for a turn", "(tile / 2 & 1) ^ (group == 0)", "tile / 2 & 1", "deadlock"),
        ("the turn is kept", "turn + 8 * (group ^ 1)", "turn + 8 * group", "deadlock race barrier wrong"),
        (
            "both groups take the first turn",
            "(tile / 2 & 1) ^ (group == 0)",
            "(tile / 2 & 1) ^ 1",
            "race wrong barrier deadlock",
        ),
        (
            "the ring starts again at every tile",
            "emmy_mbar_wait(full + p % 3 * 8, p / 3 & 1)",
            "emmy_mbar_wait(full + p % 3 * 8, (p - tile * steps) / 3 & 1)",
            "race deadlock wrong barrier",
        ),
        (
            "the producer's ring starts again at every tile",
            "slot = smem + p % 3 * 12288, bar",
            "slot = smem + s % 3 * 12288, bar",
            "race wrong",
        ),
        ("a group skips the other one's tile by half", "tile += 2", "tile += 1", "race wrong barrier deadlock"),
    ),
    *_bugs(
        "dsmem",
        ("a part goes to the wrong place", "(rank - 1) * 2048", "rank * 2048", "wrong race"),
        ("too few bytes are expected", "3 * 2048);", "2 * 2048);", "race"),
        ("parts are not waited for", "    emmy_mbar_wait(bar, 0);\n", "", "race"),
        ("a part reports to its own block", "emmy_mapa(bar, 0)", "bar", "copy"),
        (
            "a sum is read before it is there",
            "    emmy_sts_b128(sum + t * 16, r);\n  }\n  emmy_cluster_arrive();\n  emmy_cluster_wait();",
            "    emmy_sts_b128(sum + t * 16, r);\n  }",
            "race",
        ),
        (
            "a cluster barrier that orders nothing",
            "    emmy_sts_b128(sum + t * 16, r);\n  }\n  emmy_cluster_arrive();",
            "    emmy_sts_b128(sum + t * 16, r);\n  }\n  emmy_cluster_arrive_relaxed();",
            "race",
        ),
        (
            "a block leaves while others read it",
            "(blockIdx.x * 128 + t) * 4, r);\n  emmy_cluster_arrive();\n  emmy_cluster_wait();",
            "(blockIdx.x * 128 + t) * 4, r);",
            "exit",
        ),
        (
            "a cluster barrier is not waited for",
            "  emmy_cluster_arrive();\n  emmy_cluster_wait();\n  u32 r[4];",
            "  emmy_cluster_arrive();\n  u32 r[4];",
            "barrier race",
        ),
        ("a rank beyond the cluster", "emmy_mapa(sum + t * 16, 0)", "emmy_mapa(sum + t * 16, rank + 1)", "bounds race"),
    ),
    *_bugs(
        "rms_norm",
        ("no syncthreads between writing and reading", "  emmy_syncthreads();\n", "", "race"),
        ("the grid before is not waited for", "  emmy_pdl_wait();\n", "", "race"),
        (
            "the grid before is waited for too late",
            "  emmy_pdl_wait();\n  emmy_ldg_b128(rx, x + blockIdx.x * 1024 + t * 8);",
            "  emmy_ldg_b128(rx, x + blockIdx.x * 1024 + t * 8);\n  emmy_pdl_wait();",
            "race",
        ),
        ("a reduction leaves out lanes", "u32 d = 16", "u32 d = 8", "wrong"),
        ("every lane writes the warp's sum", "if (t % 32 == 0) emmy_sts", "emmy_sts", "race"),
        ("a warp's leader does not come", "if (t % 32 == 0) emmy_sts", "if (t == 0) emmy_sts", "wrong"),
        (
            "memory that is not the kernel's is written",
            "y + blockIdx.x * 1024 + t * 8",
            "y + (blockIdx.x + 1) * 1024 + t * 8",
            "bounds",
        ),
        (
            "a shuffle under a condition",
            "sum += emmy_shfl_xor_f32(sum, d);",
            "if (t % 32 < 16) sum += emmy_shfl_xor_f32(sum, d);",
            "deadlock divergent",
        ),
    ),
)
