"""The mean of copies that differ: with the casts the only arithmetic on values, and like them only when asked for.

Each value is widened to float64 (exactly), the copies are added in their order and divided by their number, and the result is
rounded to the tensor's dtype as `cast` rounds: to nearest, ties to even. Where all copies have the same bits those are kept,
so that what did not differ does not change: a NaN keeps its payload and -0.0 its sign.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.cast import DTYPES, Caster
from ckpttools.dtypes import BY_NAME, DType

_WIDE = "float64"


def has_mean(dtype: DType) -> bool:
    """Whether values of a dtype are numbers that have a mean in it. Integers and block formats have none. Pure."""
    return dtype.name in DTYPES


class Averager:
    """Means of tiles of one dtype. Keeps its buffers; for one thread at a time."""

    def __init__(self, dtype: DType) -> None:
        self._code_type = f"<u{dtype.item_bytes}"
        is_wide = dtype.name == _WIDE
        self._widen = None if is_wide else Caster(dtype, BY_NAME[_WIDE])
        self._narrow = None if is_wide else Caster(BY_NAME[_WIDE], dtype)

    def mean(self, copies: Sequence[memoryview]) -> memoryview:
        """The mean of copies of the same elements, little-endian, in their dtype."""
        import numpy as np

        codes = [np.frombuffer(copy, self._code_type) for copy in copies]
        values = [np.frombuffer(self._widen.cast(c)[0] if self._widen else c, "<f8").copy() for c in copies]
        with np.errstate(all="ignore"):
            mean = sum(values[1:], values[0]) / len(values)
            is_overflow = np.isinf(mean) & np.logical_and.reduce([np.isfinite(v) for v in values])
            if is_overflow.any():
                halves = [v / len(values) for v in values]
                mean = np.where(is_overflow, sum(halves[1:], halves[0]), mean)
        wide = memoryview(mean.astype("<f8").tobytes())
        found = np.frombuffer(self._narrow.cast(wide)[0] if self._narrow else wide, self._code_type)
        is_same = np.logical_and.reduce([c == codes[0] for c in codes])
        return memoryview(np.where(is_same, codes[0], found).astype(self._code_type).tobytes())
