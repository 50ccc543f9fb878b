"""Elements as numbers: every dtype against a library that knows it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.dtypes import BY_NAME, TABLE
from ckpttools.operations.numbers import codes_of, number_form
from tests.strategies import dtypes

MINIFLOATS = [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "float6_e2m3fn",
    "float6_e3m2fn",
]
NO_NUMBERS = {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "quint4x2", "quint2x4"}


def read(name: str, data: bytes) -> np.ndarray:
    dtype = BY_NAME[name]
    form = number_form(dtype)
    assert form is not None
    with np.errstate(invalid="ignore"):
        return form.read(codes_of(memoryview(data), dtype))


@pytest.mark.parametrize("name", MINIFLOATS)
def test_every_code_of_a_narrow_float_is_what_ml_dtypes_says(name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes as the oracle")
    if not hasattr(ml_dtypes, name):
        pytest.skip(f"this ml_dtypes has no {name}")
    codes = np.arange(1 << BY_NAME[name].bits, dtype="u1")
    expected = codes.view(getattr(ml_dtypes, name)).astype("f4")
    form = number_form(BY_NAME[name])
    assert np.array_equal(expected, form.read(codes), equal_nan=True)


def test_every_bfloat16_is_the_float32_that_begins_with_it():
    codes = np.arange(1 << 16, dtype="<u2")
    expected = (codes.astype("<u4") << 16).view("<f4")
    assert expected.tobytes() == read("bfloat16", codes.tobytes()).tobytes()


@pytest.mark.parametrize(("name", "numpy_name"), [("float16", "<f2"), ("float32", "<f4"), ("float64", "<f8")])
@given(data=st.binary(min_size=48, max_size=48))
def test_floats_that_numpy_has_are_what_numpy_says(name, numpy_name, data):
    expected = np.frombuffer(data, numpy_name)
    assert np.array_equal(expected, read(name, data), equal_nan=True)


@pytest.mark.parametrize(
    "name", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "qint8", "quint8", "qint32"]
)
@given(data=st.binary(min_size=48, max_size=48))
def test_integers_are_exact(name, data):
    expected = np.frombuffer(data, np.dtype(name.lstrip("q")).newbyteorder("<"))
    assert [int(x) for x in expected] == [int(x) for x in read(name, data)]


@pytest.mark.parametrize(("name", "part"), [("complex32", "<f2"), ("complex64", "<f4"), ("complex128", "<f8")])
@given(data=st.binary(min_size=64, max_size=64))
def test_complex_numbers_are_pairs(name, part, data):
    with np.errstate(invalid="ignore"):
        parts = np.frombuffer(data, part).astype("f8")
    found = read(name, data)
    assert np.array_equal(parts[0::2], found.real, equal_nan=True)
    assert np.array_equal(parts[1::2], found.imag, equal_nan=True)


def test_a_bool_is_true_by_any_bit():
    assert [0, 1, 1, 1] == read("bool", bytes([0, 1, 2, 255])).tolist()


def test_a_packed_pair_is_two_numbers_the_lower_half_first():
    assert [0.5, 6.0, -1.0, 0.0] == read("float4_e2m1fn_x2", bytes([0x71, 0x0A])).tolist()


def test_elements_of_less_than_a_byte_are_unpacked_from_the_lower_bits_up():
    assert [1, 7, 10, 0] == codes_of(memoryview(bytes([0x71, 0x0A])), BY_NAME["float4_e2m1fn"]).tolist()
    packed = (0b000001 | 0b000010 << 6 | 0b111111 << 12 | 0b100000 << 18).to_bytes(3, "little")
    assert [1, 2, 63, 32] == codes_of(memoryview(packed), BY_NAME["float6_e2m3fn"]).tolist()


@given(dtypes())
def test_every_dtype_has_numbers_or_is_known_to_have_none(dtype):
    form = number_form(dtype)
    assert (form is None) == (dtype.name in NO_NUMBERS)


def test_forms_hold_every_value_exactly():
    for dtype in TABLE:
        form = number_form(dtype)
        if form is not None:
            codes = codes_of(memoryview(bytes(48)), dtype)
            assert len(codes) * form.numbers == len(form.read(codes))
            assert form.read(codes).dtype == np.dtype(form.numpy_name)
