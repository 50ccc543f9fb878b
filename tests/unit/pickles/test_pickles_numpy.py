"""numpy's records are read without numpy, to the same bytes and numbers as numpy has them."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckpttools.pickles.numpy_records import describe_array, read_array, read_dtype, read_scalar, values_of
from ckpttools.pickles.reader import read_pickle
from ckpttools.pickles.records import Global, Object
from ckpttools.pickles.views import kind_of
from tests import pickle_cases as cases

NAMES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
dtypes = st.sampled_from(NAMES + COMPLEX).flatmap(
    lambda name: st.sampled_from([np.dtype(name), np.dtype(name).newbyteorder(">")])
)
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))


def read(value: object, protocol: int = 2) -> object:
    return read_pickle(pickle.dumps(value, protocol)).value


@pytest.mark.parametrize("protocol", cases.PROTOCOLS)
@given(array=arrays)
def test_arrays_are_read_to_the_bytes_that_they_hold(protocol, array):
    found = read_array(read(array, protocol))
    assert (found.dtype.name, found.shape) == (array.dtype.name, array.shape)
    assert found.data == array.tobytes("F" if found.is_fortran else "C")


@given(array=arrays)
def test_the_values_of_an_array_are_those_of_numpy(array):
    found = read_array(read(array))
    values = values_of(found.dtype, found.data)
    expected = array.flatten("F" if found.is_fortran else "C").tolist()
    assert all(a == b or (a != a and b != b) for a, b in zip(values, expected, strict=True))


def test_a_fortran_array_says_so():
    assert read_array(read(np.asfortranarray(np.ones((2, 3))))).is_fortran


@pytest.mark.parametrize("protocol", cases.PROTOCOLS)
@pytest.mark.parametrize(
    "value", [np.float64(1.5), np.int8(-3), np.bool_(True), np.complex64(1 + 2j), np.float32(math.inf)], ids=repr
)
def test_scalars_are_read_as_numbers(value, protocol):
    assert read_scalar(read(value, protocol)) == value.item()


@pytest.mark.parametrize("name", NAMES + COMPLEX)
def test_dtypes_are_read_with_their_width(name):
    found = read_dtype(read(np.dtype(name)))
    assert (found.name, found.item_bytes) == (name, np.dtype(name).itemsize)


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, "a"], dtype=object),
        np.array(["a", "bc"]),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2026-01-02"], dtype="M8[D]"),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=["object", "text", "structured", "time", "masked"],
)
def test_arrays_that_are_not_one_number_per_element_are_not_read(value):
    assert read_array(read(value)) is None


def changed(**parts: object) -> Object:
    record = read(np.arange(6.0).reshape(2, 3))
    version, shape, dtype, is_fortran, data = record.state
    state = {"version": version, "shape": shape, "dtype": dtype, "is_fortran": is_fortran, "data": data} | parts
    record.state = tuple(state.values())
    return record


@pytest.mark.parametrize(
    "parts",
    [
        {"shape": (2, 4)},
        {"shape": (-2, -3)},
        {"shape": (2**62, 2**62)},
        {"shape": (2.0, 3.0)},
        {"shape": (True, 6)},
        {"shape": (1,) * 65},
        {"shape": [2, 3]},
        {"dtype": None},
        {"dtype": Global("numpy", "dtype")},
        {"data": b""},
        {"data": "text"},
    ],
    ids=repr,
)
def test_an_array_that_contradicts_itself_is_not_read(parts):
    assert read_array(changed(**parts)) is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        Object(Global("numpy", "dtype"), ()),
        Object(Global("numpy", "dtype"), (5,)),
        Object(Global("numpy.core.multiarray", "scalar"), ()),
        Object(Global("numpy.core.multiarray", "scalar"), (None, b"")),
        Object(Global("numpy.core.multiarray", "scalar"), (Object(Global("numpy", "dtype"), ("f8",)), b"123")),
    ],
    ids=repr,
)
def test_what_is_no_scalar_is_not_read(value):
    assert read_scalar(value) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.ones(3), "numpy.ndarray float64 [3]"),
        (np.ones((), "i4"), "numpy.ndarray int32 []"),
        (np.array(["a"]), "numpy.ndarray"),
        (np.float32(1), "numpy.float32"),
        (np.str_("a"), "numpy.generic"),
        (np.dtype("i8"), "numpy.dtype int64"),
    ],
    ids=repr,
)
def test_kinds_of_numpy_are_named_for_people(value, text):
    assert kind_of(read(value)) == text


def test_a_plain_value_is_described_as_nothing_of_numpy():
    assert describe_array([1]) == ""
