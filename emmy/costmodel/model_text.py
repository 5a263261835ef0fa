"""Whether a text is a sound LightGBM model, checked before LightGBM sees it. Knows the format, runs no model.

LightGBM's parser aborts the whole process on some malformed texts (measured with 4.7.0: one repeated line is enough),
takes the last of repeated keys without a word, and before 4.6 overran its buffers (CVE-2024-43598). So sizes, counts and
indices are checked here, and everything Emmy does not use (categories, linear leaves, several classes) is refused.
Format: `GBDT::SaveModelToString` and `Tree::ToString` in LightGBM's source, version v4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from emmy.errors import DataError

MAX_BYTES = 32 << 20
MAX_LEAVES = 4096

_PER_SPLIT = (
    "split_feature", "threshold", "decision_type", "left_child", "right_child",
)  # fmt: skip
_PER_LEAF = ("leaf_value",)
# What training leaves behind and no prediction needs; more than half of a text.
_SPARE_SPLIT, _SPARE_LEAF = (
    ("split_gain", "internal_value", "internal_weight", "internal_count"),
    ("leaf_weight", "leaf_count"),
)
_DIGITS = {"threshold": 10, "leaf_value": 6}
_SCALARS = ("num_leaves", "num_cat", "is_linear", "shrinkage")
_HEADER = (
    "version", "num_class", "num_tree_per_iteration", "label_index", "max_feature_idx", "objective", "feature_names",
    "feature_infos", "tree_sizes",
)  # fmt: skip
_FIXED = (
    ("version", ("v4",)), ("num_class", ("1",)), ("num_tree_per_iteration", ("1",)), ("label_index", ("0",)),
    ("objective", ("regression", "lambdarank")),
)  # fmt: skip
_RANGE = re.compile(r"none|\[[-+.e\d]+:[-+.e\d]+\]")
_END = "end of trees\n"


def check_model_text(text: str, feature_names: Sequence[str], where: str) -> None:
    """Raises DataError, naming `where` and the fault, unless `text` is a model over exactly these features."""
    if len(text) > MAX_BYTES:
        raise DataError(f"{where}: {len(text)} bytes of model text, allowed are {MAX_BYTES}")
    head, found, _ = text.partition("\n\n")
    if not found or not head.startswith("tree\n"):
        raise DataError(f"{where}: not a LightGBM model text: it must begin with 'tree'")
    header = _keys(head.splitlines()[1:], _HEADER, where)
    for key, allowed in _FIXED:
        _expect(header[key] in allowed, where, f"{key} is {header[key][:40]}, expected {' or '.join(allowed)}")
    n = len(feature_names)
    _expect(
        header["max_feature_idx"] == str(n - 1), where, f"max_feature_idx {header['max_feature_idx']}, expected {n - 1}"
    )
    _expect(header["feature_names"].split(" ") == list(feature_names), where, "its features are not those of its card")
    infos = header["feature_infos"].split(" ")
    _expect(len(infos) == n and all(map(_RANGE.fullmatch, infos)), where, f"feature_infos are not {n} ranges")
    sizes = _integers(header["tree_sizes"], where, "tree_sizes")
    at = len(head) + len(found)
    for i, size in enumerate(sizes):
        _expect(size > 0 and at + size <= len(text), where, f"tree {i} of {size} bytes reaches past the end")
        _check_tree(text[at : at + size], i, n, where)
        at += size
    _expect(text[at:] == _END, where, f"{len(sizes)} trees are not followed by the line {_END.strip()!r} alone")


def compact(text: str) -> str:
    """The text without what no prediction needs, numbers no longer than they must be: two fifths of it.

    Thresholds keep ten digits, enough to tell apart features in single precision; leaves keep six.
    """
    head, _, rest = text.partition("\n\n")
    blocks = rest[: rest.index(_END)].split("Tree=")[1:]
    trees = ["Tree=" + "".join(_short(line) for line in block.rstrip("\n").split("\n")) + "\n\n" for block in blocks]
    lines = (x for x in head.split("\n") if not x.startswith("tree_sizes="))
    sizes = " ".join(str(len(tree)) for tree in trees)
    return "\n".join([*lines, f"tree_sizes={sizes}"]) + "\n\n" + "".join(trees) + _END


def _short(line: str) -> str:
    key, _, value = line.partition("=")
    if key in (*_SPARE_SPLIT, *_SPARE_LEAF):
        return ""
    if key in _DIGITS:
        value = " ".join(f"{float(word):.{_DIGITS[key]}g}" for word in value.split())
        return f"{key}={value}\n"
    return f"{line}\n"


def _check_tree(block: str, number: int, n_features: int, where: str) -> None:
    where = f"{where}: tree {number}"
    lines = block.rstrip("\n").split("\n")
    _expect(lines[0] == f"Tree={number}" and block.endswith("\n"), where, f"begins with {lines[0][:40]!r}")
    keys = _keys(lines[1:], (*_SCALARS, *_PER_SPLIT, *_PER_LEAF), where, (*_SPARE_SPLIT, *_SPARE_LEAF))
    leaves = _integers(keys["num_leaves"], where, "num_leaves")[0]
    _expect(1 <= leaves <= MAX_LEAVES, where, f"{leaves} leaves, allowed are 1 to {MAX_LEAVES}")
    _expect(keys["num_cat"] == "0" and keys["is_linear"] == "0", where, "has categories or linear leaves")
    for key in (*_PER_SPLIT, *(k for k in _SPARE_SPLIT if k in keys)):
        values = _numbers(keys[key], where, key)
        _expect(len(values) == leaves - 1, where, f"{key} has {len(values)} values, {leaves} leaves need {leaves - 1}")
    for key in (*_PER_LEAF, *(k for k in _SPARE_LEAF if k in keys)):
        values = _numbers(keys[key], where, key)
        # A tree without splits keeps its leaf's value only.
        _expect(
            len(values) == leaves or (leaves == 1 and not values), where, f"{key} has {len(values)} values for {leaves}"
        )
    _expect(len(_numbers(keys["leaf_value"], where, "leaf_value")) == leaves, where, "a leaf has no value")
    features = _integers(keys["split_feature"], where, "split_feature")
    _expect(all(0 <= f < n_features for f in features), where, f"splits on a feature outside 0..{n_features - 1}")
    children = _integers(keys["left_child"], where, "left_child") + _integers(keys["right_child"], where, "right_child")
    # Every split but the root and every leaf is the child of one split: no cycle, nothing out of range.
    _expect(
        sorted(children) == [c for c in range(-leaves, leaves - 1) if c != 0 and leaves > 1], where, "is not a tree"
    )


def _keys(lines: Sequence[str], needed: Sequence[str], where: str, spare: Sequence[str] = ()) -> dict[str, str]:
    """key -> value of lines `key=value`; every needed key exactly once, spare ones at most once, and no other."""
    out: dict[str, str] = {}
    for line in lines:
        key, sign, value = line.partition("=")
        _expect(bool(sign) and key in (*needed, *spare) and "=" not in value, where, f"unexpected line {line[:40]!r}")
        _expect(key not in out, where, f"{key} occurs twice")
        out[key] = value
    missing = [key for key in needed if key not in out]
    _expect(not missing, where, f"lacks {', '.join(missing)}")
    return out


def _integers(text: str, where: str, key: str) -> list[int]:
    _expect(re.fullmatch(r"(-?\d{1,9}( -?\d{1,9})*)?", text) is not None, where, f"{key} is not a list of integers")
    return [int(word) for word in text.split()]


def _numbers(text: str, where: str, key: str) -> list[float]:
    try:
        return [float(word) for word in text.split()]
    except ValueError:
        raise DataError(f"{where}: {key} is not a list of numbers") from None


def _expect(holds: bool, where: str, otherwise: str) -> None:
    if not holds:
        raise DataError(f"{where}: {otherwise}. Train it anew: `emmy train-costmodel`")
