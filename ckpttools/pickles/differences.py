"""Where two inert values of pickles differ, with the keys that lead there.

Values are the same when loading them would give equal objects: of one type, down to the last part; floats by their bits, so
that NaN equals itself and -0.0 is not 0.0; mappings whatever the order of their keys. How a value was pickled (protocol,
numpy's module names, what is shared) does not matter. Nothing is executed, and a bomb or a cycle ends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ckpttools.model import Path, PathKey
from ckpttools.pickles.limits import over_limit
from ckpttools.pickles.numpy_records import NumpyArray, read_array, read_scalar, values_of
from ckpttools.pickles.records import NO_STATE, Global, Object, Persistent, SetBy
from ckpttools.pickles.views import attributes, class_of, kind_of, mapping_items, path_key, sequence_items


class _Absent:
    __slots__ = ()

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
"""Stands for "nothing there", since None is a value."""

_MAX_PARTS = 20_000_000
_MAKERS = {"_reconstructor": 3, "__newobj__": 1, "__newobj_ex__": 1}
"""Functions of `copyreg` whose first arguments are the class and what goes with it."""


@dataclass(frozen=True, slots=True)
class Place:
    """One place where two values differ."""

    path: Path
    """Keys of mappings, places in sequences, names of attributes."""
    a: object
    """What is there, or ABSENT."""
    b: object


def differences(a: object, b: object) -> Iterator[Place]:
    """Every place where two values differ, in the order of `a`; none when they are the same.

    Raises: PickleError: `pickle-limit`, for more parts than any checkpoint has.
    """
    todo: list[tuple[Path, object, object]] = [((), a, b)]
    seen: dict[tuple[int, int], tuple[object, object]] = {}
    parts = 0
    while todo:
        path, x, y = todo.pop()
        parts += 1
        if parts > _MAX_PARTS:
            raise over_limit(f"a value of more than {_MAX_PARTS} parts")
        if x is ABSENT or y is ABSENT or kind_of(x) != kind_of(y):
            yield Place(path, x, y)
            continue
        inner = _inner(x, y)
        if isinstance(inner, bool):
            if not inner:
                yield Place(path, x, y)
        elif (id(x), id(y)) not in seen:  # shared parts, and those that contain themselves, are compared once
            seen[id(x), id(y)] = x, y  # kept, so that their ids are not used again
            todo.extend(((*path, *keys), one, other) for keys, one, other in reversed(inner))


_Pairs = list[tuple[Path, object, object]]


def _inner(a: object, b: object) -> bool | _Pairs:
    """Of two values of one kind: whether they are equal, or what in them has to be."""
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex) and isinstance(b, complex):
        return struct.pack("<2d", a.real, a.imag) == struct.pack("<2d", b.real, b.imag)
    if isinstance(a, (set, frozenset)):
        return _of_sequences(sequence_items(a) or [], sequence_items(b) or [])
    if isinstance(a, Global):
        return True  # their names are their kind
    if isinstance(a, Persistent) and isinstance(b, Persistent):
        return [((), a.pid, b.pid)]
    if isinstance(a, dict) and isinstance(b, dict):
        return _of_mappings(list(a.items()), list(b.items()))
    if isinstance(a, Object) and isinstance(b, Object):
        return _of_objects(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return _of_sequences(a, b)
    return a == b


def _of_sequences(a: Sequence[object], b: Sequence[object]) -> _Pairs:
    return [((i,), x, y) for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=ABSENT))]


def _of_mappings(a: Sequence[tuple[object, object]], b: Sequence[tuple[object, object]]) -> _Pairs:
    """By key and its type; where keys cannot be told apart by that, in order."""
    here, there = {_token(k): v for k, v in a}, {_token(k): v for k, v in b}
    if len(here) != len(a) or len(there) != len(b):
        return _of_sequences([list(pair) for pair in a], [list(pair) for pair in b])
    pairs: _Pairs = [((token[1],), value, there.get(token, ABSENT)) for token, value in here.items()]
    return pairs + [((token[1],), ABSENT, value) for token, value in there.items() if token not in here]


def _token(key: object) -> tuple[str, PathKey]:
    return kind_of(key), path_key(key)


def _of_attributes(a: object, b: object) -> _Pairs:
    here, there = attributes(a) or {}, attributes(b) or {}
    return _of_mappings(list(here.items()), list(there.items()))


def _of_objects(a: Object, b: Object) -> bool | _Pairs:
    arrays = read_array(a), read_array(b)
    if arrays[0] is not None and arrays[1] is not None:
        return _are_same_arrays(arrays[0], arrays[1])
    scalars = read_scalar(a), read_scalar(b)
    if scalars[0] is not None and scalars[1] is not None:
        return _inner(*scalars)
    cls = class_of(a)
    if cls is not None and cls.name in ("OrderedDict", "defaultdict", "Counter"):
        return [*_of_mappings(mapping_items(a) or [], mapping_items(b) or []), *_of_attributes(a, b)]
    pairs: _Pairs = [] if cls is not None else [(("class",), a.callable, b.callable)]
    pairs += [(("arguments", *keys), x, y) for keys, x, y in _of_sequences(_arguments(a), _arguments(b))]
    pairs += [(("keywords", *keys), x, y) for keys, x, y in _of_mappings(list(a.kwargs.items()), list(b.kwargs.items()))]
    pairs += _of_sequences(a.items, b.items)
    pairs += _of_mappings(a.pairs, b.pairs)
    if attributes(a) is not None and attributes(b) is not None:
        return pairs + _of_attributes(a, b)
    return pairs if _state(a) is _state(b) else [*pairs, (("state",), _state(a), _state(b))]


def _arguments(value: Object) -> Sequence[object]:
    """What a class is called with, without the class itself where a function of `copyreg` calls it."""
    called = value.callable
    is_maker = isinstance(called, Global) and called.module in ("copyreg", "copy_reg") and class_of(value) is not called
    return value.args[_MAKERS.get(called.name, 0) :] if is_maker and isinstance(called, Global) else value.args


def _state(value: Object) -> object:
    state = value.state.state if isinstance(value.state, SetBy) else value.state
    return ABSENT if state is NO_STATE else state


def _are_same_arrays(a: NumpyArray, b: NumpyArray) -> bool:
    """Of one dtype and shape; in another order of elements they are the same when the elements are."""
    if (a.is_fortran, a.dtype.format) == (b.is_fortran, b.dtype.format):
        return a.data == b.data
    return _row_major(a) == _row_major(b)


def _row_major(array: NumpyArray) -> list[bytes]:
    """The little-endian bytes of every number, in row-major order."""
    order = "<" + array.dtype.format[1:]
    packed = [
        struct.pack(order, value.real, value.imag) if isinstance(value, complex) else struct.pack(order, value)
        for value in values_of(array.dtype, array.data)
    ]
    if not array.is_fortran:
        return packed
    strides, step = [], 1
    for side in array.shape:
        strides.append(step)
        step *= side
    places = [0]
    for side, stride in zip(array.shape, strides, strict=True):
        places = [at + i * stride for at in places for i in range(side)]
    return [packed[at] for at in places]
