"""Any value is shown as JSON of bounded length, and common objects as what they mean."""

from __future__ import annotations

import collections
import json
import pathlib
import pickle

import numpy as np
import pytest
from hypothesis import given

from ckpttools.pickles.reader import read_pickle
from ckpttools.pickles.records import Global, Object, Persistent
from ckpttools.pickles.renditions import plain
from tests import pickle_cases as cases


def shown(value: object) -> object:
    return plain(read_pickle(pickle.dumps(value, 2)).value)


@given(value=cases.plain_values())
def test_every_plain_value_is_json(value):
    json.dumps(plain(value), allow_nan=False)


@pytest.mark.parametrize(
    ("value", "rendition"),
    [
        (None, None),
        (True, True),
        (2**70, 2**70),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1 + 2j, "(1+2j)"),
        (b"ab", {"bytes": 2, "hex": "6162"}),
        (b"a" * 100, {"bytes": 100, "hex": "61" * 32 + "..."}),
        ((1, [2]), [1, [2]]),
        ({3, 1}, [1, 3]),
        ({"a": {1: "b", None: 2}}, {"a": {"1": "b", "None": 2}}),
        ({0: "a", "0": "b"}, [[0, "a"], ["0", "b"]]),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.deque([1, 2]), [1, 2]),
        (pathlib.PurePosixPath("/a/b"), "/a/b"),
        (pathlib.PurePosixPath("a/b"), "a/b"),
        (np.float64(1.5), 1.5),
        (np.bool_(True), True),
        (np.array([1, 2], "i4"), {"class": "numpy.ndarray", "dtype": "int32", "shape": [2], "values": [1, 2]}),
        (np.zeros(1000), {"class": "numpy.ndarray", "dtype": "float64", "shape": [1000]}),
        (cases.Color.RED, {"class": "tests.pickle_cases.Color", "arguments": ["red"]}),
        (cases.Settings("a"), {"class": "tests.pickle_cases.Settings", "attributes": {"name": "a", "sizes": []}}),
        (cases.Listing([1]), {"class": "tests.pickle_cases.Listing", "items": [1]}),
        (cases.Table(a=1), {"class": "tests.pickle_cases.Table", "pairs": {"a": 1}}),
    ],
    ids=repr,
)
def test_values_are_shown_as_what_they_mean(value, rendition):
    assert json.loads(json.dumps(shown(value))) == rendition


def test_keyword_arguments_are_shown():
    value = Object(Global("m", "A"), (), "newobj_ex", {"size": 3})
    assert plain(value) == {"class": "m.A", "keywords": {"size": 3}}


def test_names_and_persistent_ids_are_shown():
    assert plain([Global("torch", "float32"), Persistent(("storage", "0"))]) == [
        "torch.float32",
        {"persistent_id": ["storage", "0"]},
    ]


def doubling(levels: int) -> object:
    value: object = []
    for _ in range(levels):
        value = [value, value]
    return value


def looped() -> object:
    value: dict[str, object] = {}
    value["a"] = value
    return value


@pytest.mark.parametrize(
    "value", [doubling(60), looped(), list(range(10**6)), dict.fromkeys(range(10**6))], ids=["doubling", "looped", "long", "wide"]
)
def test_a_rendition_is_bounded_whatever_the_value_is(value):
    assert len(json.dumps(plain(value))) < 500_000


def test_what_was_left_out_is_marked():
    assert plain([1, 2, 3], max_nodes=3) == [1, 2, "..."]
