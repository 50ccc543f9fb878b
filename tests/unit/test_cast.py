"""Casts are exact by their definition, agree with torch and ml_dtypes where those agree, and count what they lose."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.cast import DTYPES, CastCounts, Caster, cast, require_castable
from ckpttools.dtypes import BY_NAME, TABLE
from ckpttools.errors import ConversionError

SMALL = [name for name in DTYPES if BY_NAME[name].bits <= 16]
EIGHT = [name for name in DTYPES if BY_NAME[name].bits == 8]
PAIRS = [(a, b) for a in DTYPES for b in DTYPES if a != b]
WIDENING = [
    *((source, "float64") for source in DTYPES if source != "float64"),
    *((source, "float32") for source in SMALL),
    *((source, target) for source in EIGHT for target in ("float16", "bfloat16")),
]
LARGEST = {"float8_e4m3fn": 448, "float8_e4m3fnuz": 240, "float8_e5m2fnuz": 57344}
"""The dtypes without infinity."""
CODE = {name: f"<u{BY_NAME[name].bits // 8}" for name in DTYPES}


def cast_codes(codes, source: str, target: str):
    """Codes of `source` as codes of `target`, and the counts."""
    codes = np.asarray(codes, CODE[source])
    view, counts = cast(memoryview(codes.tobytes()), BY_NAME[source], BY_NAME[target])
    return np.frombuffer(view, CODE[target]), counts


def codes_of(dtype: str, values):
    """Codes of Python floats."""
    codes = np.array(values, "float64").view("<u8")
    return codes if dtype == "float64" else cast_codes(codes, "float64", dtype)[0]


def values_of(codes, dtype: str):
    """Codes as float64."""
    return codes.view("float64") if dtype == "float64" else cast_codes(codes, dtype, "float64")[0].view("float64")


@lru_cache
def interesting(dtype: str):
    """Every code of a narrow dtype; of a wide one all values of the others, what lies half-way, the neighbours, and more."""
    bits = BY_NAME[dtype].bits
    if bits <= 16:
        return np.arange(1 << bits, dtype=CODE[dtype])
    found = [np.random.default_rng(1).integers(0, (1 << bits) - 1, 50_000, CODE[dtype], endpoint=True)]
    one = np.array([1], CODE[dtype])
    for other in SMALL:
        exact, _ = cast_codes(np.arange(1 << BY_NAME[other].bits), other, dtype)
        values = exact.view(dtype)
        with np.errstate(all="ignore"):
            half_way = (values[:-1] / 2 + values[1:] / 2).view(CODE[dtype])
        found += [codes + step for codes in (exact, half_way) for step in (one - one, one, one - one - one)]
    return np.unique(np.concatenate(found))


def value_of(code: int, dtype: str) -> Fraction | float:
    """The value of a code, by the definition of the formats and in exact arithmetic."""
    exponent_bits, mantissa_bits, bias = {
        "float16": (5, 10, 15),
        "bfloat16": (8, 7, 127),
        "float8_e4m3fn": (4, 3, 7),
        "float8_e5m2": (5, 2, 15),
        "float8_e4m3fnuz": (4, 3, 8),
        "float8_e5m2fnuz": (5, 2, 16),
    }[dtype]
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if dtype.endswith("fnuz"):
        if code == 0x80:
            return math.nan
    elif dtype == "float8_e4m3fn":
        if code & 0x7F == 0x7F:
            return math.nan
    elif exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    hidden = 1 << mantissa_bits if exponent else 0
    return sign * (mantissa | hidden) * Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)


@lru_cache
def finite_values(dtype: str) -> list[tuple[Fraction, int]]:
    """(value, last bit of its code) of every finite code, in order."""
    values = {(value_of(code, dtype), code & 1) for code in range(256)}
    return sorted(v for v in values if math.isfinite(v[0]))


def nearest(value: Fraction, target: str) -> Fraction | float:
    """The value of `target` nearest to a number, ties to the even code, by looking at all of them."""
    finite = finite_values(target)
    largest = finite[-1][0]
    if abs(value) >= largest + (largest - finite[-2][0]) / 2:
        return math.copysign(math.inf if target == "float8_e5m2" else largest, value)
    return min(finite, key=lambda item: (abs(item[0] - value), item[1]))[0]


@pytest.mark.parametrize("dtype", SMALL)
def test_codes_have_the_values_of_the_formats(dtype):
    values = values_of(np.arange(1 << BY_NAME[dtype].bits, dtype=CODE[dtype]), dtype)
    expected = [value_of(code, dtype) for code in range(len(values))]
    assert all(math.isnan(e) if math.isnan(v) else v == e for v, e in zip(values.tolist(), expected, strict=True))


@pytest.mark.parametrize("target", EIGHT)
@pytest.mark.parametrize("source", ["float64", "float32"])
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False) | st.floats(-500, 500, width=32))
def test_eight_bits_are_the_nearest(source, target, value):
    got, _ = cast_codes(codes_of(source, [value]), source, target)
    assert value_of(int(got[0]), target) == nearest(Fraction(value), target)


@pytest.mark.parametrize(("target", "half_step"), [("bfloat16", -8), ("float8_e4m3fn", -4), ("float8_e5m2", -3)])
def test_float64_is_rounded_once(target, half_step):
    just_above_a_tie = 1 + 2.0**half_step + 2.0**-50
    in_one_step, _ = cast_codes(codes_of("float64", [just_above_a_tie]), "float64", target)
    in_two_steps, _ = cast_codes(codes_of("float32", [just_above_a_tie]), "float32", target)
    assert int(in_one_step[0]) == int(in_two_steps[0]) + 1


@pytest.mark.parametrize(("source", "target"), WIDENING)
def test_widening_and_back_restores_every_bit(source, target):
    codes = interesting(source)
    wide, there = cast_codes(codes, source, target)
    back, and_back = cast_codes(wide, target, source)
    assert back.tobytes() == codes.tobytes()
    assert there == and_back == CastCounts()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_is_nan_stays_nan_and_nothing_finite_becomes_it(source, target):
    codes = interesting(source)
    values = values_of(codes, source)
    got, _ = cast_codes(codes, source, target)
    expected = np.isnan(values) | (np.isinf(values) & (target in LARGEST))
    assert np.array_equal(np.isnan(values_of(got, target)), expected)


@pytest.mark.parametrize(("source", "target"), [p for p in PAIRS if p[0] != "float64" or p[1] == "float32"])
def test_agrees_with_torch_on_numbers(source, target):
    torch = pytest.importorskip("torch")
    codes = interesting(source)
    values = values_of(codes, source)
    codes = codes[np.abs(values) <= LARGEST.get(target, np.inf)]  # beyond, torch saturates or makes NaN, by version and dtype
    if target in LARGEST:
        codes = codes[np.isfinite(values_of(codes, source))]
    tensor = torch.from_numpy(codes.view(f"i{codes.itemsize}").copy()).view(getattr(torch, source))
    ours, _ = cast_codes(codes, source, target)
    theirs = tensor.to(getattr(torch, target)).view(getattr(torch, f"int{8 * ours.itemsize}")).numpy()
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("target", ["float32", "float16"])
def test_agrees_with_numpy_on_float64(target):
    codes = interesting("float64")
    codes = codes[~np.isnan(codes.view("float64"))]
    with np.errstate(all="ignore"):
        theirs = codes.view("float64").astype(target)
    assert cast_codes(codes, "float64", target)[0].tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("source", "target"), [p for p in PAIRS if p[0] in ("float32", "float16", "bfloat16") and p[1] in SMALL])
def test_agrees_with_ml_dtypes_on_numbers_and_infinity(source, target):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    known = {"float32": np.float32, "float16": np.float16}
    codes = interesting(source)
    values = values_of(codes, source)
    codes = codes[(np.abs(values) <= LARGEST.get(target, np.inf)) | np.isinf(values)]  # beyond, ml_dtypes makes NaN
    with np.errstate(all="ignore"):
        from_dtype, to_dtype = (known.get(name) or getattr(ml_dtypes, name) for name in (source, target))
        theirs = codes.view(from_dtype).astype(to_dtype).view(CODE[target])
    ours, _ = cast_codes(codes, source, target)
    is_number = ~np.isnan(values_of(ours, target))
    assert np.array_equal(ours[is_number], theirs[is_number])
    assert np.isnan(values_of(theirs[~is_number], target)).all()


def test_finite_overflow_becomes_infinity_and_is_counted():
    got, counts = cast_codes(codes_of("float32", [65520.0, -1e38, 65519.0, np.inf, 1.0]), "float32", "float16")
    assert got.view("float16").tolist() == [math.inf, -math.inf, 65504.0, math.inf, 1.0]
    assert counts == CastCounts(overflowed=2)


def test_finite_overflow_saturates_where_there_is_no_infinity():
    got, counts = cast_codes(codes_of("float32", [1e9, -465.0, 464.0, 448.0]), "float32", "float8_e4m3fn")
    assert values_of(got, "float8_e4m3fn").tolist() == [448, -448, 448, 448]
    assert counts == CastCounts(saturated=2)


@pytest.mark.parametrize("target", LARGEST)
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_infinity_never_looks_finite(source, target):
    got, counts = cast_codes(codes_of(source, [np.inf, -np.inf]), source, target)
    assert np.isnan(values_of(got, target)).all()
    assert counts == CastCounts(infinities_lost=2)


@pytest.mark.parametrize(
    ("source", "code", "target", "expected", "is_changed"),
    [
        ("float32", 0x7FC00000, "bfloat16", 0x7FC0, False),
        ("float32", 0xFFC00000, "bfloat16", 0xFFC0, False),
        ("float32", 0x7FC10000, "bfloat16", 0x7FC1, False),
        ("float32", 0x7FC10001, "bfloat16", 0x7FC1, True),
        ("float32", 0x7F800001, "bfloat16", 0x7FC0, True),  # cut off, it would be infinity
        ("float32", 0xFFA00000, "float16", 0xFD00, False),  # signalling, and stays so
        ("float64", 0x7FF4000000000000, "float32", 0x7FA00000, False),
        ("float32", 0x7FA00000, "float64", 0x7FF4000000000000, False),
        ("float16", 0x7C01, "float32", 0x7F802000, False),
        ("float32", 0xFFC00000, "float8_e4m3fn", 0xFF, False),
        ("float32", 0x7FC00001, "float8_e4m3fn", 0x7F, True),
        ("float32", 0x7FC00000, "float8_e4m3fnuz", 0x80, False),
        ("float32", 0xFFC00000, "float8_e5m2fnuz", 0x80, True),  # it has one NaN, without a sign
        ("float32", 0xFF800001, "float8_e5m2", 0xFE, True),
        ("float8_e4m3fn", 0xFF, "bfloat16", 0xFFC0, False),
        ("float8_e5m2fnuz", 0x80, "float32", 0x7FC00000, False),
    ],
)
def test_nan_keeps_its_sign_and_what_fits_of_its_payload(source, code, target, expected, is_changed):
    got, counts = cast_codes([code], source, target)
    assert hex(got[0]) == hex(expected)
    assert counts == CastCounts(nans_changed=int(is_changed))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_zero_keeps_its_sign_where_the_target_has_two(source, target):
    got, counts = cast_codes(codes_of(source, [0.0, -0.0]), source, target)
    has_two = not source.endswith("fnuz") and not target.endswith("fnuz")
    assert got.tolist() == [0, 1 << (BY_NAME[target].bits - 1) if has_two else 0]
    assert counts == CastCounts()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_long_view_is_cast_as_its_parts_are(source, target):
    codes = np.random.default_rng(2).integers(0, (1 << BY_NAME[source].bits) - 1, 150_001, CODE[source], endpoint=True)
    got, counts = cast_codes(codes, source, target)
    parts = [cast_codes(part, source, target) for part in np.array_split(codes, 7)]
    assert got.tobytes() == b"".join(p.tobytes() for p, _ in parts)
    assert counts == sum((c for _, c in parts), CastCounts())


def test_an_empty_view_is_cast_to_an_empty_one():
    view, counts = cast(memoryview(b""), BY_NAME["float32"], BY_NAME["bfloat16"])
    assert (bytes(view), counts) == (b"", CastCounts())


def test_a_caster_reuses_its_memory():
    caster = Caster(BY_NAME["float32"], BY_NAME["bfloat16"])
    first, _ = caster.cast(memoryview(codes_of("float32", [1.0] * 8).tobytes()))
    caster.cast(memoryview(codes_of("float32", [2.0] * 8).tobytes()))
    assert first[:2].tobytes() == b"\x00\x40"


@pytest.mark.parametrize("name", [d.name for d in TABLE if d.name not in DTYPES])
def test_what_is_not_a_plain_number_is_not_cast(name):
    for source, target in ((name, "float32"), ("float32", name)):
        with pytest.raises(ConversionError, match=f"no cast from {source} to {target}: w"):
            require_castable("w", BY_NAME[source], BY_NAME[target])
