"""Faults planted in generated kernels: edits of the text that a schedule makes, each by a regular expression.

Left out because they are harmless, or only slow: one lane that waits for its warp before a wgmma, which the warp begins as one;
one arrival for a warpgroup after its wait_group, where the barrier counts warpgroups; parts of a cluster read in another order.
"""

from __future__ import annotations

from tests.emulator.generated import GeneratedBug


def _bugs(kernel: str, *rows: tuple[str, str, str, str]) -> tuple[GeneratedBug, ...]:
    """Rows of (what, expression, its replacement, kinds by spaces)."""
    return tuple(GeneratedBug(kernel, what, ((old, new),), tuple(kinds.split())) for what, old, new, kinds in rows)


def _first(kernel: str, what: str, old: str, new: str, kinds: str) -> GeneratedBug:
    """Planted in the first place only."""
    return GeneratedBug(kernel, what, ((old, new),), tuple(kinds.split()), 1)


_RELEASE = r"if \(lane == 0\) emmy_mbar_arrive"
_TILES = r"(for \(int tile = block; tile < \d+; tile \+= 2\) \{\n)"
_PRODUCER = rf"(elected\) \{{\n +){_TILES}"
_CONSUMER = rf"(setmaxnreg_inc<232>\(\);\n +){_TILES}"
_LAST_WAIT = r"^ +emmy_wgmma_wait<0>\(\);\n"
_TURN_WAIT = r"^ +emmy_mbar_wait\(smem \+ team \* 8 \+ \d+, turn\);\n"
_TURN_PASS = r"if \(lane == 0\) emmy_mbar_arrive\(smem \+ next_team \* 8 \+ \d+\);\n"
_SKIP = r"(emmy_bulk_wait_read<0>\(\);\n +\}\n)(?: +.*\n){6}"  # everything behind the store in the loop over tiles
_FULL, _EMPTY = r"(emmy_mbar_wait\(smem \+ slot \* 8 \+ \d+, phase)(\))", r"(emmy_mbar_wait\(smem .*, phase) \^ 1\)"
_EXCHANGE = r"(emmy_sts_b64\(.*\n(?: +\}\n)+) +emmy_cluster_arrive\(\);\n +emmy_cluster_wait\(\);\n"
_LAST_CLUSTER = r"^ +emmy_cluster_arrive\(\);\n +emmy_cluster_wait\(\);\n\}"

GENERATED_BUGS: tuple[GeneratedBug, ...] = (
    *_bugs(
        "wgmma",
        (
            "warps of a group have descriptors of their own",
            r"emmy_uniform\(slot \* 8192\)",
            "slot * 8192 + warp * 1024",
            "divergent",
        ),
        ("the last product starts the sums again", r"6144\), 1\)", "6144), 0)", "wrong"),
        ("A's coordinates are exchanged", r"(&A_map, .*), (0|k \+ 64), m_lo\)", r"\1, m_lo, \2)", "wrong"),
        (
            "only the first fill is waited for",
            r"(emmy_mbar_wait\(smem \+ slot \* 8 \+ \d+, phase\))",
            r"if (k == 0) \1",
            "race",
        ),
        ("the step before is not waited for", r"^ +emmy_wgmma_wait<1>\(\);\n", "", "race"),
        ("one step too many is under way", r"emmy_wgmma_wait<1>", "emmy_wgmma_wait<2>", "race"),
        ("sums are read before the wait", _LAST_WAIT, "", "wrong copy"),
        ("sums are read while a step is under way", r"emmy_wgmma_wait<0>", "emmy_wgmma_wait<1>", "wrong copy"),
        (
            "sums are worked on before the wait",
            r"(emmy_wgmma_commit\(\);\n)",
            r"\1C_sums[0] += 1.0f;\n",
            "wrong registers",
        ),
        ("no wgmma.fence", r"^ +emmy_wgmma_fence\(\);\n", "", "registers"),
        ("wgmma is not committed", r"^ +emmy_wgmma_commit\(\);\n", "", "race wrong copy"),
        ("A steps half as far along k", r"desc_step\(A_desc, 32\)", "desc_step(A_desc, 16)", "wrong copy"),
        ("B steps half as far along k", r"desc_step\(B_desc, 2048\)", "desc_step(B_desc, 1024)", "wrong copy"),
        ("a step along k is made twice", r"desc_step\(A_desc, 64\)", "desc_step(A_desc, 32)", "wrong"),
        ("B's panels lie closer", r"mn_sw128\(smem \+ B_now, 8192\)", "mn_sw128(smem + B_now, 4096)", "wrong"),
        ("B's second panel is the first", r"mn_sw128\(smem \+ B_now, 8192\)", "mn_sw128(smem + B_now, 0)", "wrong"),
        ("B is taken as K-major", "ss_tb", "ss", "wrong bounds race"),
        (
            "B is taken without its swizzle",
            r"desc_mn_sw128\(smem \+ B_now, 8192\)",
            "desc_mn(smem + B_now, 1024, 8192)",
            "bounds",
        ),
        (
            "a slot is given back while it is multiplied",
            rf"({_RELEASE})\(smem \+ \(slot \+ 1\) % 2",
            r"\1(smem + slot",
            "race barrier deadlock",
        ),
        ("a slot is given back before it was used", r"if \(0 < k\) (if \(lane)", r"\1", "race barrier deadlock"),
        ("a panel of B is not fetched", r"^ +emmy_tma_load_2d\(.*&B_map.*, 64, .*\n", "", "deadlock"),
        ("a panel of B is fetched to the other's place", r"(&B_map, .*), 64, ", r"\1, 0, ", "wrong"),
        ("no wgmma.fence behind the zeros", r"^( +)(emmy_wgmma_fence\(\);)", r"\1if (0 < k) \2", "registers"),
        (
            "one thread waits for its warpgroup",
            r"(emmy_mbar_wait\(smem \+ slot \* 8 \+ \d+, phase\))",
            r"if (thread == 0) \1",
            "race",
        ),
        ("slots are not aligned to the swizzle", r"slot \* 8192", "slot * 8192 + 64", "alignment copy"),
        ("A has another swizzle than its copies", "desc_k_sw128", "desc_k_sw64", "copy"),
        ("two arrivals of one copy are waited for", r"(emmy_mbar_init\(.*), 1\)", r"\1, 2)", "deadlock"),
        ("every thread initialises the barriers", r"if \(thread == 0\) \{", "{", "barrier race"),
        ("the first sums are not zero", r"C_sums\[e\] = 0\.0f", "C_sums[e] = 1.0f", "wrong"),
    ),
    *_bugs(
        "roles",
        ("the producer waits after it fills", r"( +emmy_mbar_wait\(.*phase \^ 1\);\n)((?:.*\n){3})", r"\2\1", "race"),
        ("the consumers' phase never changes", r"(inc<232>(?:.*\n)*?.*)phase = phase \^ 1;", r"\1", "race deadlock"),
        ("the consumers take the ring to be longer", r"(inc<232>(?:.*\n)*?.*)slot == 2", r"\1slot == 3", "bounds race"),
        ("sums have fewer columns than the tile", "wgmma_n32", "wgmma_n24", "wrong"),
        ("the consumers take fewer registers than they have", "inc<232>", "inc<160>", "registers"),
        (
            "registers are given after the work",
            r"( +emmy_setmaxnreg_dec<40>\(\);\n)((?:.*\n)*?)(  if \(warp < 8)",
            r"\2if (7 < warp) \1\3",
            "deadlock",
        ),
        ("the producer fills one step too many", r"k < 192", "k < 256", "wrong exit deadlock"),
        ("the producer fills one step too few", r"k < 192", "k < 128", "deadlock wrong"),
        ("the consumers take one step too few", r"k1 < 192", "k1 < 128", "deadlock wrong exit"),
        ("the producer waits for the wrong parity", _EMPTY, r"\1)", "deadlock"),
        ("the producer does not wait", r"^ +emmy_mbar_wait\(smem .*, phase \^ 1\);\n", "", "race barrier"),
        ("the consumers wait for the wrong parity", _FULL, r"\1 ^ 1)", "race deadlock"),
        ("the consumers do not wait", r"^ +emmy_mbar_wait\(smem .*, phase\);\n", "", "race"),
        ("the consumers take more registers than there are", "inc<232>", "inc<240>", "deadlock"),
        ("the producer gives no registers", r"^ +emmy_setmaxnreg_dec<40>\(\);\n", "", "deadlock"),
        (
            "one warp of four gives registers",
            r"(emmy_setmaxnreg_dec)",
            r"if (warp == 8) \1",
            "deadlock divergent registers",
        ),
        (
            "the last slot is given back before it is multiplied",
            rf"({_LAST_WAIT})( +{_RELEASE}.*\n)",
            r"\2\1",
            "race",
        ),
        ("registers in the wrong steps", "dec<40>", "dec<44>", "registers"),
        ("too few bytes are expected", r"expect_tx\((.*), \d+\)", r"expect_tx(\1, 16384)", "race"),
        ("too many bytes are expected", r"expect_tx\((.*), \d+\)", r"expect_tx(\1, 24576)", "deadlock"),
        ("a warp does not arrive", r"if \(lane == 0\) emmy", "if (lane == 0 && warp != 3) emmy", "deadlock"),
        ("every lane arrives", r"if \(lane == 0\) emmy", "emmy", "race barrier deadlock"),
        ("the last step's slot is kept", rf"({_LAST_WAIT}) +{_RELEASE}.*\n", r"\1", "deadlock"),
        ("one warpgroup's arrivals are enough", r"(emmy_mbar_init\(.*), 8\)", r"\1, 4)", "race barrier deadlock"),
        ("one arrival a warpgroup is waited for", r"(emmy_mbar_init\(.*), 8\)", r"\1, 2)", "race barrier deadlock"),
        ("more arrivals than warps are waited for", r"(emmy_mbar_init\(.*), 8\)", r"\1, 9)", "deadlock"),
        ("every lane of the producer fills", "warp == 8 && elected", "warp == 8", "race barrier deadlock"),
        ("every warp of the producer fills", "warp == 8 && elected", "elected", "race barrier deadlock"),
        (
            "a copy reports to the other slot",
            r"(&A_map, smem \+) slot \* 8",
            r"\1 (slot ^ 1) * 8",
            "race deadlock barrier",
        ),
        ("both warpgroups multiply the same rows", r"slot \* 16384 \+ warp_m \* 128", "slot * 16384", "wrong"),
        ("barriers are used before they are seen", r"^  emmy_syncthreads\(\);\n", "", "race barrier"),
        ("barriers are not fenced", r"^ +emmy_mbar_fence_init\(\);\n", "", "proxy"),
        (
            "the producer's ring begins anew at every tile",
            _PRODUCER,
            r"\1\2slot = 0; phase = 0;\n",
            "race deadlock wrong barrier",
        ),
        (
            "the producer's phase begins anew at every tile",
            _PRODUCER,
            r"\1\2phase = 0;\n",
            "race deadlock wrong barrier",
        ),
        (
            "the consumers' ring begins anew at every tile",
            _CONSUMER,
            r"\1\2slot = 0; phase = 0;\n",
            "race deadlock wrong barrier",
        ),
        ("the consumers' slot begins anew at every tile", _CONSUMER, r"\1\2slot = 0;\n", "race deadlock wrong barrier"),
        ("blocks leave out tiles", "tile \\+= 2", "tile += 3", "wrong"),
        ("blocks make each other's tiles", "tile \\+= 2", "tile += 1", "twice"),
        ("every block begins with the first tile", "int tile = block", "int tile = 0", "wrong"),
        ("the walk ends one tile early", "tile < 3", "tile < 2", "wrong"),
    ),
    _first("roles", "the producer's phase never changes", r"phase = phase \^ 1;", "", "race deadlock"),
    _first(
        "roles",
        "the producer fetches the same rows for every tile",
        r"m_lo = tile \* 128",
        "m_lo = block * 128",
        "wrong",
    ),
    _first("roles", "the producer leaves out tiles", "tile \\+= 2", "tile += 3", "deadlock"),
    _first(
        "roles",
        "the producer walks tiles of its own",
        "int tile = block",
        "int tile = 1 - block",
        "wrong deadlock exit",
    ),
    *_bugs(
        "turns",
        ("a turn is not waited for", _TURN_WAIT, "", "race copy barrier deadlock"),
        ("one warp does not wait for its turn", rf"{_TURN_WAIT[:-2]}", r"if (warp != 6) \g<0>", "race copy deadlock"),
        ("a turn is not passed on", _TURN_PASS, "", "deadlock"),
        (
            "one warp passes the turn for all",
            _TURN_PASS[:-2],
            "if (thread % 128 == 0) emmy_mbar_arrive(smem + next_team * 8 + 24608);",
            "deadlock",
        ),
        (
            "every lane passes the turn",
            r"if \(lane == 0\) (emmy_mbar_arrive\(smem \+ next_team)",
            r"\1",
            "barrier race deadlock",
        ),
        ("a turn is kept", r"next_team = \(team \+ 1\)", "next_team = team", "race deadlock"),
        ("the turn begins with nobody", r"turn = team == 0", "turn = 0", "deadlock"),
        ("the turn begins with all", r"turn = team == 0", "turn = 1", "race copy barrier deadlock"),
        ("a turn's parity never changes", r"^ +turn = turn \^ 1;\n", "", "race copy barrier deadlock"),
        ("nobody skips the first tile's fills", r"team \* 3 % 2", "0", "race copy wrong deadlock"),
        ("the first tile's laps are not counted", r"team \* 3 / 2 % 2", "0", "race copy wrong deadlock"),
        ("fills of one step too few are skipped first", r"team \* 3", "team * 2", "race copy wrong deadlock"),
        ("others' fills are not skipped", _SKIP, r"\1", "race copy wrong deadlock"),
        (
            "others' laps are not counted",
            r"^ +phase = phase \^ 1;\n( +slot = slot \+ 1;\n +if \(1 <)",
            r"\1",
            "race copy wrong deadlock",
        ),
        ("all begin with the same tile", r"block \+ team \* 2", "block", "wrong deadlock twice"),
        ("each takes every tile of its block", r"tile \+= 4", "tile += 2", "race copy wrong deadlock"),
        (
            "the producer leaves out the tiles of the second",
            r"(elected\) \{\n.*)tile \+= 2",
            r"\1tile += 4",
            "deadlock",
        ),
        (
            "a slot is given back by all consumers",
            r"(emmy_mbar_init\(smem \+ (?:24592|24600), )4",
            r"\g<1>8",
            "deadlock",
        ),
        ("boxes of both teams lie in one place", r"C_boxes = warp \*", "C_boxes = (warp & 3) *", "race copy"),
        (
            "a consumer stores by the rows of its number in the block",
            r"\(\(thread >> 5\) & 3\)",
            "(thread >> 5)",
            "wrong twice",
        ),
    ),
    *_bugs(
        "walked store",
        (
            "another lane waits for the store",
            r" +emmy_bulk_wait_read<0>\(\);\n +\}\n",
            "}\nif (lane == 1) emmy_bulk_wait_read<0>();\n",
            "race copy",
        ),
        ("bf16 is multiplied as f16", "_bf16_ss", "_f16_ss", "wrong"),
        ("no fence before the store", r"^ +emmy_fence_async\(\);\n", "", "proxy"),
        (
            "a lane stores before its warp has written",
            r"(emmy_fence_async\(\);\n) +emmy_syncwarp\(\);\n",
            r"\1",
            "race proxy",
        ),
        ("one lane fences for its warp", r"^ +(emmy_fence_async\(\);)\n", "if (lane == 0) \\1\n", "proxy"),
        ("the next tile's box is written while it is read", r"^ +emmy_bulk_wait_read<0>\(\);\n", "", "race copy"),
        ("one store too many is under way", "wait_read<0>", "wait_read<1>", "race copy"),
        ("lanes write the box before the wait for it", rf"({_RELEASE}.*\n) +emmy_syncwarp\(\);\n", r"\1", "race"),
        (
            "lanes fence before they write",
            r"^( +emmy_syncwarp\(\);\n)((?:.*\n)*?) +emmy_fence_async\(\);\n",
            r"emmy_fence_async();\n\1\2",
            "proxy",
        ),
        (
            "the wait comes before the commit",
            r"( +emmy_bulk_commit\(\);\n)( +emmy_bulk_wait_read<0>\(\);\n)",
            r"\2\1",
            "race copy",
        ),
        (
            "a box's row and column are exchanged",
            r"(tma_store_2d\(.*), n_lo, (.*)\);",
            r"\1, \2, n_lo);",
            "wrong race twice",
        ),
        ("a store is not committed", r"^ +emmy_bulk_commit\(\);\n", "", "copy race"),
        (
            "a box is written by the neighbouring warp",
            r"(emmy_stmatrix.*) \+ C_boxes",
            r"\1 + (warp ^ 1) * 1024 + C_boxes - warp * 1024",
            "race",
        ),
        ("boxes of warps overlap", r"C_boxes = warp \* \d+", "C_boxes = warp * 512", "race"),
        ("boxes lie on the ring", r"C_boxes = (warp \* \d+) \+ \d+", r"C_boxes = \1", "race"),
        ("a box goes to the rows of another warp", r"\(\(thread >> 5\) & 3\) \* 16\)", "0)", "wrong race twice"),
        ("every lane stores the box", r"if \(lane == 0\) \{", "{", "twice"),
        (
            "a box is written without its swizzle",
            r"store_at = .*",
            "store_at = (lane & 7) * 64 + (lane >> 3) * 16;",
            "wrong",
        ),
        (
            "the consumers take tiles in another order",
            r"n_block = tile % 3",
            "n_block = (tile + (warp < 8)) % 3",
            "wrong",
        ),
    ),
    *_bugs(
        "cluster",
        ("a block does not wait for the other's end", r"^ +emmy_cluster_wait\(\);\n\}", "}", "exit"),
        ("barriers are not fenced", r"^ +emmy_mbar_fence_init\(\);\n", "", "proxy"),
        ("barriers are used before they are seen", r"^  emmy_syncthreads\(\);\n", "", "race barrier"),
        ("no cluster barrier before the exchange", _EXCHANGE, r"\1", "race"),
        ("a barrier of the block before the exchange", _EXCHANGE, r"\1  emmy_syncthreads();\n", "race"),
        (
            "a cluster barrier that orders nothing",
            _EXCHANGE,
            r"\1  emmy_cluster_arrive_relaxed();\n  emmy_cluster_wait();\n",
            "race",
        ),
        ("a cluster barrier is not waited for", _EXCHANGE, r"\1  emmy_cluster_arrive();\n", "race barrier deadlock"),
        ("a block leaves while the other reads its sums", _LAST_CLUSTER, "}", "exit"),
        ("a block adds its own sums twice", r"(emmy_ld_rank_b128\(.*), part_no\)", r"\1, block % 2)", "wrong"),
        ("every block adds the first one's sums", r"(emmy_ld_rank_b128\(.*), part_no\)", r"\1, 0)", "wrong"),
        ("a rank beyond the cluster", r"(emmy_ld_rank_b128\(.*), part_no\)", r"\1, part_no + 1)", "bounds copy"),
        ("rows of the exchange overlap", r"\* 40 \+", "* 16 +", "race"),
        ("rows of the exchange lie closer where they are read", r"(emmy_ld_rank.*)\* 40 \+", r"\1* 36 +", "wrong"),
        ("the exchange lies on the ring", r"\* 4( \+ v \* 16)? \+ \d{4}, ", r"* 4\1, ", "race"),
        (
            "half of a block arrives at the cluster's barrier",
            "(emmy_cluster_arrive)",
            r"if (warp == 0) \1",
            "deadlock barrier",
        ),
        ("a slot's parity is wrong where the ring ends", r"/ 2 \+ 1\) % 2", "/ 2) % 2", "deadlock race"),
        ("both blocks finish the same half", r"block % 2 \* 64 \+ thread", "thread", "wrong"),
        ("both blocks fold the same share", r"k_lo = k_block \* 128", "k_lo = 0", "wrong"),
        ("shares of the fold overlap", r"k_lo = k_block \* 128", "k_lo = k_block * 96", "wrong"),
        ("a share ends early", r"k < k_lo \+ 128", "k < k_lo + 96", "wrong exit"),
        ("part of the sums is left out", r"part_no < 2", "part_no < 1", "wrong"),
        ("readers do not fence before a refill", r"^ +emmy_fence_async\(\);\n", "", "proxy"),
        ("a lane lets go for its warp early", r"(emmy_fence_async\(\);\n) +emmy_syncwarp\(\);\n", r"\1", "race proxy"),
        (
            "a slot is filled before it is given back",
            r"^ +emmy_mbar_wait\(.*phase \^ .*\n",
            "",
            "race barrier deadlock",
        ),
    ),
    *_bugs(
        "tma store",
        (
            "no fence before the store",
            r"emmy_fence_async\(\);\n( +emmy_syncwarp\(\);\n +if \(lane == 0\) \{)",
            r"\1",
            "proxy",
        ),
        (
            "a lane stores before its warp has written",
            r"emmy_syncwarp\(\);\n( +if \(lane == 0\) \{)",
            r"\1",
            "race proxy",
        ),
        ("a store is not waited for", r"^ +emmy_bulk_wait_read<0>\(\);\n", "", "copy exit"),
        (
            "a box is written by the neighbouring warp",
            r"(emmy_stmatrix.*) \+ C_boxes",
            r"\1 + (C_boxes ^ 1024)",
            "race bounds",
        ),
        ("both warps store the same columns", r"(emmy_tma_store_2d\(.*), warp_n,", r"\1, 0,", "wrong"),
        ("halves of a box are exchanged", r"h \* 512", "(1 - h) * 512", "wrong"),
    ),
    *_bugs(
        "direct",
        ("shares are read before they are there", r"^ +emmy_syncthreads\(\);\n", "", "race"),
        ("shares are met by warps only", "emmy_syncthreads", "emmy_syncwarp", "race"),
        ("A is permuted along k, B is not", r"(A_from = .*) \+ k_at;", r"\1 + warp_k + ((lane & 3) ^ 1) * 8;", "wrong"),
        (
            "words of a fragment are exchanged",
            r"(rows\d+)\[1\] = (.*);\n( +)\1\[2\] = (.*);",
            r"\1[1] = \4;\n\3\1[2] = \2;",
            "wrong",
        ),
        ("steps of the operands differ", r"(A_from \+ )s \* 32", r"\1(s ^ 1) * 32", "wrong"),
        ("warps share one place", r"part_of_k \* 8", "0", "race"),
        ("both warps fold the same share", r"warp_k = warp \* 64", "warp_k = 0", "race wrong"),
        ("a share is left out", r"part_no < 2", "part_no < 1", "wrong"),
        ("a share is added twice", r"part_no \* 8 \+", "0 * part_no +", "wrong"),
        ("rows of the shares overlap", r"\* 36 \+", "* 16 +", "race"),
        ("a share's words are B's, not A's", r"(emmy_mma_f32_f16\(C_sums, rows\d+), A_held", r"\1, B_held", "wrong"),
        ("rows of A that are not there", r"A \+ ([^;]*?) \* 128", r"A + (8 + \1) * 128", "bounds"),
    ),
)
