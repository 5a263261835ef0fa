"""Barriers and fences: of warps, blocks and clusters, mbarriers, register redistribution, dependent launches."""

from __future__ import annotations

from emmy.codegen.ptx.helper import AMPERE, HOPPER, Helper, asm

_LD, _ST = "Data Movement and Conversion Instructions: ld", "Data Movement and Conversion Instructions: st"
_SYNC = "Parallel Synchronization and Communication Instructions"


def _plain(
    name: str, parameters: str, section: str, ptx: str, operands: str, emu: str, archs: frozenset[str] = HOPPER
) -> Helper:
    """A helper without a result: one instruction that other memory accesses are not moved across."""
    return Helper(name, f"void {name}({parameters})", section, asm(ptx, "", operands, memory=True), emu, archs)


def _registers(direction: str) -> Helper:
    return Helper(
        f"setmaxnreg_{direction}",
        f"void setmaxnreg_{direction}()",
        "Miscellaneous Instructions: setmaxnreg: by every warp of a warpgroup; .inc waits until others gave enough",
        asm(f"setmaxnreg.{direction}.sync.aligned.u32 %0;", "", '"n"(N)'),
        f"emu::set_registers(N, {'true' if direction == 'inc' else 'false'}, site);",
        HOPPER,
        "int N",
    )


HELPERS: tuple[Helper, ...] = (
    Helper(
        "syncthreads",
        "void syncthreads()",
        "CUDA C++ Programming Guide: Synchronization Functions",
        "__syncthreads();",
        "emu::block_sync(site);",
    ),
    Helper(
        "syncwarp",
        "void syncwarp()",
        "CUDA C++ Programming Guide: Synchronization Functions; orders the lanes' memory accesses, unlike a shuffle",
        "__syncwarp();",
        "emu::warp_sync(site);",
    ),
    _plain(
        "bar_sync",
        "u32 id, u32 threads",
        f"{_SYNC}: bar: named barrier",
        "bar.sync %0, %1;",
        '"r"(id), "r"(threads)',
        "emu::named_sync(id, threads, site);",
        AMPERE,
    ),
    _plain(
        "bar_arrive",
        "u32 id, u32 threads",
        f"{_SYNC}: bar: named barrier",
        "bar.arrive %0, %1;",
        '"r"(id), "r"(threads)',
        "emu::named_arrive(id, threads, site);",
        AMPERE,
    ),
    _plain(
        "mbar_init",
        "u32 bar, u32 count",
        f"{_SYNC}: mbarrier.init",
        "mbarrier.init.shared::cta.b64 [%0], %1;",
        '"r"(bar), "r"(count)',
        "emu::mbar_init(bar, count, site);",
        AMPERE,
    ),
    _plain(
        "mbar_fence_init",
        "",
        f"{_SYNC}: membar/fence: the thread's mbarrier.init are seen by the cluster and by bulk copies; a relaxed arrive may follow",
        "fence.mbarrier_init.release.cluster;",
        "",
        "emu::mbar_fence_init(site);",
    ),
    _plain(
        "mbar_arrive",
        "u32 bar",
        f"{_SYNC}: mbarrier.arrive",
        "mbarrier.arrive.shared::cta.b64 _, [%0];",
        '"r"(bar)',
        'emu::mbar_arrive(bar, 0, "mbarrier.arrive", site);',
        AMPERE,
    ),
    _plain(
        "mbar_expect_tx",
        "u32 bar, u32 bytes",
        f"{_SYNC}: mbarrier.arrive.expect_tx: one arrival, and that many bytes of bulk copies to come",
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;",
        '"r"(bar), "r"(bytes)',
        'emu::mbar_arrive(bar, bytes, "mbarrier.arrive.expect_tx", site);',
    ),
    Helper(
        "mbar_wait",
        "void mbar_wait(u32 bar, u32 parity)",
        f"{_SYNC}: mbarrier.try_wait.parity: returns once the phase of that parity is complete",
        "u32 done;\ndo {\n  "
        + asm(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}",
            '"=r"(done)',
            '"r"(bar), "r"(parity)',
            memory=True,
        )
        + "\n} while (!done);",
        "emu::mbar_wait(bar, parity, site);",
        HOPPER,
    ),
    # Without .release.cluster, which costs a fence of the whole GPU at each arrival (measured on an H200: a matmul 2.3 times
    # slower): it says that reads are done, and their values have been waited for by then. It must not announce writes.
    _plain(
        "mbar_arrive_cluster",
        "u32 bar, u32 rank",
        f"{_SYNC}: mbarrier.arrive on the mbarrier of the block of that cluster rank; announces reads, not writes",
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}",
        '"r"(bar), "r"(rank)',
        'emu::mbar_arrive(emu::cluster_address(bar, rank), 0, "mbarrier.arrive", site);',
    ),
    # Words in memory by which blocks of a grid that are resident together tell one another that something is there.
    _plain(
        "flag_raise",
        "void* p",
        f"{_ST}: st.release: whoever sees the 1 sees what the thread, and those it has met, wrote before",
        "st.release.gpu.global.u32 [%0], %1;",
        '"l"(p), "r"(1)',
        "emu::flag_raise(p, site);",
        AMPERE,
    ),
    Helper(
        "flag_await",
        "void flag_await(const void* p)",
        f"{_LD}: ld.acquire: returns once the word is not 0",
        "u32 up;\ndo {\n  "
        + asm("ld.acquire.gpu.global.u32 %0, [%1];", '"=r"(up)', '"l"(p)', memory=True)
        + "\n} while (!up);",
        "emu::flag_await(p, site);",
    ),
    _plain(
        "flag_lower",
        "void* p",
        f"{_ST}: st.relaxed: the word is 0",
        "st.relaxed.gpu.global.u32 [%0], %1;",
        '"l"(p), "r"(0)',
        "emu::flag_lower(p, site);",
        AMPERE,
    ),
    # Words in memory in which blocks of a grid, resident together or not, count what they have left for the last of them.
    Helper(
        "count",
        "void count(u32* before, void* p)",
        f"{_SYNC}: atom.acq_rel: whoever counts later sees what the thread, and those it has met, wrote before",
        asm("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;", '"=r"(before[0])', '"l"(p)', memory=True),
        "before[0] = emu::count(p, site);",
    ),
    # The same, of what they will leave: no access is ordered by it.
    Helper(
        "count_begun",
        "void count_begun(u32* before, void* p)",
        f"{_SYNC}: atom.relaxed",
        asm("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;", '"=r"(before[0])', '"l"(p)', memory=True),
        "before[0] = emu::count_begun(p, site);",
    ),
    # The same, of what they will add: whoever is the last sets the word back.
    Helper(
        "count_around",
        "u32 count_around(void* p, u32 last)",
        f"{_SYNC}: atom.relaxed.inc: 0 comes after `last`; returns what it was",
        "u32 before;\n"
        + asm("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;", '"=r"(before)', '"l"(p), "r"(last)', memory=True)
        + "\nreturn before;",
        "return emu::count_around(p, last, site);",
    ),
    _plain(
        "pass_on",
        "void* p, u32 last",
        f"{_SYNC}: red.relaxed.inc: a raised flag counts who knows; the last lowers it",
        "red.relaxed.gpu.global.inc.u32 [%0], %1;",
        '"l"(p), "r"(last)',
        "emu::count_around(p, last, site);",
        AMPERE,
    ),
    _plain(
        "add_f32",
        "void* p, const u32* word",
        f"{_SYNC}: red.relaxed.add.f32: nobody waits for it, additions come in any order",
        "red.relaxed.gpu.global.add.f32 [%0], %1;",
        '"l"(p), "f"(__uint_as_float(word[0]))',
        'emu::global_add(static_cast<float*>(p), __uint_as_float(word[0]), "red.add", site);',
        AMPERE,
    ),
    # 8 bytes in memory: a word, and whether it is there. They come and go at once (PTX ISA: Memory Consistency Model: scalar accesses).
    _plain(
        "mark_leave",
        "void* p, const u32* word",
        f"{_ST}: st.relaxed: the word, and that it is there",
        "{\n.reg .b64 both;\nmov.b64 both, {%1, %2};\nst.relaxed.gpu.global.b64 [%0], both;\n}",
        '"l"(p), "r"(word[0]), "r"(1)',
        "emu::mark_leave(p, word[0], site);",
        AMPERE,
    ),
    Helper(
        "mark_look",
        "void mark_look(u32* words, const void* p)",
        f"{_LD}: ld.relaxed: the word, and whether it is there",
        asm(
            "{\n.reg .b64 both;\nld.relaxed.gpu.global.b64 both, [%2];\nmov.b64 {%0, %1}, both;\n}",
            '"=r"(words[0]), "=r"(words[1])',
            '"l"(p)',
            memory=True,
        ),
        "emu::mark_look(words, p, site);",
    ),
    # One by one, each that is not there yet would be waited for anew.
    Helper(
        "marks_await",
        "void marks_await(u32* words, const void* p, int apart)",
        f"{_LD}: ld.relaxed: N words, so many bytes apart, each and its mark; returns once all are there",
        "#pragma unroll\nfor (int i = 0; i < N; ++i) emmy_mark_look(words + 2 * i, (const u8*)p + (i64)i * apart);\n"
        "for (;;) {\n  u32 all = 1u;\n  #pragma unroll\n  for (int i = 0; i < N; ++i) all &= words[2 * i + 1];\n"
        "  if (all) break;\n  #pragma unroll\n  for (int i = 0; i < N; ++i)\n"
        "    if (!words[2 * i + 1]) emmy_mark_look(words + 2 * i, (const u8*)p + (i64)i * apart);\n}",
        "for (int i = 0; i < N; ++i) emu::mark_await(words + 2 * i, (const u8*)p + (i64)i * apart, site);",
        template="int N",
        uses=("mark_look",),
    ),
    _plain(
        "mark_clear",
        "void* p",
        f"{_ST}: st.relaxed: the word is not there",
        "st.relaxed.gpu.global.b64 [%0], %1;",
        '"l"(p), "l"(0ll)',
        "emu::mark_clear(p, site);",
        AMPERE,
    ),
    Helper(
        "assume",
        "void assume(bool so)",
        "CUDA C++ Programming Guide: Compiler Optimization Hint Functions: __builtin_assume",
        "__builtin_assume(so);",
        'if (!so) emu::fail("assume", "what the compiler is told does not hold, line %u", site.line());',
    ),
    _plain(
        "fence_async",
        "",
        f"{_SYNC}: membar/fence: ordinary accesses of shared memory before it are seen by bulk copies and wgmma after it",
        "fence.proxy.async.shared::cta;",
        "",
        "emu::fence_async(site);",
    ),
    Helper(
        "cluster_rank",
        "u32 cluster_rank()",
        "Special Registers: %cluster_ctarank",
        "u32 rank;\n" + asm("mov.u32 %0, %%cluster_ctarank;", '"=r"(rank)', volatile=False) + "\nreturn rank;",
        "return emu::cluster_rank();",
        HOPPER,
    ),
    _plain(
        "cluster_arrive",
        "",
        f"{_SYNC}: barrier.cluster",
        "barrier.cluster.arrive.release;",
        "",
        "emu::cluster_arrive(true, site);",
    ),
    _plain(
        "cluster_arrive_relaxed",
        "",
        f"{_SYNC}: barrier.cluster: orders no memory access, except after mbar_fence_init",
        "barrier.cluster.arrive.relaxed;",
        "",
        "emu::cluster_arrive(false, site);",
    ),
    _plain(
        "cluster_wait",
        "",
        f"{_SYNC}: barrier.cluster",
        "barrier.cluster.wait.acquire;",
        "",
        "emu::cluster_wait(site);",
    ),
    _registers("inc"),
    _registers("dec"),
    _plain(
        "pdl_wait",
        "",
        f"{_SYNC}: griddepcontrol: the grids this one depends on are complete and what they wrote is seen",
        "griddepcontrol.wait;",
        "",
        "emu::pdl_wait(site);",
    ),
    _plain(
        "pdl_launch",
        "",
        f"{_SYNC}: griddepcontrol: dependent grids may start once every block has said so or ended",
        "griddepcontrol.launch_dependents;",
        "",
        "",
    ),
)
