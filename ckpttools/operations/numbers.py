"""Elements of every dtype of the table as numbers that numpy computes with, exactly.

`number_form(dtype)` is the narrowest numpy type that holds every value of a dtype: float32 for all of at most 16 bits and
float32 itself, float64 for float64 and integers of 32 bits, int64, uint64, complex128. A packed pair of 4-bit numbers is two
numbers. Dtypes whose elements are no numbers (raw bits, several quantized ones in a byte) have no form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckpttools.cast import DTYPES, cast
from ckpttools.dtypes import BY_NAME, DType

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_MINIFLOATS = {"float4_e2m1fn": (2, 1, 1), "float6_e2m3fn": (2, 3, 1), "float6_e3m2fn": (3, 2, 3)}
"""(bits of exponent, bits of fraction, bias) of the formats without infinity and NaN (OCP Microscaling Formats 1.0)."""
_PACKED = frozenset({"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "quint4x2", "quint2x4"})
_COMPLEX_PARTS = {"complex32": "f2", "complex64": "f4", "complex128": "f8"}


@dataclass(frozen=True, slots=True)
class Form:
    """How the elements of a dtype become numbers."""

    numpy_name: str
    """`float32`, `float64`, `int64`, `uint64` or `complex128`."""
    read: Callable[[Array], Array]
    """Codes, as `codes_of` has them, to numbers."""
    numbers: int = 1
    """Numbers per element."""
    is_integral: bool = False


def code_name(dtype: DType) -> str:
    """The numpy type that an element is moved as; two 64-bit words for complex128."""
    return {1: "u1", 2: "<u2", 4: "<u4"}.get(max(1, dtype.bits // 8), "<u8")


def codes_of(view: memoryview, dtype: DType) -> Array:
    """The elements of little-endian bytes, one code each (a row of two for complex128). Pure.

    Elements narrower than a byte are unpacked, those in the lower bits first; `view` then begins at a whole number of three
    bytes of its tensor.
    """
    import numpy as np

    codes = np.frombuffer(view, code_name(dtype))
    if not dtype.is_sub_byte:
        return codes.reshape(-1, 2) if dtype.bits == 128 else codes
    bits = np.unpackbits(codes, bitorder="little")
    whole = bits[: len(bits) // dtype.bits * dtype.bits].reshape(-1, dtype.bits)
    return np.packbits(whole, axis=1, bitorder="little").reshape(-1)


@lru_cache(maxsize=64)
def number_form(dtype: DType) -> Form | None:
    """How elements of a dtype become numbers, without loss; None where they are no numbers."""
    if dtype.name in _PACKED:
        return None
    if dtype.kind == "complex":
        return Form("complex128", _complex_reader(_COMPLEX_PARTS[dtype.name]))
    if dtype.kind == "float":
        return _float_form(dtype)
    if dtype.kind == "bool":
        return Form("float32", lambda codes: (codes != 0).astype("f4"), is_integral=True)
    width = dtype.bits // 8
    stored = f"<{'u' if dtype.kind == 'uint' or dtype.name.startswith('qu') else 'i'}{width}"
    if width == 8:
        return Form("uint64" if "u" in stored else "int64", lambda codes: codes.view(stored), is_integral=True)
    wide = "f8" if width == 4 else "f4"
    return Form("float64" if width == 4 else "float32", lambda codes: codes.view(stored).astype(wide), is_integral=True)


def _float_form(dtype: DType) -> Form:
    if dtype.name == "float64":
        return Form("float64", lambda codes: codes.view("<f8"))
    if dtype.name == "float32":
        return Form("float32", lambda codes: codes.view("<f4"))
    if dtype.name == "float16":
        return Form("float32", lambda codes: codes.view("<f2").astype("f4"))
    if dtype.name == "bfloat16":
        return Form("float32", _widened_bfloat16)
    table = _table(dtype)
    pairs = table.ndim == 2
    return Form("float32", lambda codes: table.take(codes, axis=0).reshape(-1), 2 if pairs else 1)


def _widened_bfloat16(codes: Array) -> Array:
    wide: Array = codes.astype("<u4")
    wide <<= 16
    return wide.view("<f4")


def _table(dtype: DType) -> Array:
    """The value of every code of a dtype of at most 8 bits; rows of two for packed pairs."""
    import numpy as np

    codes = np.arange(256, dtype="u1")
    if dtype.name in DTYPES:
        wide, _ = cast(codes.data, dtype, BY_NAME["float32"])
        table: Array = np.frombuffer(wide, "<f4").copy()
        return table
    if dtype.name == "float8_e8m0fnu":
        scales: Array = np.ldexp(np.float32(1), np.minimum(codes, 254).astype(int) - 127).astype("f4")
        scales[255] = np.nan
        return scales
    if dtype.name == "float4_e2m1fn_x2":
        single = _table(BY_NAME["float4_e2m1fn"])
        return np.stack([single[codes & 15], single[codes >> 4]], axis=1)
    return _minifloats(*_MINIFLOATS[dtype.name])


def _minifloats(exponent_bits: int, fraction_bits: int, bias: int) -> Array:
    import numpy as np

    codes = np.arange(1 << (1 + exponent_bits + fraction_bits))
    exponent = (codes >> fraction_bits) & ((1 << exponent_bits) - 1)
    fraction = codes & ((1 << fraction_bits) - 1)
    mantissa = np.where(exponent == 0, fraction, fraction + (1 << fraction_bits))
    values = np.ldexp(mantissa.astype("f4"), np.maximum(exponent, 1) - bias - fraction_bits)
    signed: Array = np.where(codes >> (exponent_bits + fraction_bits), -values, values).astype("f4")
    return signed


def _complex_reader(part: str) -> Callable[[Array], Array]:
    def read(codes: Array) -> Array:
        import numpy as np

        parts = np.ascontiguousarray(codes).reshape(-1).view(f"<{part}").astype("f8")
        return parts.view("c16")

    return read
