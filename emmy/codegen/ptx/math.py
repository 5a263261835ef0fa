"""Fast functions, conversions, and exchange between lanes. 16-bit numbers are raw bits: no CUDA header is needed."""

from __future__ import annotations

from emmy.codegen.ptx.helper import HOPPER, Helper, asm

_CVT = "Data Movement and Conversion Instructions: cvt"
_FLOAT = "Floating Point Instructions"


def _unary(name: str, instruction: str, section: str, emu: str) -> Helper:
    """A function of one f32. The emulator's result is exact but for one rounding."""
    return Helper(
        name,
        f"float {name}(float x)",
        section,
        "float y;\n" + asm(f"{instruction} %0, %1;", '"=f"(y)', '"f"(x)', volatile=False) + "\nreturn y;",
        f"return {emu};",
    )


def _shuffle(mode: str, dtype: str) -> Helper:
    """From lane `lane` (idx) or from lane `me ^ lane` (xor). A shuffle orders no memory access."""
    intrinsic, source = {"xor": ("__shfl_xor_sync", "l ^ int(lane)"), "idx": ("__shfl_sync", "int(lane) & 31")}[mode]
    return Helper(
        f"shfl_{mode}_{dtype}",
        f"{_C[dtype]} shfl_{mode}_{dtype}({_C[dtype]} x, u32 lane)",
        "Data Movement and Conversion Instructions: shfl.sync",
        f"return {intrinsic}(0xffffffffu, x, (int)lane);",
        f"struct Arg {{ {_C[dtype]} x, y; u32 lane; }} arg{{x, x, lane}};\n"
        f'emu::warp("shfl.{mode}", site, &arg, [](emu::Lanes& w) {{\n'
        "  for (int l = 0; l < 32; ++l) {\n"
        f"    const u32 lane = w.arg<Arg>(l).lane;\n    w.arg<Arg>(l).y = w.arg<Arg>({source}).x;\n  }}\n"
        "});\nreturn arg.y;",
    )


_C = {"f32": "float", "u32": "u32"}


def _pack(dtype: str, bits: str) -> Helper:
    return Helper(
        f"pack_{dtype}",
        f"u32 pack_{dtype}(float low, float high)",
        f"{_CVT}.rn.{dtype}x2.f32",
        "u32 r;\n"
        + asm(f"cvt.rn.{dtype}x2.f32 %0, %1, %2;", '"=r"(r)', '"f"(high), "f"(low)', volatile=False)
        + "\nreturn r;",
        f"return emu::join16(emu::{bits}(low), emu::{bits}(high));",
    )


HELPERS: tuple[Helper, ...] = (
    _unary("exp2", "ex2.approx.ftz.f32", f"{_FLOAT}: ex2", "float(std::exp2(double(x)))"),
    _unary("tanh", "tanh.approx.f32", f"{_FLOAT}: tanh", "float(std::tanh(double(x)))"),
    _unary("rsqrt", "rsqrt.approx.ftz.f32", f"{_FLOAT}: rsqrt", "float(1.0 / std::sqrt(double(x)))"),
    _unary("rcp", "rcp.approx.ftz.f32", f"{_FLOAT}: rcp", "float(1.0 / double(x))"),
    _pack("f16", "half_bits"),
    _pack("bf16", "bfloat_bits"),
    Helper(
        "unpack_f16",
        "void unpack_f16(float* x, u32 pair)",
        f"{_CVT}.f32.f16",
        asm(
            "{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}",
            '"=f"(x[0]), "=f"(x[1])',
            '"r"(pair)',
            volatile=False,
        ),
        "x[0] = emu::half_value(u16(pair));\nx[1] = emu::half_value(u16(pair >> 16));",
    ),
    Helper(
        "unpack_bf16",
        "void unpack_bf16(float* x, u32 pair)",
        "a bf16 is the upper half of an f32",
        "x[0] = __uint_as_float(pair << 16);\nx[1] = __uint_as_float(pair & 0xffff0000u);",
        None,
    ),
    Helper(
        "to_f16",
        "u16 to_f16(float x)",
        f"{_CVT}.rn.f16.f32",
        "u16 r;\n" + asm("cvt.rn.f16.f32 %0, %1;", '"=h"(r)', '"f"(x)', volatile=False) + "\nreturn r;",
        "return emu::half_bits(x);",
    ),
    Helper(
        "from_f16",
        "float from_f16(u16 x)",
        f"{_CVT}.f32.f16",
        "float r;\n" + asm("cvt.f32.f16 %0, %1;", '"=f"(r)', '"h"(x)', volatile=False) + "\nreturn r;",
        "return emu::half_value(x);",
    ),
    Helper(
        "to_bf16",
        "u16 to_bf16(float x)",
        f"{_CVT}.rn.bf16.f32",
        "u16 r;\n" + asm("cvt.rn.bf16.f32 %0, %1;", '"=h"(r)', '"f"(x)', volatile=False) + "\nreturn r;",
        "return emu::bfloat_bits(x);",
    ),
    Helper(
        "from_bf16",
        "float from_bf16(u16 x)",
        "a bf16 is the upper half of an f32",
        "return __uint_as_float((u32)x << 16);",
        None,
    ),
    Helper(
        "take_f32",
        "void take_f32(float* to, const float* from, u32 lane)",
        "Data Movement and Conversion Instructions: shfl.sync.idx: what a lane has",
        "*to = emmy_shfl_idx_f32(*from, lane);",
        None,
        uses=("shfl_idx_f32",),
    ),
    *(_shuffle(mode, dtype) for mode in ("xor", "idx") for dtype in ("f32", "u32")),
    Helper(
        "any",
        "int any(float x)",
        "Parallel Synchronization and Communication Instructions: vote.sync.any",
        "return __any_sync(0xffffffffu, x != 0.0f);",
        "struct Arg { float x; int y; } arg{x, 0};\n"
        'emu::warp("vote.any", site, &arg, [](emu::Lanes& w) {\n'
        "  int y = 0;\n"
        "  for (int l = 0; l < 32; ++l) y |= w.arg<Arg>(l).x != 0.0f;\n"
        "  for (int l = 0; l < 32; ++l) w.arg<Arg>(l).y = y;\n"
        "});\nreturn arg.y;",
    ),
    Helper(
        "across",
        "float across(float x)",
        "the x of lane `me ^ D`",
        "return emmy_shfl_xor_f32(x, D);",
        None,
        template="u32 D",
        uses=("shfl_xor_f32",),
    ),
    Helper(
        "trade",
        "void trade(u32* a, u32* b, u32 bit)",
        "exchange with lane `me ^ bit`: words (a, b) of the lower lane above (a, b) of the upper are transposed",
        "const bool upper = (threadIdx.x & bit) != 0u;\n"
        "const u32 got = emmy_shfl_xor_u32(upper ? *a : *b, bit);\n*a = upper ? got : *a;\n*b = upper ? *b : got;",
        None,
        uses=("shfl_xor_u32",),
    ),
    Helper(
        "transpose_pair",
        "void transpose_pair(u32* x)",
        "two neighbouring lanes: the 2 x 2 matrix of their halves of four words is transposed",
        "emmy_trade(x, x + 2, 1u);\nemmy_trade(x + 1, x + 3, 1u);",
        None,
        uses=("trade",),
    ),
    Helper(
        "transpose_quad",
        "void transpose_quad(u32* x)",
        "four neighbouring lanes: the 4 x 4 matrix of their words is transposed",
        "emmy_trade(x, x + 1, 1u);\nemmy_trade(x + 2, x + 3, 1u);\nemmy_trade(x, x + 2, 2u);\nemmy_trade(x + 1, x + 3, 2u);",
        None,
        uses=("trade",),
    ),
    # The shuffle tells the compiler that the whole warp has one value: what follows from it lives in uniform registers.
    Helper(
        "warp_index",
        "u32 warp_index()",
        "Data Movement and Conversion Instructions: shfl.sync",
        "return __shfl_sync(0xffffffffu, threadIdx.x / 32u, 0);",
        "return threadIdx.x / 32u;",
    ),
    Helper(
        "uniform",
        "int uniform(int x)",
        "Data Movement and Conversion Instructions: shfl.sync: x, which all lanes of the warp have alike",
        "return __shfl_sync(0xffffffffu, x, 0);",
        "return x;",
    ),
    Helper(
        "elect",
        "bool elect()",
        "Parallel Synchronization and Communication Instructions: elect.sync: true in one lane of the warp",
        "u32 chosen;\n"
        + asm("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}", '"=r"(chosen)')
        + "\nreturn chosen != 0u;",
        "return threadIdx.x % 32u == 0u;",
        HOPPER,
    ),
)
