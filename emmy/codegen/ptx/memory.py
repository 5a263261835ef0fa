"""Loads and stores of 2 to 16 bytes, cp.async, and memory of other blocks of the cluster. Knows no layout of tiles.

A vector is an array of 32-bit registers, `u32 r[n]`, whatever is in them; 2 bytes are a `u16`.
"""

from __future__ import annotations

from emmy.codegen.ptx.helper import HOPPER, Helper, asm, numbered, registers

_LD, _ST = "Data Movement and Conversion Instructions: ld", "Data Movement and Conversion Instructions: st"
_CP = "Data Movement and Conversion Instructions: cp.async"


def _types(nbytes: int) -> tuple[str, str, int, str]:
    """C type, constraint, number of registers and PTX suffix of a vector of that many bytes."""
    if nbytes == 2:
        return "u16", "h", 1, "u16"
    n = nbytes // 4
    return "u32", "r", n, "u32" if n == 1 else f"v{n}.u32"


def _braced(first: int, n: int) -> str:
    return f"%{first}" if n == 1 else f"{{{numbered(first, n)}}}"


# How memory is read -> the instruction. nc: memory that no one writes while the kernel runs.
_LOADS = {"": "ld.global", "_nc": "ld.global.nc.L1::no_allocate", "_nc_l1": "ld.global.nc"}


def _load(nbytes: int, how: str) -> Helper:
    c, k, n, suffix = _types(nbytes)
    name = f"ldg_b{8 * nbytes}{how}"
    return Helper(
        name,
        f"void {name}({c}* r, const void* p)",
        f"{_LD}.global.nc (memory that no one writes while the kernel runs)" if how else _LD,
        asm(f"{_LOADS[how]}.{suffix} {_braced(0, n)}, [%{n}];", registers(f"={k}", "r", n), '"l"(p)', memory=not how),
        f'emu::global_read(p, r, {nbytes}, "ld.global{".nc" if how else ""}", site);',
    )


def _index(nc: bool) -> Helper:
    name, load = ("ldg_nc_index", "ldg_b32_nc_l1") if nc else ("ldg_index", "ldg_b32")
    return Helper(
        name,
        f"int {name}(const int* p)",
        f"{_LD}: a whole number that tells where something lies, which others ask for too",
        f"u32 word;\nemmy_{load}(&word, p);\nreturn (int)word;",
        None,
        uses=(load,),
    )


def _load_if(nbytes: int) -> Helper:
    c, k, n, suffix = _types(nbytes)
    zero = "\n".join(f"mov.{'b16' if nbytes == 2 else 'b32'} %{i}, 0;" for i in range(n))
    body = f"{{\n.reg .pred p;\nsetp.ne.b32 p, %{n + 1}, 0;\n{zero}\n@p ld.global.{suffix} {_braced(0, n)}, [%{n}];\n}}"
    return Helper(
        f"ldg_b{8 * nbytes}_if",
        f"void ldg_b{8 * nbytes}_if({c}* r, const void* p, bool on)",
        f"{_LD}, predicated: zeros when off",
        asm(body, registers(f"={k}", "r", n), '"l"(p), "r"((int)on)', memory=True),
        f'memset(r, 0, {nbytes});\nif (on) emu::global_read(p, r, {nbytes}, "ld.global", site);',
    )


def _store(nbytes: int) -> Helper:
    c, k, n, suffix = _types(nbytes)
    return Helper(
        f"stg_b{8 * nbytes}",
        f"void stg_b{8 * nbytes}(void* p, const {c}* r)",
        _ST,
        asm(f"st.global.{suffix} [%0], {_braced(1, n)};", "", f'"l"(p), {registers(k, "r", n)}', memory=True),
        f'emu::global_write(p, r, {nbytes}, "st.global", site);',
    )


def _store_if(nbytes: int) -> Helper:
    c, k, n, suffix = _types(nbytes)
    body = f"{{\n.reg .pred p;\nsetp.ne.b32 p, %{n + 1}, 0;\n@p st.global.{suffix} [%0], {_braced(1, n)};\n}}"
    return Helper(
        f"stg_b{8 * nbytes}_if",
        f"void stg_b{8 * nbytes}_if(void* p, const {c}* r, bool on)",
        f"{_ST}, predicated",
        asm(body, "", f'"l"(p), {registers(k, "r", n)}, "r"((int)on)', memory=True),
        f'if (on) emu::global_write(p, r, {nbytes}, "st.global", site);',
    )


def _shared(nbytes: int) -> tuple[Helper, Helper]:
    c, k, n, suffix = _types(nbytes)
    return (
        Helper(
            f"lds_b{8 * nbytes}",
            f"void lds_b{8 * nbytes}({c}* r, u32 address)",
            _LD,
            asm(
                f"ld.shared.{suffix} {_braced(0, n)}, [%{n}];", registers(f"={k}", "r", n), '"r"(address)', memory=True
            ),
            f'emu::shared_read(address, r, {nbytes}, "ld.shared", site);',
        ),
        Helper(
            f"sts_b{8 * nbytes}",
            f"void sts_b{8 * nbytes}(u32 address, const {c}* r)",
            _ST,
            asm(f"st.shared.{suffix} [%0], {_braced(1, n)};", "", f'"r"(address), {registers(k, "r", n)}', memory=True),
            f'emu::shared_write(address, r, {nbytes}, "st.shared", site);',
        ),
    )


def _cluster(nbytes: int) -> tuple[Helper, ...]:
    _, k, n, suffix = _types(nbytes)
    return (
        Helper(
            f"ld_cluster_b{8 * nbytes}",
            f"void ld_cluster_b{8 * nbytes}(u32* r, u32 address)",
            f"{_LD}.shared::cluster",
            asm(
                f"ld.shared::cluster.{suffix} {_braced(0, n)}, [%{n}];",
                registers(f"={k}", "r", n),
                '"r"(address)',
                memory=True,
            ),
            f'emu::shared_read(address, r, {nbytes}, "ld.shared::cluster", site);',
            HOPPER,
        ),
        Helper(
            f"st_cluster_b{8 * nbytes}",
            f"void st_cluster_b{8 * nbytes}(u32 address, const u32* r)",
            f"{_ST}.shared::cluster",
            asm(
                f"st.shared::cluster.{suffix} [%0], {_braced(1, n)};",
                "",
                f'"r"(address), {registers(k, "r", n)}',
                memory=True,
            ),
            f'emu::shared_write(address, r, {nbytes}, "st.shared::cluster", site);',
            HOPPER,
        ),
        Helper(
            f"ld_rank_b{8 * nbytes}",
            f"void ld_rank_b{8 * nbytes}(u32* r, u32 address, u32 rank)",
            f"{_LD}.shared::cluster, of the block of that cluster rank",
            f"emmy_ld_cluster_b{8 * nbytes}(r, emmy_mapa(address, rank));",
            f'emu::shared_read(emu::cluster_address(address, rank), r, {nbytes}, "ld.shared::cluster", site);',
            HOPPER,
            uses=(f"ld_cluster_b{8 * nbytes}", "mapa"),
        ),
    )


def _cp_async(nbytes: int, *, zero_fill: bool) -> Helper:
    cache = "cg" if nbytes == 16 else "ca"  # PTX ISA: .cg takes 16 bytes only
    name = f"cp_async_b{8 * nbytes}" + ("_zfill" if zero_fill else "")
    size, operand = (", %2", ', "r"(source_bytes)') if zero_fill else ("", "")
    return Helper(
        name,
        f"void {name}(u32 to, const void* from{', u32 source_bytes' if zero_fill else ''})",
        _CP + (" with src-size: the rest of the destination becomes zero" if zero_fill else ""),
        asm(
            f"cp.async.{cache}.shared.global [%0], [%1], {nbytes}{size};",
            "",
            f'"r"(to), "l"(from){operand}',
            memory=True,
        ),
        f"emu::cp_async(to, from, {nbytes}, {'source_bytes' if zero_fill else nbytes}, site);",
    )


HELPERS: tuple[Helper, ...] = (
    Helper(
        "lds_word",
        "u32 lds_word(u32 address)",
        _LD,
        "u32 word;\nemmy_lds_b32(&word, address);\nreturn word;",
        None,
        uses=("lds_b32",),
    ),
    *(_index(nc) for nc in (False, True)),
    *(_load(n, how) for n in (2, 4, 8, 16) for how in _LOADS),
    *(_load_if(n) for n in (2, 4, 8, 16)),
    *(_store(n) for n in (2, 4, 8, 16)),
    *(_store_if(n) for n in (2, 4, 8, 16)),
    *(h for n in (2, 4, 8, 16) for h in _shared(n)),
    *(h for n in (4, 8, 16) for h in _cluster(n)),
    *(_cp_async(n, zero_fill=z) for n in (4, 8, 16) for z in (False, True)),
    Helper(
        "cp_async_commit",
        "void cp_async_commit()",
        f"{_CP}.commit_group",
        asm("cp.async.commit_group;", memory=True),
        "emu::cp_async_commit(site);",
    ),
    Helper(
        "cp_async_wait",
        "void cp_async_wait()",
        f"{_CP}.wait_group: at most N of the thread's groups are still under way",
        asm("cp.async.wait_group %0;", "", '"n"(N)', memory=True),
        "emu::cp_async_wait(N, site);",
        template="int N",
    ),
    Helper(
        "mapa",
        "u32 mapa(u32 address, u32 rank)",
        "Data Movement and Conversion Instructions: mapa: the same place in the block of that cluster rank",
        "u32 there;\n"
        + asm("mapa.shared::cluster.u32 %0, %1, %2;", '"=r"(there)', '"r"(address), "r"(rank)', volatile=False)
        + "\nreturn there;",
        "return emu::cluster_address(address, rank);",
        HOPPER,
    ),
    Helper(
        "st_async_b128",
        "void st_async_b128(u32 to, const u32* r, u32 bar)",
        "Data Movement and Conversion Instructions: st.async: both addresses in one block of the cluster (mapa)",
        asm(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];",
            "",
            f'"r"(to), {registers("r", "r", 4)}, "r"(bar)',
            memory=True,
        ),
        "emu::st_async(to, r, 16, bar, site);",
        HOPPER,
    ),
    Helper(
        "atomic_add_f32",
        "float atomic_add_f32(float* p, float value)",
        "Parallel Synchronization and Communication Instructions: atom",
        "float old;\n"
        + asm("atom.global.add.f32 %0, [%1], %2;", '"=f"(old)', '"l"(p), "f"(value)', memory=True)
        + "\nreturn old;",
        'return emu::global_add(p, value, "atom.add", site);',
    ),
)
