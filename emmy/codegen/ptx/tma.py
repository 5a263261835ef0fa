"""Bulk copies of boxes of tensors (TMA). Knows no tile: a box's shape and swizzle are in its tensor map."""

from __future__ import annotations

from emmy.codegen.ptx.helper import HOPPER, Helper, asm, numbered

_SECTION = "Data Movement and Conversion Instructions: cp.async.bulk"


def _coordinates(rank: int) -> tuple[str, str, str]:
    """C parameters, operands and initialiser of a box's place, innermost dimension first."""
    names = [f"c{i}" for i in range(rank)]
    return ", ".join(f"int {c}" for c in names), ", ".join(f'"r"({c})' for c in names), ", ".join(names)


def _load(rank: int, variant: str) -> Helper:
    """`variant`: "", "multicast" (to every block of the cluster in a mask), "hint" (an L2 eviction policy), or both."""
    parameters, operands, names = _coordinates(rank)
    name = f"tma_load_{rank}d" + (f"_{variant}" if variant else "")
    told = [w for w in ("multicast", "hint") if w in variant]
    extra = "".join({"multicast": ", u16 mask", "hint": ", u64 policy"}[w] for w in told)
    suffix = "".join({"multicast": ".multicast::cluster", "hint": ".L2::cache_hint"}[w] for w in told)
    operand = "".join({"multicast": ', "h"(mask)', "hint": ', "l"(policy)'}[w] for w in told)
    last = "".join(f", %{3 + rank + i}" for i in range(len(told)))
    mask, multicast = ("mask", "true") if "multicast" in told else ("0", "false")
    return Helper(
        name,
        f"void {name}(u32 to, const emmy_tensormap* map, u32 bar, {parameters}{extra})",
        f"{_SECTION}.tensor: reports its bytes to mbarrier `bar`"
        + ("; the same offsets in every block of the mask" if "multicast" in told else ""),
        asm(
            f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes{suffix} "
            f"[%0], [%1, {{{numbered(3, rank)}}}], [%2]{last};",
            "",
            f'"r"(to), "l"(map), "r"(bar), {operands}{operand}',
            memory=True,
        ),
        f"const int at[] = {{{names}}};\nemu::tma_load(to, map, bar, at, {rank}, {mask}, {multicast}, site);",
        HOPPER,
    )


def _store(rank: int) -> Helper:
    parameters, operands, names = _coordinates(rank)
    return Helper(
        f"tma_store_{rank}d",
        f"void tma_store_{rank}d(const emmy_tensormap* map, u32 from, {parameters})",
        f"{_SECTION}.tensor: what lies outside the tensor is not written",
        asm(
            f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [%0, {{{numbered(2, rank)}}}], [%1];",
            "",
            f'"l"(map), "r"(from), {operands}',
            memory=True,
        ),
        f"const int at[] = {{{names}}};\nemu::tma_store(map, from, at, {rank}, site);",
        HOPPER,
    )


def _prefetch(rank: int) -> Helper:
    parameters, operands, names = _coordinates(rank)
    return Helper(
        f"tma_prefetch_{rank}d",
        f"void tma_prefetch_{rank}d(const emmy_tensormap* map, {parameters})",
        f"{_SECTION}.prefetch.tensor: a hint that the box will be read; what lies outside the tensor is left out",
        asm(
            f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [%0, {{{numbered(1, rank)}}}];",
            "",
            f'"l"(map), {operands}',
            memory=True,
        ),
        f"const int at[] = {{{names}}};\nemu::tma_prefetch(map, at, {rank}, site);",
        HOPPER,
    )


def _policy(kind: str) -> Helper:
    return Helper(
        f"policy_{kind}",
        f"u64 policy_{kind}()",
        "Data Movement and Conversion Instructions: createpolicy",
        "u64 policy;\n"
        + asm(f"createpolicy.fractional.L2::{kind}.b64 %0, 1.0;", '"=l"(policy)', volatile=False)
        + "\nreturn policy;",
        "return 0;",
    )


def _wait(read: bool) -> Helper:
    name = "bulk_wait_read" if read else "bulk_wait"
    return Helper(
        name,
        f"void {name}()",
        f"{_SECTION}.wait_group: at most N groups are still "
        + ("reading shared memory" if read else "under way, the writes of the others have been made"),
        asm(f"cp.async.bulk.wait_group{'.read' if read else ''} %0;", "", '"n"(N)', memory=True),
        f"emu::bulk_wait(N, {'true' if read else 'false'}, site);",
        HOPPER,
        "int N",
    )


HELPERS: tuple[Helper, ...] = (
    *(_load(rank, v) for rank in (2, 3, 4, 5) for v in ("", "multicast", "hint", "multicast_hint")),
    *(_store(rank) for rank in (2, 3, 4, 5)),
    _prefetch(2),
    _policy("evict_first"),
    _policy("evict_last"),
    Helper(
        "bulk_commit",
        "void bulk_commit()",
        f"{_SECTION}.commit_group",
        asm("cp.async.bulk.commit_group;", memory=True),
        "emu::bulk_commit(site);",
        HOPPER,
    ),
    _wait(read=True),
    _wait(read=False),
    Helper(
        "tma_prefetch",
        "void tma_prefetch(const emmy_tensormap* map)",
        "Data Movement and Conversion Instructions: prefetch",
        asm("prefetch.tensormap [%0];", "", '"l"(map)', memory=True),
        "",
        HOPPER,
    ),
)
