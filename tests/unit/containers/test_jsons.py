from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.containers.jsons import JsonError, parse_json, parse_json_noting_duplicates, shown

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_json_writes_is_read_back(value: object) -> None:
    assert parse_json(json.dumps(value).encode(), max_depth=64) == value
    assert parse_json(json.dumps(value, ensure_ascii=False, indent=1).encode(), max_depth=64) == value


def test_a_repeated_key_is_named_with_its_place() -> None:
    with pytest.raises(JsonError, match="`b`") as e:
        parse_json(b'{"a": {"b": 1, "b": 1}}')
    assert (e.value.key, e.value.position) == ("b", 15)


def test_every_repeated_key_is_noted_once_and_the_last_value_kept() -> None:
    assert parse_json_noting_duplicates(b'{"a":1,"a":2,"b":[{"c":1,"c":1,"c":3}],"a":4}') == (
        {"a": 4, "b": [{"c": 3}]},
        ("c", "a"),
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expecting value"),
        (b"{", "expecting property name"),
        (b"{} {}", "extra data"),
        (b'{"a":1,}', ""),
        (b'"\x01"', "invalid control character"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"[1e999]", "no float holds"),
        (b"[" + b"9" * 500 + b"]", "500 digits"),
        (b"[" + b"9" * 100_000 + b"]", "digits"),
        (b'["\\ud800"]', "surrogate"),
        (b'{"\\uDC00":1}', "surrogate"),
        (b'{"a":{"b":["\\udfff"]}}', "surrogate"),
        (b"[" * 10 + b"]" * 10, "deep"),
        (b"[" * 1_000_000, "deep"),
        (b'{"a":' * 1_000_000, "deep"),
    ],
)
def test_what_is_not_strict_json_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(JsonError) as e:
        parse_json(data, max_depth=9)
    assert message in e.value.message


def test_bytes_that_are_not_utf8_are_placed() -> None:
    with pytest.raises(JsonError, match="UTF-8") as e:
        parse_json(b'{"a":"\xff"}')
    assert e.value.position == 6


def test_position_counts_bytes_not_characters() -> None:
    with pytest.raises(JsonError) as e:
        parse_json('{"größe" 1}'.encode())
    assert e.value.position == 11


def test_depth_counts_containers() -> None:
    assert parse_json(b'[{"a":[]}]', max_depth=3) == [{"a": []}]
    with pytest.raises(JsonError, match="more than 2 deep"):
        parse_json(b'[{"a":[]}]', max_depth=2)
    assert parse_json(b"1", max_depth=0) == 1


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert parse_json(b'["\\ud83d\\ude00"]') == ["\U0001f600"]


def test_long_names_are_cut_for_messages() -> None:
    assert shown("abc") == "abc"
    assert shown("x" * 1000) == "x" * 200 + "... (1000 characters)"


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_json_error(data: bytes) -> None:
    with contextlib.suppress(JsonError):
        parse_json(data)
