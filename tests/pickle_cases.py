"""Values and classes for the tests of pickles: strategies for plain values, classes to pickle, equality of graphs."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import strategies as st

from ckpttools.pickles.records import Global, Object, Persistent, SetBy
from ckpttools.pickles.views import ordered
from tests.fixture_cases import FIXTURES

PROTOCOLS = range(6)

texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=12)
"""With lone surrogates, NUL and line breaks."""

keys = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts, st.binary(max_size=8)),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)


def plain_values() -> st.SearchStrategy[object]:
    """Everything that pickles as itself."""
    scalars = st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.integers(-(2**2100), 2**2100), st.floats(), st.complex_numbers()),
        *(texts, st.binary(max_size=300), st.binary(max_size=20).map(bytearray), st.sets(keys), st.frozensets(keys)),
    )
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=5),
            st.lists(inner, max_size=5).map(tuple),
            st.dictionaries(keys, inner, max_size=5),
            inner.map(lambda shared: [shared, shared]),
        ),
        max_leaves=20,
    )


def same(one: object, other: object) -> bool:
    """Equal in types and values, bit for bit; sets by their members' equality."""
    todo = [(one, other)]
    while todo:
        a, b = todo.pop()
        if type(a) is not type(b):
            return False
        if isinstance(a, float):
            if struct.pack("<d", a) != struct.pack("<d", b) and not (math.isnan(a) and math.isnan(b)):
                return False
        elif isinstance(a, complex):
            todo += [(a.real, b.real), (a.imag, b.imag)]
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                return False
            todo += zip(a, b, strict=True)
        elif isinstance(a, dict):
            if len(a) != len(b):
                return False
            todo += [pair for (k, v), (m, w) in zip(a.items(), b.items(), strict=True) for pair in ((k, m), (v, w))]
        elif isinstance(a, (Object, Persistent, SetBy)):
            todo += [(getattr(a, name), getattr(b, name)) for name in a.__slots__]
        elif a != b:
            return False
    return True


# classes whose pickles use every way of making an object


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Settings:
    name: str
    sizes: list[int] = field(default_factory=list)


class Slotted:
    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and self.size == other.size

    __hash__ = None


class Listing(list):  # a list with attributes
    pass


class Table(dict):
    pass


class WithKeywords:
    def __new__(cls, *, size: int) -> WithKeywords:
        made = super().__new__(cls)
        made.size = size
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"size": self.size}

    def __getstate__(self) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithKeywords) and self.size == other.size

    __hash__ = None


def set_state(made: BySetter, state: int) -> None:
    made.value = state


class BySetter:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def __reduce__(self) -> tuple[object, ...]:
        return BySetter, (), self.value, None, None, set_state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BySetter) and self.value == other.value

    __hash__ = None


class Outer:
    class Inner(enum.Enum):
        ONE = 1


def call(name: str, *args: object, module: str = "builtins") -> Object:
    return Object(Global(module, name), args)


def fixture_pickles() -> Iterator[tuple[str, bytes, int]]:
    """The pickles in the fixtures: file, bytes of the buffer, and where the pickle starts in it."""
    for path in sorted(p for p in FIXTURES.rglob("*") if p.is_file() and p.name != "truth.json"):
        name, data = str(path.relative_to(FIXTURES)), path.read_bytes()
        if path.name.endswith(".metadata") or data[:2] == b"\x80\x02":
            yield name, data, 0
        elif b"data.pkl" in data:
            yield from ((name, data, start) for start in zip_members(data, b"data.pkl"))


def zip_members(data: bytes, ending: bytes) -> Iterator[int]:
    """Where the members of that name start, by the local headers of all the archives in the bytes."""
    at = data.find(b"PK\x03\x04")
    while 0 <= at <= len(data) - 30:
        name_length, extra_length = struct.unpack_from("<HH", data, at + 26)
        if data[at + 30 : at + 30 + name_length].endswith(b"/" + ending):
            yield at + 30 + name_length + extra_length
        at = data.find(b"PK\x03\x04", at + 4)


def same_graph(one: object, other: object) -> bool:
    """Like `same`, for graphs with sharing and cycles: the same two records are compared once."""
    todo, seen = [(one, other)], set()
    while todo:
        a, b = todo.pop()
        if type(a) is not type(b):
            return False
        if (id(a), id(b)) in seen:
            continue
        if isinstance(a, (list, tuple, dict)):
            seen.add((id(a), id(b)))
            first, second = (list(a), list(b)) if not isinstance(a, dict) else ([*a, *a.values()], [*b, *b.values()])
            if len(first) != len(second):
                return False
            todo += zip(first, second, strict=True)
        elif isinstance(a, (Object, Persistent, SetBy)):
            seen.add((id(a), id(b)))
            todo += [(getattr(a, name), getattr(b, name)) for name in a.__slots__]
        elif isinstance(a, (set, frozenset)):
            todo.append((ordered(a), ordered(b)))
        elif not same(a, b):
            return False
    return True
