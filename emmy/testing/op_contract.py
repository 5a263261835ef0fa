"""What every op promises, as tests that an op's test class inherits. Must not know any particular op.

class TestMatmul(OpContract):
    ops = (matmul(3, 5, 7), ...)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, get_args

import numpy as np
import pytest

from emmy.errors import PlanError, UsageError
from emmy.ir import interpret
from emmy.ir.dtype import decode, encode, storage
from emmy.ir.ops import Accumulate, InputKind, Op, Storage, parse_op

KINDS: tuple[InputKind, ...] = get_args(InputKind)
ACCUMULATE: tuple[Accumulate, ...] = get_args(Accumulate)


class OpContract:
    """Tests of one kind of op. A subclass sets `ops`, small ones of every flavour."""

    ops: ClassVar[tuple[Op, ...]]

    def cases(self) -> Iterator[tuple[Op, InputKind, dict[str, int]]]:
        """Every op with each kind of input, at the ends of its symbols' ranges."""
        for op in self.ops:
            for kind in KINDS:
                yield op, kind, op.typical_sizes()
                if op.program().syms:
                    yield op, kind, {s.name: s.lo for s in op.program().syms}

    def test_its_key_parses_back_to_an_equal_op(self) -> None:
        for op in self.ops:
            assert parse_op(op.key) == op and parse_op(op.key).key == op.key == str(op)
            assert op.key.startswith(f"{op.kind}:") and not set(" |/") & set(op.key)
        assert len({op.key for op in self.ops}) == len(self.ops)

    def test_inputs_have_the_shapes_and_storage_the_program_says(self) -> None:
        for op, kind, sizes in self.cases():
            size = op.program().sizes(sizes)
            x = op.inputs(kind, 0, sizes)
            assert list(x) == [v.name for v in op.program().inputs]
            for v in op.program().inputs:
                assert x[v.name].shape == tuple(size[a] for a in v.axes) and x[v.name].dtype == storage(v.dtype)

    def test_a_seed_names_its_inputs_and_another_seed_names_others(self) -> None:
        for op, kind, sizes in self.cases():
            one, same, other = (op.inputs(kind, seed, sizes) for seed in (1, 1, 2))
            assert all(np.array_equal(one[v], same[v]) for v in one)
            assert any(not np.array_equal(one[v], other[v]) for v in one)

    def test_integer_inputs_are_whole_numbers(self) -> None:
        for op in self.ops:
            for v in op.program().inputs:
                x = decode(op.inputs("integer", 3, op.typical_sizes())[v.name], v.dtype)
                assert np.array_equal(x, np.rint(x))

    def test_a_size_is_asked_for_and_must_be_in_its_range(self) -> None:
        for op in self.ops:
            for s in op.program().syms:
                for sizes in (None, {}, {s.name: s.lo - 1}, {s.name: s.hi + 1}):
                    with pytest.raises(PlanError, match=f"{s.lo}..{s.hi}"):
                        op.inputs("normal", 0, sizes)

    def test_a_part_of_a_symbol_s_range_is_the_op_of_fewer_sizes(self) -> None:
        for op in self.ops:
            for s in op.program().syms:
                for lo, hi in ((s.lo, s.hi), (s.lo, (s.lo + s.hi) // 2), (s.hi, s.hi)):
                    part = op.within(s.name, lo, hi)
                    assert part.program() == op.program().within(s.name, lo, hi) and parse_op(part.key) == part
                for lo, hi in ((s.lo - 1, s.hi), (s.lo, s.hi + 1), (s.hi, s.hi - 1)):
                    with pytest.raises(UsageError):
                        op.within(s.name, lo, hi)
            with pytest.raises(UsageError, match="open until run time"):
                op.within("nothing", 1, 2)

    def test_the_reference_is_what_the_program_means(self) -> None:
        for op, kind, sizes in self.cases():
            x = op.inputs(kind, 5, sizes)
            decoded = {v.name: decode(x[v.name], v.dtype) for v in op.program().inputs}
            want, got = op.reference(x), interpret.run(op.program(), decoded, sizes)
            assert set(want) == set(op.program().outputs)
            for name in want:
                np.testing.assert_allclose(
                    got[name], want[name], rtol=1e-12, atol=1e-12, err_msg=f"{name} of {op} {kind}"
                )

    def test_work_is_positive_and_grows_with_a_symbol(self) -> None:
        for op in self.ops:
            work = op.work()
            assert work.flops > 0 and work.bytes > 0 and work.intensity == work.flops / work.bytes
            for s in op.program().syms:
                if s.lo < s.hi:
                    low = op.work({**op.typical_sizes(), s.name: s.lo})
                    assert low.flops < work.flops and low.bytes < work.bytes

    def test_tolerance_is_small_and_wider_for_coarser_sums(self) -> None:
        for op in self.ops:
            bounds = [op.tolerance(a) for a in ACCUMULATE]
            assert all(0 < absolute < 0.2 and 0 < relative <= 2.0**-7 for absolute, relative in bounds)
            assert bounds == sorted(bounds)

    def test_the_rounded_reference_is_right_and_exact_where_arithmetic_is(self) -> None:
        for op, kind, sizes in self.cases():
            x = op.inputs(kind, 7, sizes)
            assert op.error_norm(_answer(op, x), x, kind) <= 1

    def test_an_answer_that_is_missing_or_misshapen_or_not_a_number_is_infinitely_wrong(self) -> None:
        for op, kind, sizes in self.cases():
            x = op.inputs(kind, 7, sizes)
            for name, right in _answer(op, x).items():
                rest = {k: v for k, v in _answer(op, x).items() if k != name}
                assert op.error_norm(rest, x, kind) == np.inf
                assert op.error_norm({**rest, name: right[..., None]}, x, kind) == np.inf
                dtype = op.program().value(name).dtype
                bad = decode(right, dtype)
                bad[tuple(n - 1 for n in bad.shape)] = np.nan
                assert op.error_norm({**rest, name: encode(bad, dtype)}, x, kind) == np.inf

    def test_one_wrong_element_is_seen(self) -> None:
        for op, kind, sizes in self.cases():
            x = op.inputs(kind, 7, sizes)
            for name, right in _answer(op, x).items():
                absolute, relative = op.tolerance(output=name)
                dtype = op.program().value(name).dtype
                for at in (0, right.size - 1):
                    bad = decode(right, dtype)
                    place = np.unravel_index(at, bad.shape)
                    bad[place] += 4 * (absolute + 2 * relative * abs(bad[place])) + (kind == "integer")
                    got = {**_answer(op, x), name: encode(bad, dtype)}
                    assert op.error_norm(got, x, kind) > 1, f"{op} {kind} {name}{list(place)}"


def _answer(op: Op, inputs: dict[str, Storage]) -> dict[str, Storage]:
    """The reference, rounded to the form in which a kernel stores it."""
    return {name: encode(x, op.program().value(name).dtype) for name, x in op.reference(inputs).items()}
