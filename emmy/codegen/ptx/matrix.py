"""Warp-level matrix instructions: ldmatrix, stmatrix, mma.sync. Each entry's second body says who holds which element."""

from __future__ import annotations

from emmy.codegen.ptx.helper import HOPPER, Helper, asm, numbered, registers

_SECTION = "Warp Level Matrix Multiply-Accumulate Instructions"

# Of each 8 x 8 matrix q, lane 8q + i supplies the address of row i, and lane l holds elements 2(l%4) and 2(l%4)+1 of row
# l/4; transposed: of column l/4.
_FRAGMENT = """
struct Arg {{ {const}u32* r; u32 row; }} arg{{r, row}};
emu::warp("{op}", site, &arg, [](emu::Lanes& w) {{
  u32 rows[{lanes}];
  for (int i = 0; i < {lanes}; ++i) rows[i] = w.arg<Arg>(i).row;
  emu::count_matrix_access(rows, {lanes}, {store});
  for (int q = 0; q < {n}; ++q) {{
    u16 m[8][8];
    {body}
  }}
}});"""
_FIRST, _SECOND = (
    {False: "m[l / 4][l % 4 * 2]", True: "m[l % 4 * 2][l / 4]"},
    {
        False: "m[l / 4][l % 4 * 2 + 1]",
        True: "m[l % 4 * 2 + 1][l / 4]",
    },
)


def _ldmatrix(n: int, trans: bool) -> Helper:
    name = f"ldmatrix_x{n}{'_trans' if trans else ''}"
    body = (
        "for (int i = 0; i < 8; ++i) w.read(8 * q + i, rows[8 * q + i], m[i], 16);\n"
        f"    for (int l = 0; l < 32; ++l) w.arg<Arg>(l).r[q] = emu::join16({_FIRST[trans]}, {_SECOND[trans]});"
    )
    return Helper(
        name,
        f"void {name}(u32* r, u32 row)",
        f"{_SECTION}: ldmatrix",
        asm(
            f"ldmatrix.sync.aligned.m8n8.x{n}{'.trans' if trans else ''}.shared.b16 {{{numbered(0, n)}}}, [%{n}];",
            registers("=r", "r", n),
            '"r"(row)',
            memory=True,
        ),
        _FRAGMENT.format(op=name.replace("_", "."), lanes=8 * n, n=n, body=body, const="", store="false"),
    )


def _stmatrix(n: int, trans: bool) -> Helper:
    name = f"stmatrix_x{n}{'_trans' if trans else ''}"
    body = (
        "for (int l = 0; l < 32; ++l) {\n"
        "      const u32 pair = w.arg<Arg>(l).r[q];\n"
        f"      {_FIRST[trans]} = u16(pair);\n      {_SECOND[trans]} = u16(pair >> 16);\n    }}\n"
        "    for (int i = 0; i < 8; ++i) w.write(8 * q + i, rows[8 * q + i], m[i], 16);"
    )
    return Helper(
        name,
        f"void {name}(u32 row, const u32* r)",
        f"{_SECTION}: stmatrix",
        asm(
            f"stmatrix.sync.aligned.m8n8.x{n}{'.trans' if trans else ''}.shared.b16 [%0], {{{numbered(1, n)}}};",
            "",
            f'"r"(row), {registers("r", "r", n)}',
            memory=True,
        ),
        _FRAGMENT.format(op=name.replace("_", "."), lanes=8 * n, n=n, body=body, const="const ", store="true"),
        HOPPER,
    )


# A: register i of lane l holds row l/4 + 8(i%2), columns 2(l%4) + 8(i/2) and the next. B: register i, rows 2(l%4) + 8i and
# the next, column l/4. D: element i, row l/4 + 8(i/2), column 2(l%4) + i%2. Products are exact, sums are rounded once.
_MMA = """
struct Arg {{ {d}* d; const u32 *a, *b; }} arg{{d, a, b}};
emu::warp("mma.m16n8k16", site, &arg, [](emu::Lanes& w) {{
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l) {{
    const int g = l / 4, c = l % 4 * 2;
    const Arg& x = w.arg<Arg>(l);
    for (int i = 0; i < 4; ++i)
      for (int h = 0; h < 2; ++h) a[g + i % 2 * 8][c + i / 2 * 8 + h] = emu::{value}(u16(x.a[i] >> 16 * h));
    for (int i = 0; i < 2; ++i)
      for (int h = 0; h < 2; ++h) b[c + i * 8 + h][g] = emu::{value}(u16(x.b[i] >> 16 * h));
  }}
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) {{
      const int row = l / 4 + i / 2 * 8, col = l % 4 * 2 + i % 2;
      {accumulate}
    }}
  emu::count_mma();
}});"""
_SUM = "for (int k = 0; k < 16; ++k) sum += double(a[row][k]) * b[k][col];"


def _mma_f32(dtype: str, value: str) -> Helper:
    accumulate = f"float& d = w.arg<Arg>(l).d[i];\n      double sum = d;\n      {_SUM}\n      d = float(sum);"
    return Helper(
        f"mma_f32_{dtype}",
        f"void mma_f32_{dtype}(float* d, const u32* a, const u32* b)",
        f"{_SECTION}: mma.m16n8k16 with 16-bit floating point; d += a * b",
        asm(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
            f"{{{numbered(0, 4)}}}, {{{numbered(4, 4)}}}, {{{numbered(8, 2)}}}, {{{numbered(0, 4)}}};",
            registers("+f", "d", 4),
            f"{registers('r', 'a', 4)}, {registers('r', 'b', 2)}",
            volatile=False,
        ),
        _MMA.format(d="float", value=value, accumulate=accumulate),
    )


_MMA_F16 = Helper(
    "mma_f16_f16",
    "void mma_f16_f16(u32* d, const u32* a, const u32* b)",
    f"{_SECTION}: mma.m16n8k16 with 16-bit floating point; d += a * b, sums kept in f16",
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
        f"{{{numbered(0, 2)}}}, {{{numbered(2, 4)}}}, {{{numbered(6, 2)}}}, {{{numbered(0, 2)}}};",
        registers("+r", "d", 2),
        f"{registers('r', 'a', 4)}, {registers('r', 'b', 2)}",
        volatile=False,
    ),
    _MMA.format(
        d="u32",
        value="half_value",
        accumulate=(
            "u32& d = w.arg<Arg>(l).d[i / 2];\n      const int shift = i % 2 * 16;\n"
            f"      double sum = emu::half_value(u16(d >> shift));\n      {_SUM}\n"
            "      d = (d & ~(0xffffu << shift)) | u32(emu::half_bits(sum)) << shift;"
        ),
    ),
)

HELPERS: tuple[Helper, ...] = (
    *(_ldmatrix(n, trans) for n in (1, 2, 4) for trans in (False, True)),
    *(_stmatrix(n, trans) for n in (1, 2, 4) for trans in (False, True)),
    _mma_f32("f16", "half_value"),
    _mma_f32("bf16", "bfloat_value"),
    _MMA_F16,
    Helper(
        "promote_f16",
        "void promote_f16(float* sum, u32* part)",
        "Data Movement and Conversion Instructions: cvt; the four f16 sums of a fragment go to f32 ones and start again at 0",
        "#pragma unroll\nfor (int i = 0; i < 2; ++i) {\n"
        "  float pair[2];\n  emmy_unpack_f16(pair, part[i]);\n"
        "  sum[2 * i] += pair[0];\n  sum[2 * i + 1] += pair[1];\n  part[i] = 0u;\n}",
        None,
        uses=("unpack_f16",),
    ),
)
