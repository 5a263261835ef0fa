"""Short vectors of elements between memory and f32 registers, and functions of numbers in instructions. Knows no loops."""

from __future__ import annotations

from collections.abc import Callable
from math import e, log2, pi, sqrt

from emmy.codegen.cuda_scope import Walk
from emmy.codegen.kernel import Call, Int, Let, Load, Num, Number, Store, Var, plus, times
from emmy.codegen.kernel_gpu import Do, Ref, Regs, Stmt, counter, unrolled
from emmy.ir.dtype import DType, size_bytes

WIDEST = 16  # bytes of one load or store


def load(w: Walk, to: Ref, dtype: DType, n: int, source: Ref, how: str) -> tuple[Stmt, ...]:
    """n elements from `source` on to f32 registers. how: ldg, ldg_nc (memory that no one writes meanwhile), lds."""
    item, out = size_bytes(dtype), list[Stmt]()
    wide = min(n, WIDEST // item)
    for first in range(0, n, wide):
        words = w.fresh("words")
        there = Ref(source.view, plus(source.at, Int(first * (item if how == "lds" else 1))))
        here, x = Ref(words, Int(0)), Ref(to.view, plus(to.at, Int(first)))
        out += [
            word_regs(words, wide * item),
            fetched(here, wide * item, there, how),
            *unpacked(x, dtype, wide, here),
        ]
    return tuple(out)


def store(w: Walk, to: Ref, dtype: DType, n: int, x: Ref) -> tuple[Stmt, ...]:
    """n numbers from f32 registers, rounded to `dtype`, to global memory."""
    item, out = size_bytes(dtype), list[Stmt]()
    wide = min(n, WIDEST // item)
    for first in range(0, n, wide):
        words = w.fresh("words")
        here, there = Ref(words, Int(0)), Ref(to.view, plus(to.at, Int(first)))
        rounded = packed(here, dtype, wide, Ref(x.view, plus(x.at, Int(first))))
        out += [word_regs(words, wide * item), *rounded, Do(f"emmy_stg_b{8 * wide * item}", (there, here))]
    return tuple(out)


def leave(w: Walk, to: Ref, x: Ref) -> tuple[Stmt, ...]:
    """A number to its place among marked parts."""
    word = w.fresh("word")
    mine = Store(word, Int(0), Call("as_b32", (Load(x.view, x.at),)))
    return Regs(word, "b32", 1), mine, Do("emmy_mark_leave", (marked(to), Ref(word, Int(0))))


def add(w: Walk, to: Ref, x: Ref) -> tuple[Stmt, ...]:
    """A number to one in memory, whenever that may be."""
    word = w.fresh("word")
    mine = Store(word, Int(0), Call("as_b32", (Load(x.view, x.at),)))
    return Regs(word, "b32", 1), mine, Do("emmy_add_f32", (to, Ref(word, Int(0))))


def marked(at: Ref) -> Ref:
    """Where a number of 4 bytes is that has a mark beside it."""
    return Ref(at.view, times(at.at, Int(2)))


def word_regs(name: str, n_bytes: int) -> Regs:
    """Registers for that many bytes as they are in memory."""
    return Regs(name, "b16", 1) if n_bytes == 2 else Regs(name, "b32", n_bytes // 4)


def fetched(words: Ref, n_bytes: int, source: Ref, how: str) -> Do:
    """Bytes from memory to words, as `load` says how."""
    space, _, cache = how.partition("_")
    return Do(f"emmy_{space}_b{8 * n_bytes}{f'_{cache}' if cache else ''}", (words, source))


def unpacked(to: Ref, dtype: DType, n: int, words: Ref) -> tuple[Stmt, ...]:
    """The n elements that words hold, as f32."""
    if dtype in ("f32", "i32"):
        i = counter("u", n)
        number = Call("as_f32" if dtype == "f32" else "from_i32", (Load(words.view, plus(words.at, i)),))
        return unrolled("u", n, (Store(to.view, plus(to.at, i), number),))
    if n == 1:
        return (Store(to.view, to.at, Call(f"from_{dtype}", (Load(words.view, words.at),))),)
    i = counter("u", n // 2)
    pair = (Ref(to.view, plus(to.at, times(i, Int(2)))), Load(words.view, plus(words.at, i)))
    return unrolled("u", n // 2, (Do(f"emmy_unpack_{dtype}", pair),))


def packed(words: Ref, dtype: DType, n: int, x: Ref) -> tuple[Stmt, ...]:
    """n f32 numbers in words, rounded to `dtype`."""
    if dtype == "f32":
        i = counter("u", n)
        word = Call("as_b32", (Load(x.view, plus(x.at, i)),))
        return unrolled("u", n, (Store(words.view, plus(words.at, i), word),))
    if n == 1:
        return (Store(words.view, words.at, Call(f"to_{dtype}", (Load(x.view, x.at),))),)
    i = counter("u", n // 2)
    two = tuple(Load(x.view, plus(x.at, times(i, Int(2)), Int(k))) for k in (0, 1))
    return unrolled("u", n // 2, (Store(words.view, plus(words.at, i), Call(f"pack_{dtype}", two)),))


# ---------------------------------------------------------------- functions
def function(fn: str, args: tuple[Number, ...], name: Callable[[Number], Number]) -> Number:
    """fn(args) in what a GPU has: 2^x, reciprocals and arithmetic. `name` gives a number that is used twice a variable.

    sigmoid(y) = 1 / (1 + 2^(-y log2 e)); silu(x) = x sigmoid(x); gelu_tanh(x) = x sigmoid(2 u), because
    (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
    """
    match fn:
        case "exp":
            return Call("exp2", (_mul(args[0], Num(log2(e))),))
        case "silu":
            x = name(args[0])
            return _mul(x, _sigmoid(x, 1.0))
        case "gelu_tanh":
            x = name(args[0])
            u = _mul(x, Call("fma", (_mul(x, x), Num(0.044715), Num(1.0))))
            return _mul(x, _sigmoid(u, 2 * sqrt(2 / pi)))
        case "tanh":
            return Call("fma", (_sigmoid(args[0], 2.0), Num(2.0), Num(-1.0)))
        case _:
            return Call(fn, args)


def _mul(a: Number, b: Number) -> Number:
    return Call("mul", (a, b))


def _sigmoid(x: Number, scale: float) -> Number:
    return Call("rcp", (Call("add", (Num(1.0), Call("exp2", (_mul(x, Num(-scale * log2(e))),)))),))


def named(w: Walk, out: list[Stmt]) -> Callable[[Number], Number]:
    """What gives a number a variable, declared in `out`."""

    def name(x: Number) -> Number:
        if isinstance(x, Var | Num):
            return x
        let = Let(w.fresh("x"), x)
        out.append(let)
        return Var(let.name)

    return name
