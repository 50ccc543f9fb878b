"""Where two values of pickles differ: whatever they are and however they were pickled."""

from __future__ import annotations

import argparse
import collections
import pickle

import numpy as np
import pytest
from hypothesis import given

from ckpttools.pickles.differences import ABSENT, Place, differences
from ckpttools.pickles.reader import read_pickle
from tests import pickle_cases as cases


def read(value: object, protocol: int = 2) -> object:
    return read_pickle(pickle.dumps(value, protocol)).value


def places(a: object, b: object) -> list[tuple[tuple[object, ...], object, object]]:
    return [(p.path, p.a, p.b) for p in differences(a, b)]


def paths(a: object, b: object) -> list[tuple[object, ...]]:
    return [p.path for p in differences(read(a), read(b))]


@given(cases.plain_values())
def test_a_value_is_the_same_by_every_binary_protocol(value):
    """Protocol 0 writes floats as text, which loses the payload of a NaN."""
    assert [] == [p for protocol in cases.PROTOCOLS[1:] for p in differences(read(value, 1), read(value, protocol))]


@given(cases.plain_values().filter(lambda value: "nan" not in repr(value)))
def test_a_value_without_nan_is_the_same_as_text(value):
    assert [] == list(differences(read(value, 0), read(value, 4)))


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
        collections.OrderedDict(a=1, b=[2]),
        collections.defaultdict(list, a=[1]),
        collections.deque([1, 2]),
        np.float64(0.1),
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.dtype("int32"),
        {1, 2, "x"},
        frozenset({(1, 2)}),
        range(3),
        3 + 4j,
    ],
    ids=lambda v: type(v).__name__,
)
def test_an_object_is_the_same_by_every_protocol(value):
    assert [] == [p for one in (2, 3, 4, 5) for other in (2, 4, 5) for p in differences(read(value, one), read(value, other))]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1, 2, ((), 1, 2)),
        (1, True, ((), 1, True)),
        (1, 1.0, ((), 1, 1.0)),
        (None, 0, ((), None, 0)),
        ([1, 2], [1, 3], ((1,), 2, 3)),
        ([1], [1, None], ((1,), ABSENT, None)),
        ((1,), [1], ((), (1,), [1])),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, (("a", "b"), 1, 2)),
        ({"a": 1}, {}, (("a",), 1, ABSENT)),
        ({0: 1}, {"0": 1}, ((0,), 1, ABSENT)),
        (b"ab", b"ac", ((), b"ab", b"ac")),
    ],
)
def test_a_difference_is_told_with_its_place(a, b, expected):
    assert expected == places(read(a, 4), read(b, 4))[0]


def test_floats_are_compared_by_their_bits():
    nan = float("nan")
    assert [] == places(nan, nan)
    assert 1 == len(places(0.0, -0.0))
    assert 1 == len(places(complex(0, 0.0), complex(0, -0.0)))


def test_the_order_of_keys_is_no_difference():
    assert [] == places({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_attributes_and_items_of_objects_are_compared():
    assert [("lr",)] == paths(argparse.Namespace(lr=0.1, n=1), argparse.Namespace(lr=0.2, n=1))
    assert [("b",)] == paths(collections.OrderedDict(a=1, b=2), collections.OrderedDict(a=1, b=3))
    assert [()] == paths(argparse.Namespace(lr=0.1), {"lr": 0.1})
    assert paths(collections.deque([1, 2]), collections.deque([1, 3]))


def test_arrays_are_compared_by_their_elements():
    array = np.arange(6).reshape(2, 3)
    assert [] == paths(array, np.asfortranarray(array))
    assert [()] == paths(array, array + 1)
    assert [()] == paths(array, array.reshape(3, 2))
    assert [()] == paths(np.float32(1), np.float64(1))
    assert [()] == paths(np.float64(0.1), np.float64(0.2))


def test_sets_are_compared_whatever_their_order():
    assert [] == paths({"a", "b", "c"}, {"c", "b", "a"})
    assert paths({"a", "b"}, {"a", "c"})


def test_values_that_contain_themselves_end():
    one: list[object] = [1]
    one.append(one)
    other: list[object] = [1]
    other.append(other)
    assert [] == places(one, other)
    longer: list[object] = [1, [1, one]]
    assert list(differences(one, longer)) == []


def test_shared_parts_are_compared_once():
    def bomb() -> list[object]:
        value: list[object] = [0]
        for _ in range(60):
            value = [value, value]
        return value

    assert [] == places(bomb(), bomb())


def test_deep_values_do_not_exhaust_the_stack():
    def deep(leaf: object) -> object:
        value: object = leaf
        for i in range(20_000):
            value = frozenset({value}) if i < 50 else (value,)
        return value

    found = places(deep(1), deep(2))
    assert [(1, 2)] == [(a, b) for _, a, b in found]


def test_a_place_says_what_is_absent():
    assert repr(Place((), 1, ABSENT).b) == "ABSENT"
