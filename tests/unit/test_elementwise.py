"""Comparing elements: every count and every largest difference against exact arithmetic, however the tiles are cut."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import BY_NAME, TABLE, DType
from ckpttools.operations.elementwise import Difference, Elementwise, unravel
from ckpttools.operations.measure import Tolerance
from ckpttools.operations.numbers import codes_of, number_form
from tests.strategies import dtypes, shapes

F32, BF16, I64, U64 = (BY_NAME[n] for n in ("float32", "bfloat16", "int64", "uint64"))
WHOLE_BYTES = [d for d in TABLE if not d.is_sub_byte]


def compared(
    a: bytes, b: bytes, of_a: DType, of_b: DType | None = None, *, shape=None, tolerance=None, tiles: int = 1
) -> Difference:
    """Both sides given in so many tiles."""
    of_b = of_b or of_a
    elementwise = Elementwise(of_a, of_b, tolerance)
    count = len(a) * 8 // of_a.bits
    step = -(-max(count, 1) // tiles)
    step += -step % 4  # whole bytes, whatever the dtype
    for start in range(0, count, step):
        stop = min(count, start + step)
        elementwise.add(
            memoryview(a)[start * of_a.bits // 8 : stop * of_a.bits // 8],
            memoryview(b)[start * of_b.bits // 8 : stop * of_b.bits // 8],
        )
    return elementwise.result((count,) if shape is None else shape)


def f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


# an oracle that computes with fractions


def numbers(data: bytes, dtype: DType) -> list[tuple]:
    """Per element its numbers (real parts), as Python has them exactly."""
    form = number_form(dtype)
    with np.errstate(invalid="ignore"):
        read = form.read(codes_of(memoryview(data), dtype))
    flat = [(z.real, z.imag) for z in read.tolist()] if dtype.kind == "complex" else [(x,) for x in read.tolist()]
    if form.numbers == 1:
        return flat
    return [(flat[i][0], flat[i + 1][0]) for i in range(0, len(flat), 2)]


def is_finite(element: tuple) -> bool:
    return all(math.isfinite(x) for x in element)


def distance(x: tuple, y: tuple, dtype: DType) -> float | int:
    """|x - y| rounded once; of a packed pair the larger one."""
    parts = [abs(Fraction(p) - Fraction(q)) for p, q in zip(x, y, strict=True)]
    if dtype.kind == "complex":
        return min(math.hypot(*(float(p - q) for p, q in zip(x, y, strict=True))), sys.float_info.max)
    return rounded(max(parts))


def rounded(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return sys.float_info.max


def quotient(x: tuple, y: tuple, dtype: DType) -> float:
    if dtype.kind == "complex":
        size = math.hypot(*y)
        return min(distance(x, y, dtype) / size, sys.float_info.max) if size else 0.0
    return max(
        (
            min(rounded(abs(Fraction(p) - Fraction(q)) / abs(Fraction(q))), sys.float_info.max)
            for p, q in zip(x, y, strict=True)
            if q
        ),
        default=0.0,
    )


def expected_counts(a: bytes, b: bytes, dtype: DType) -> tuple[int, int, int, int]:
    """(bits, values, not finite, 0 in B) of two sides of one dtype."""
    codes = zip(codes_of(memoryview(a), dtype).tolist(), codes_of(memoryview(b), dtype).tolist(), strict=True)
    changed = [x != y for x, y in codes]
    pairs = [(x, y) for x, y, c in zip(numbers(a, dtype), numbers(b, dtype), changed, strict=True) if c and x != y]
    not_finite = [p for p in pairs if not (is_finite(p[0]) and is_finite(p[1]))]
    has_zero = (
        (lambda x, y: not any(y))
        if dtype.kind == "complex"
        else (lambda x, y: any(q == 0 != p for p, q in zip(x, y, strict=True)))
    )
    zero = [p for p in pairs if is_finite(p[0]) and is_finite(p[1]) and has_zero(*p)]
    return sum(changed), len(pairs), len(not_finite), len(zero)


@st.composite
def sides(draw: st.DrawFn, dtype: DType) -> tuple[bytes, bytes]:
    """Bytes of two tensors of one dtype, equal in most elements or in few."""
    count = draw(st.integers(1, 20)) * 4
    length = dtype.length_bytes(count)
    a = draw(st.binary(min_size=length, max_size=length))
    b = bytearray(draw(st.sampled_from([a, bytes(length), a[::-1]])))
    for at in draw(st.lists(st.integers(0, length - 1), max_size=8)):
        b[at] = draw(st.sampled_from([0, 1, 0x3F, 0x7F, 0x80, 0xFF]))
    return a, bytes(b)


class TestAgainstExactArithmetic:
    @given(st.data(), dtypes(), st.integers(1, 5))
    def test_counts(self, data, dtype, tiles):
        a, b = data.draw(sides(dtype))
        found = compared(a, b, dtype, tiles=tiles)
        if number_form(dtype) is None:
            codes = [codes_of(memoryview(x), dtype).tolist() for x in (a, b)]
            assert (found.bits, found.values) == (sum(x != y for x, y in zip(*codes, strict=True)), None)
        else:
            assert expected_counts(a, b, dtype) == (found.bits, found.values, found.not_finite, found.zero_in_b)

    @given(st.data(), dtypes(), st.integers(1, 5))
    def test_largest_absolute_difference_and_its_place(self, data, dtype, tiles):
        a, b = data.draw(sides(dtype))
        found = compared(a, b, dtype, tiles=tiles)
        if number_form(dtype) is None:
            assert found.max_abs is None
            return
        pairs = list(zip(numbers(a, dtype), numbers(b, dtype), strict=True))
        all_of = [distance(x, y, dtype) if is_finite(x) and is_finite(y) else 0 for x, y in pairs]
        if not any(all_of):
            assert found.max_abs is None
            return
        assert found.max_abs.difference == pytest.approx(max(all_of), rel=1e-15, abs=0)
        assert all_of[found.max_abs.index[0]] == pytest.approx(max(all_of), rel=1e-15, abs=0)

    @given(st.data(), dtypes(), st.integers(1, 5))
    def test_largest_relative_difference(self, data, dtype, tiles):
        a, b = data.draw(sides(dtype))
        found = compared(a, b, dtype, tiles=tiles)
        if number_form(dtype) is None:
            assert found.max_rel is None
            return
        pairs = list(zip(numbers(a, dtype), numbers(b, dtype), strict=True))
        all_of = [quotient(x, y, dtype) if is_finite(x) and is_finite(y) else 0 for x, y in pairs]
        if not any(all_of):
            assert found.max_rel is None
            return
        assert found.max_rel.difference == pytest.approx(max(all_of), rel=1e-14, abs=0)
        assert all_of[found.max_rel.index[0]] == pytest.approx(max(all_of), rel=1e-14, abs=0)

    @given(st.data(), st.sampled_from(WHOLE_BYTES), st.integers(1, 7), st.integers(1, 7))
    def test_tiles_change_nothing(self, data, dtype, one, other):
        a, b = data.draw(sides(dtype))
        tolerance = Tolerance(1e-3, 1e-3)
        assert compared(a, b, dtype, tiles=one, tolerance=tolerance) == compared(a, b, dtype, tiles=other, tolerance=tolerance)

    @given(st.data(), dtypes())
    def test_a_tensor_is_the_same_as_itself(self, data, dtype):
        a, _ = data.draw(sides(dtype))
        found = compared(a, bytes(a), dtype)
        assert found.is_same
        assert (None, None, None) == (found.first, found.max_abs, found.max_rel)

    @given(
        st.data(),
        st.sampled_from(
            [
                n
                for n in WHOLE_BYTES
                if n.kind in ("float", "int", "uint", "bool") and number_form(n) and number_form(n).numbers == 1
            ]
        ),
    )
    def test_tolerance_is_that_of_numpy(self, data, dtype):
        a, b = data.draw(sides(dtype))
        rtol, atol = data.draw(st.sampled_from([0.0, 1e-6, 0.1, 2.0])), data.draw(st.sampled_from([0.0, 1e-6, 0.5, 100.0]))
        x, y = ([n for (n,) in numbers(side, dtype)] for side in (a, b))
        if dtype.bits == 64 and dtype.kind != "float":
            close = [float(abs(p - q)) <= atol + rtol * float(abs(q)) for p, q in zip(x, y, strict=True)]
        else:
            with np.errstate(all="ignore"):
                close = np.isclose(np.array(x, "f8"), np.array(y, "f8"), rtol=rtol, atol=atol, equal_nan=True).tolist()
        assert close.count(False) == compared(a, b, dtype, tolerance=Tolerance(rtol, atol)).beyond


class TestZeroAndNaN:
    def test_negative_zero_differs_in_bits_and_not_in_value(self):
        found = compared(f32(-0.0, 1), f32(0.0, 1), F32)
        assert (1, 0, (0,), False, None) == (found.bits, found.values, found.first, found.is_same, found.max_abs)

    def test_nan_of_the_same_bits_is_the_same(self):
        assert compared(f32(math.nan), f32(math.nan), F32).is_same

    def test_nan_of_other_bits_differs_in_value(self):
        found = compared(b"\x00\x00\xc0\x7f", b"\x01\x00\xc0\x7f", F32)
        assert (1, 1, 1, None) == (found.bits, found.values, found.not_finite, found.max_abs)

    def test_tolerance_takes_nan_for_nan_and_zero_for_zero(self):
        a, b = f32(-0.0) + b"\x00\x00\xc0\x7f", f32(0.0) + b"\x01\x00\xc0\xff"
        assert compared(a, b, F32, tolerance=Tolerance()).is_close

    def test_infinity_is_close_to_itself_alone(self):
        a, b = f32(math.inf, math.inf, 1.0), f32(math.inf, -math.inf, math.inf)
        assert 2 == compared(a, b, F32, tolerance=Tolerance(10, 1e30)).beyond

    def test_what_is_not_finite_is_in_no_largest_difference(self):
        found = compared(f32(math.nan, math.inf, 1), f32(1, 1, 3), F32)
        assert (3, 3, 2) == (found.bits, found.values, found.not_finite)
        assert (2.0, (2,)) == (found.max_abs.difference, found.max_abs.index)

    def test_no_tolerance_is_never_close(self):
        assert not compared(f32(1), f32(1), F32).is_close

    def test_zero_in_b_has_no_relative_difference(self):
        found = compared(f32(1, 2), f32(0, 1), F32)
        assert (1, 1.0, (1,)) == (found.zero_in_b, found.max_rel.difference, found.max_rel.index)


class TestRange:
    def test_64_bit_integers_do_not_overflow(self):
        a, b = np.array([2**63 - 1, 0], "<i8"), np.array([-(2**63), 0], "<i8")
        assert 2**64 - 1 == compared(a.tobytes(), b.tobytes(), I64).max_abs.difference
        a, b = np.array([2**64 - 1], "<u8"), np.array([0], "<u8")
        assert 2**64 - 1 == compared(a.tobytes(), b.tobytes(), U64).max_abs.difference

    def test_neighbours_among_large_integers_differ_by_one(self):
        a, b = np.array([2**62 + 1], "<i8"), np.array([2**62], "<i8")
        found = compared(a.tobytes(), b.tobytes(), I64).max_abs
        assert (1, 2**62 + 1, 2**62) == (found.difference, found.a, found.b)

    def test_a_difference_beyond_float64_is_its_largest_number(self):
        a, b = np.array([1.5e308], "<f8"), np.array([-1.5e308], "<f8")
        assert sys.float_info.max == compared(a.tobytes(), b.tobytes(), BY_NAME["float64"]).max_abs.difference

    def test_a_difference_beyond_float32_is_exact(self):
        top = 3.4028234663852886e38
        assert 2 * top == compared(f32(top), f32(-top), F32).max_abs.difference

    def test_the_smallest_numbers_differ(self):
        tiny = 1.401298464324817e-45
        assert tiny == compared(f32(tiny), f32(0), F32).max_abs.difference

    def test_what_float32_cannot_tell_apart_float64_does(self):
        """Two differences that float32 rounds to one number: the larger is named though it comes second."""
        a, b = f32(2.0**25, 2.0**25), f32(-1.0, -1.5)
        found = compared(a, b, F32).max_abs
        assert (2.0**25 + 1.5, (1,)) == (found.difference, found.index)

    def test_the_first_of_equal_ones_is_named(self):
        values = np.zeros(100_000, "<f4")
        other = values.copy()
        other[[40_000, 70_000, 99_999]] = 2
        found = compared(values.tobytes(), other.tobytes(), F32)
        assert ((40_000,), (40_000,)) == (found.first, found.max_abs.index)


class TestTwoDtypes:
    def test_a_master_copy_is_compared_by_value(self):
        a = np.array([0x3F80, 0x4000], "<u2").tobytes()  # 1 and 2 in bfloat16
        found = compared(a, f32(1.0, 2.25), BF16, F32)
        assert (None, 1, 0.25, (1,)) == (found.bits, found.values, found.max_abs.difference, found.max_abs.index)

    def test_nan_on_both_sides_is_no_difference(self):
        assert compared(b"\xc0\x7f", f32(math.nan), BF16, F32).is_same

    def test_integers_of_two_widths_are_exact(self):
        a, b = np.array([2**62 + 1], "<i8"), np.array([-(2**31)], "<i4")
        found = compared(a.tobytes(), b.tobytes(), I64, BY_NAME["int32"]).max_abs
        assert (2**62 + 1 + 2**31, -(2**31)) == (found.difference, found.b)

    def test_signed_and_unsigned_integers_are_exact_up_to_64_bits(self):
        a, b = np.array([-1, 5, -(2**63)], "<i8"), np.array([2**63, 2**64 - 1, 2**64 - 1], "<u8")
        pairs = [compared(a[i : i + 1].tobytes(), b[i : i + 1].tobytes(), I64, U64).max_abs.difference for i in range(3)]
        assert [2**63 + 1, 2**64 - 6, 2**64 - 1] == pairs

    def test_a_real_tensor_beside_a_complex_one(self):
        a, b = np.array([3 + 4j], "<c8").tobytes(), f32(0)
        found = compared(a, b, BY_NAME["complex64"], F32)
        assert (5.0, 1) == (found.max_abs.difference, found.zero_in_b)

    @given(st.data(), dtypes(sub_byte=False), dtypes(sub_byte=False))
    def test_any_two_dtypes_of_whole_bytes_are_compared_or_cannot_be(self, data, of_a, of_b):
        elementwise = Elementwise(of_a, of_b)
        numbers = [form and form.numbers for form in map(number_form, (of_a, of_b))]
        assert elementwise.is_possible == (of_a == of_b or numbers in ([1, 1], [2, 2]))
        if elementwise.is_possible:
            count = data.draw(st.integers(1, 9))
            a, b = (data.draw(st.binary(min_size=d.length_bytes(count), max_size=d.length_bytes(count))) for d in (of_a, of_b))
            assert count == compared(a, b, of_a, of_b).elements


@given(shapes(min_side=1))
def test_unravel_is_that_of_numpy(shape):
    for position in range(min(math.prod(shape), 50)):
        assert tuple(int(i) for i in np.unravel_index(position, shape)) == unravel(position, shape)
