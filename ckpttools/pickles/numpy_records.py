"""numpy's arrays, scalars and dtypes as they stand in pickles, read without numpy.

Source: numpy/numpy, numpy/_core/src/multiarray/methods.c (`array_reduce_ex`), scalartypes.c.src and descriptor.c
(`arraydescr_reduce`), v1.24 to v2.4.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeGuard

from ckpttools.pickles.records import Global, Object

_MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_MAX_RANK = 64

_CODES: dict[str, tuple[str, str]] = {
    "b1": ("bool", "?"),
    "i1": ("int8", "b"),
    "i2": ("int16", "h"),
    "i4": ("int32", "i"),
    "i8": ("int64", "q"),
    "u1": ("uint8", "B"),
    "u2": ("uint16", "H"),
    "u4": ("uint32", "I"),
    "u8": ("uint64", "Q"),
    "f2": ("float16", "e"),
    "f4": ("float32", "f"),
    "f8": ("float64", "d"),
    "c8": ("complex64", "ff"),
    "c16": ("complex128", "dd"),
}
"""By numpy's code: the name, and the format that `struct` has for it."""


@dataclass(frozen=True, slots=True)
class NumpyDType:
    """A dtype of one number per element."""

    name: str
    """`float64`."""
    format: str
    """As `struct` has it, with the byte order."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return struct.calcsize(self.format)


@dataclass(frozen=True, slots=True)
class NumpyArray:
    """An array as it is stored."""

    dtype: NumpyDType
    shape: tuple[int, ...]
    is_fortran: bool
    """Whether the first index varies fastest."""
    data: bytes


def read_dtype(record: object) -> NumpyDType | None:
    """The dtype that a record stands for; None for structured and object dtypes, and for what is no dtype."""
    if not _calls(record, ("numpy",), "dtype") or not record.args or not isinstance(record.args[0], str):
        return None
    known = _CODES.get(record.args[0])
    if known is None:
        return None
    order = record.state[1] if isinstance(record.state, tuple) and len(record.state) > 1 else "<"
    return NumpyDType(known[0], (">" if order == ">" else "<") + known[1])


def read_scalar(record: object) -> bool | int | float | complex | None:
    """The value of a numpy scalar; None for what is none."""
    if not _calls(record, _MULTIARRAY, "scalar") or len(record.args) != 2:
        return None
    dtype, data = read_dtype(record.args[0]), record.args[1]
    if dtype is None or not isinstance(data, bytes) or len(data) != dtype.item_bytes:
        return None
    return values_of(dtype, data)[0]


def values_of(dtype: NumpyDType, data: bytes) -> list[bool | int | float | complex]:
    """The elements of stored bytes, whose length is a multiple of the element's."""
    rows = struct.iter_unpack(dtype.format, data)
    return [complex(*row) if len(row) == 2 else row[0] for row in rows]


def read_array(record: object) -> NumpyArray | None:
    """The array that a record stands for; None for object arrays, for subclasses, and for what is no array."""
    if _calls(record, _NUMERIC, "_frombuffer") and len(record.args) == 4:  # protocol 5
        data, dtype, shape, order = record.args
        is_fortran: object = order == "F"
    elif _calls(record, _MULTIARRAY, "_reconstruct") and isinstance(record.state, tuple) and len(record.state) == 5:
        _version, shape, dtype, is_fortran, data = record.state
    else:
        return None
    known = read_dtype(dtype)
    if known is None or not isinstance(data, (bytes, bytearray)) or not isinstance(shape, tuple) or len(shape) > _MAX_RANK:
        return None
    numel = 1
    for dimension in shape:
        if type(dimension) is not int or dimension < 0:
            return None
        numel *= dimension
    if numel * known.item_bytes != len(data):
        return None
    return NumpyArray(known, shape, bool(is_fortran), bytes(data))


def describe_array(record: object) -> str:
    """`numpy.ndarray float64 [3]`, `numpy.float64` or `numpy.dtype float64`; empty for what is nothing of numpy's."""
    if not isinstance(record, Object):
        return ""
    dtype = read_dtype(record)
    if dtype is not None:
        return f"numpy.dtype {dtype.name}"
    array = read_array(record)
    if array is not None:
        return f"numpy.ndarray {array.dtype.name} {list(array.shape)}"
    if _calls(record, _MULTIARRAY, "_reconstruct"):
        return "numpy.ndarray"
    if _calls(record, _MULTIARRAY, "scalar"):
        scalar_dtype = read_dtype(record.args[0]) if record.args else None
        return f"numpy.{scalar_dtype.name if scalar_dtype else 'generic'}"
    return ""


def _calls(record: object, modules: tuple[str, ...], name: str) -> TypeGuard[Object]:
    called = record.callable if isinstance(record, Object) else None
    return isinstance(called, Global) and called.name == name and called.module in modules
