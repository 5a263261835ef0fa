"""What JSON says, as the frozen dataclass that it is to be: read strictly, field by field, by the types written there.

Files are changed by hands, tools and full disks: whoever reads one of them gets an object whose fields are what they say, or the place
that is not. Knows no file and no format.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Mistyped(Exception):
    """A value is not of its type; `where` grows on the way out: `.cases[3].op`."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(where, what)
        self.where, self.what = where, what

    def __str__(self) -> str:
        return f"{self.where.lstrip('.')} {self.what}".strip()


def read_as(kind: type[T], raw: object) -> T:
    """The object that `raw`, of json.loads, holds: tuples of lists, no field missing and none unknown. Raises Mistyped.

    A bool is no int, an int is a float; numbers are finite and of 64 bits, texts such as can be written.
    """
    return cast("T", _reader(cast("Hashable", kind))(raw))


Reader = Callable[[object], object]


@cache
def _reader(kind: object) -> Reader:
    """What reads a value of a type, raising Mistyped."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is object:
        return lambda x: x
    if isinstance(kind, type) and is_dataclass(kind):
        return _object(kind)
    if origin is Literal:
        return lambda x: x if x in args else _refuse(x, kind)
    if origin is UnionType:  # X | None, or plain types
        plain = {a: _reader(a) for a in args if a in (int, str, NoneType)}
        others = [_reader(a) for a in args if a not in plain]
        other: Reader = others[0] if others else lambda x: _refuse(x, kind)
        return lambda x: plain.get(type(x), other)(x)
    if origin is tuple:
        return _sequence(_reader(args[0]))
    if origin is Mapping:
        of = _reader(args[1])
        name = _reader(str)
        return lambda x: {str(name(k)): of(v) for k, v in x.items()} if isinstance(x, dict) else _refuse(x, kind)
    if kind is float:
        return lambda x: _number(x) if isinstance(x, int | float) else _refuse(x, kind)
    return lambda x: x if type(x) is kind and _is_sane(x) else _refuse(x, kind)


def _number(x: int | float) -> float:
    if type(x) is bool or not _is_sane(x):
        _refuse(x, float)
    return float(x)


def _is_sane(x: object) -> bool:
    """Whether it can be handed on: a finite number, a whole one of 64 bits, a text without half of a character."""
    match x:
        case str():
            return x.isascii() or not any("\ud800" <= c <= "\udfff" for c in x)
        case int():
            return -(1 << 63) <= x < 1 << 63
        case float():
            return isfinite(x)
    return True


def _refuse(x: object, kind: object) -> NoReturn:
    raise Mistyped("", f"is {repr(x)[:60]}, which is not {getattr(kind, '__name__', kind)}")


def _sequence(of: Reader) -> Reader:
    def read(x: object) -> object:
        if not isinstance(x, list):
            _refuse(x, list)
        out = []
        for each in x:
            try:
                out.append(of(each))
            except Mistyped as e:
                raise Mistyped(f"[{len(out)}]{e.where}", e.what) from None
        return tuple(out)

    return read


def _object(cls: type) -> Reader:
    """The dataclass that an object holds, field by field: none missing, none unknown."""
    hints = get_type_hints(cls)
    readers = {f.name: _reader(hints[f.name]) for f in fields(cls)}

    def read(x: object) -> object:
        if not isinstance(x, dict) or x.keys() != readers.keys():
            odd = sorted(x.keys() ^ readers.keys()) if isinstance(x, dict) else type(x).__name__
            raise Mistyped("", f"lacks fields, or has unknown ones: {odd}")
        found = {}
        for name, reader in readers.items():
            try:
                found[name] = reader(x[name])
            except Mistyped as e:
                raise Mistyped(f".{name}{e.where}", e.what) from None
        return cls(**found)

    return read
