"""A small random op of any kind, by seed: odd and even sizes, every dtype, every option. A kind without a line here fails a test."""

from __future__ import annotations

import random
from collections.abc import Callable

from emmy.ir.ops import Op, parse_op
from emmy.ir.target import Target

DTYPES = ("f16", "bf16", "f32")
FEW, MANY = (1, 2, 3, 7, 8, 16, 17, 33, 40), (3, 8, 16, 24, 33, 40, 64, 67, 72, 130)
FUNCTIONS = ("exp(tanh({}))", "tanh({})", "silu({})", "maximum({},0)", "{}*0.5", "rsqrt(1+{0}*{0})")


def random_op(kind: str, rng: random.Random, target: Target) -> Op:
    """An op of the kind that the target has code for."""
    return parse_op(f"{kind}:{_TEXTS[kind](rng, target)}")


def kinds() -> frozenset[str]:
    return frozenset(_TEXTS)


def _rows(rng: random.Random) -> str:
    m = rng.choice(FEW)
    return f"m({rng.randint(1, m)}..{m})" if m > 1 and rng.random() < 0.25 else str(m)


def _text(
    rng: random.Random, sizes: str, words: list[str], more: tuple[str, ...] = (), dtypes: tuple[str, ...] = DTYPES
) -> str:
    chosen = ",".join([*words, *(w for w in more if rng.random() < 0.35)])
    return f"{sizes}:{rng.choice(dtypes)}" + (f":{chosen}" if chosen else "")


def _product(*options: str, batched: bool = False) -> Callable[[random.Random, Target], str]:
    def text(rng: random.Random, target: Target) -> str:
        batch = f"{rng.choice((1, 2, 3))}x" if batched else ""
        return _text(rng, f"{batch}{_rows(rng)}x{rng.choice(MANY)}x{rng.choice(MANY)}", [], ("nk", *options))

    return text


def _matmul(rng: random.Random, target: Target) -> str:
    last = rng.choice((["gelu_tanh"], ["silu"], ["sum_squares"], [], []))
    words = [w for w in ("nk", "bias", "scale", "residual") if rng.random() < 0.35]
    return _text(rng, f"{_rows(rng)}x{rng.choice(MANY)}x{rng.choice(MANY)}", [*words, *last])


def _attention(rng: random.Random, target: Target) -> str:
    shared, each = rng.choice(((1, 1), (1, 3), (2, 1), (2, 2)))
    dims, dtypes = (
        ((5, 8, 24, 33), DTYPES) if target.is_cpu else ((16, 32, 48), DTYPES[:2])
    )  # as a GPU's mma takes them
    queries, keys, dim = rng.choice((1, 5, 17, 33, 40)), rng.choice((1, 7, 33, 64, 70)), rng.choice(dims)
    words = ["causal"] if rng.random() < 0.6 else []
    words += [f"window{rng.randint(1, keys)}"] if words and rng.random() < 0.4 else []
    words += [f"kv{shared}"] if each > 1 else []
    open_size = f"m(1..{max(2, keys)})"
    sizes = f"{open_size}x{open_size}" if rng.random() < 0.25 else f"{queries}x{keys}"
    return _text(rng, f"{shared * each}x{sizes}x{dim}", words, dtypes=dtypes)


def _paged_attention(rng: random.Random, target: Target) -> str:
    shared, each = rng.choice(((1, 1), (1, 3), (2, 1), (2, 2)))
    dims, dtypes = ((5, 8, 24, 33), DTYPES) if target.is_cpu else ((16, 32, 48), DTYPES[:2])
    sizes = (
        f"{rng.choice((1, 3))}x{shared * each}x{rng.choice((1, 5, 17))}x{rng.choice((7, 33, 64))}x{rng.choice(dims)}"
    )
    words = ["causal"] if rng.random() < 0.6 else []
    words += [f"kv{shared}"] if each > 1 else []
    words += [f"page{rng.choice((16, 32))}"]
    return _text(rng, sizes, words, dtypes=dtypes)


def _served_attention(rng: random.Random, target: Target) -> str:
    shared, each = rng.choice(((1, 1), (1, 3), (2, 1), (2, 2)))
    dims, dtypes = ((5, 8, 24, 33), DTYPES) if target.is_cpu else ((16, 32, 48), DTYPES[:2])
    keys = rng.choice((17, 33, 64))
    batch, queries = ("m(1..3)", "1") if rng.random() < 0.25 else (str(rng.choice((1, 3))), str(rng.choice((1, 5, 17))))
    words = [f"kv{shared}"] if each > 1 else []
    words += [f"window{rng.randint(1, keys)}"] if rng.random() < 0.4 else []
    words += [
        f"page{rng.choice((16, 32))}",
        rng.choice(("pcjgd", "pjgcd", "pgcdj,pgcjd" if target.is_cpu else "pcjgd")),
    ]
    return _text(rng, f"{batch}x{shared * each}x{queries}x{keys}x{rng.choice(dims)}", words, dtypes=dtypes)


def _of_rows(*options: str) -> Callable[[random.Random, Target], str]:
    return lambda rng, target: _text(rng, f"{_rows(rng)}x{rng.choice((*MANY, 251, 256))}", [], options)


def _cast(rng: random.Random, target: Target) -> str:
    one, other = rng.sample(DTYPES, 2)
    return f"{_rows(rng)}x{rng.choice(MANY)}:{one}:{other}"


def _rope(rng: random.Random, target: Target) -> str:
    half = rng.choice((4, 8, 20, 33))
    some = [d for d in range(1, half + 1) if 2 * half % d == 0]
    turned = [str(2 * rng.choice(some))] if rng.random() < 0.4 else []
    return _text(rng, f"{rng.choice((1, 3))}x{_rows(rng)}x{2 * half}", turned)


def _embedding(rng: random.Random, target: Target) -> str:
    return _text(rng, f"{_rows(rng)}x{rng.choice(MANY)}x{rng.choice((5, 50))}", [])


def _formula(rng: random.Random, target: Target) -> str:
    """A chain: elements from elements and from folds of rows, some of it an output."""
    m, n, dtype = _rows(rng), rng.choice(MANY), rng.choice(DTYPES)
    parts = [f"m={m},n={n}", f"X[m,n]:{dtype}", f"R[m,n]:{rng.choice(DTYPES)}", f"w[n]:{dtype}:constant"]
    known, last = ["X[m,n]", "R[m,n]", "w[n]"], rng.randint(0, 2)
    for i in range(last + 1):
        a, b = rng.choice(known), rng.choice(known)
        body = rng.choice(("{}+{}", "{}-{}", "{}*{}", "maximum({},{})")).format(a, b)
        if "X[m,n]" in body and rng.random() < 0.5:
            parts.append(f"F{i}[m]={rng.choice(('sum', 'max'))}(n,{body})")
            known.append(f"F{i}[m]*{1 / n!r}")
            body = f"{rng.choice(known)}-{known[-1]}"
        leaves = i == last or rng.random() < 0.3
        made = rng.choice(FUNCTIONS).format(f"({body}+X[m,n])")
        parts.append(f"Y{i}[m,n]{f':{rng.choice(DTYPES)}' if leaves else ''}={made}")
        known.append(f"Y{i}[m,n]")
    return ";".join(parts)


_TEXTS: dict[str, Callable[[random.Random, Target], str]] = {
    "matmul": _matmul,
    "bmm": _product(batched=True),
    "geglu": _product(),
    "swiglu": _product(),
    "norm_linear": _product("residual"),
    "geglu_linear": _product("residual"),
    "swiglu_linear": _product("residual"),
    "attention": _attention,
    "paged_attention": _paged_attention,
    "served_attention": _served_attention,
    "rms_norm": _of_rows("residual"),
    "norm_add_norm": _of_rows("scale"),
    "cast": _cast,
    "rope": _rope,
    "embedding": _embedding,
    "formula": _formula,
    **dict.fromkeys(
        ("rstd", "row_sum", "softmax", "scale", "norm_scale", "geglu_mul", "swiglu_mul", "copy"), _of_rows()
    ),
}
