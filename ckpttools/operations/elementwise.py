"""Compares the elements of two tensors, tile after tile: how many differ, by how much at most, and where.

Bits are compared first, and only elements whose bits differ are turned into numbers. Differences are those of the exact
values, rounded once to float64 (those of 64-bit integers are not rounded). Read `Elementwise.add` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttools.dtypes import DType
from ckpttools.operations.measure import Peak, Tolerance, measure
from ckpttools.operations.numbers import Form, codes_of, number_form

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

Number = int | float | complex | tuple[float, ...]
"""A value: a tuple for an element that holds several numbers."""

_BLOCK_BYTES = 1 << 20
"""Compared at once for equality of bits, which most blocks have."""
_CHUNK = 1 << 14
"""Elements per step where bits differ: temporaries of 128 KiB stay in the cache, and larger ones take fresh pages each time
(measured: 4 to 5 times slower at 256 KiB)."""


@dataclass(frozen=True, slots=True)
class Extreme:
    """The element with the largest difference; the first one in row-major order if there are several."""

    difference: float | int
    index: tuple[int, ...]
    a: Number
    b: Number


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors of one shape differ. Counts are of elements."""

    elements: int
    """In all."""
    bits: int | None
    """Whose bits differ; None when the dtypes do."""
    values: int | None
    """Whose values differ: -0.0 and 0.0 do not, NaN of other bits do; None where the elements are no numbers."""
    beyond: int | None
    """That are not equal by the tolerance; None when none was given."""
    not_finite: int
    """Whose values differ and are NaN or infinite on one side or both; they are in no largest difference."""
    zero_in_b: int
    """Whose values differ and are 0 in B, so that there is no relative difference."""
    first: tuple[int, ...] | None
    """The index of the first one that differs."""
    max_abs: Extreme | None
    """The largest |a - b| (of a packed element: of any of its numbers); None when no two finite values differ."""
    max_rel: Extreme | None
    """The largest |a - b| / |b|."""

    @property
    def is_same(self) -> bool:
        """Whether nothing differs, in bits if these were compared."""
        return not (self.values if self.bits is None else self.bits)

    @property
    def is_close(self) -> bool:
        """Whether every element is equal by the tolerance; never without one."""
        return self.beyond == 0


@dataclass(slots=True)
class _Best:
    """The largest difference so far, and where."""

    difference: float | int = 0
    position: int = -1
    a: Number = 0
    b: Number = 0

    def extreme(self, shape: Sequence[int]) -> Extreme | None:
        return None if self.position < 0 else Extreme(self.difference, unravel(self.position, shape), self.a, self.b)


class Elementwise:
    """Takes the tiles of two tensors of one shape, in row-major order, and says how they differ."""

    def __init__(self, a: DType, b: DType, tolerance: Tolerance | None = None) -> None:
        self._dtypes = a, b
        self._forms = number_form(a), number_form(b)
        self._tolerance = tolerance
        self._position = 0
        self._bits = self._values = self._beyond = self._not_finite = self._zero_in_b = 0
        self._first = -1
        self._abs, self._rel = _Best(), _Best()

    @property
    def is_possible(self) -> bool:
        """Whether the elements can be compared at all: of one dtype, or numbers that are stored in whole bytes."""
        a, b = self._dtypes
        numbers = {
            0 if form is None or dtype.is_sub_byte else form.numbers for form, dtype in zip(self._forms, (a, b), strict=True)
        }
        return a == b or (len(numbers) == 1 and 0 not in numbers)

    def add(self, a: memoryview, b: memoryview) -> None:
        """The next elements of both sides, as many on each."""
        of_a, of_b = self._dtypes
        if of_a != of_b or of_a.is_sub_byte:
            self._add_codes(codes_of(a, of_a), codes_of(b, of_b))
            return
        for start in range(0, len(a), _BLOCK_BYTES):
            block_a, block_b = a[start : start + _BLOCK_BYTES], b[start : start + _BLOCK_BYTES]
            if _are_equal(block_a, block_b):
                self._position += len(block_a) // of_a.item_bytes
            else:
                self._add_codes(codes_of(block_a, of_a), codes_of(block_b, of_b))

    def result(self, shape: Sequence[int]) -> Difference:
        """How tensors of this shape, all of whose elements were added, differ."""
        return Difference(
            elements=self._position,
            bits=self._bits if self._dtypes[0] == self._dtypes[1] else None,
            values=None if None in self._forms else self._values,
            beyond=None if self._tolerance is None else self._beyond,
            not_finite=self._not_finite,
            zero_in_b=self._zero_in_b,
            first=unravel(self._first, shape) if self._first >= 0 else None,
            max_abs=self._abs.extreme(shape),
            max_rel=self._rel.extreme(shape),
        )

    def _add_codes(self, a: Array, b: Array) -> None:
        for start in range(0, len(a), _CHUNK):
            self._add_chunk(a[start : start + _CHUNK], b[start : start + _CHUNK])
            self._position += min(_CHUNK, len(a) - start)

    def _add_chunk(self, a: Array, b: Array) -> None:
        """Count what differs in bits, and measure that."""
        import numpy as np

        where: Array | None = None
        differs: Array | None = None
        count = len(a)
        if self._dtypes[0] == self._dtypes[1]:
            differs = (a != b).any(axis=1) if a.ndim == 2 else a != b
            count = int(np.count_nonzero(differs))
            if not count:
                return
            self._bits += count
            self._see_first(int(np.argmax(differs)))
            if count < len(a) // 2:
                where = np.flatnonzero(differs)
                a, b, differs = a[where], b[where], differs[where]
        of_a, of_b = self._forms
        if of_a is None or of_b is None:
            self._beyond += count
        else:
            self._measure(*_read_alike(of_a, a, of_b, b), differs, where)

    def _measure(self, a: Array, b: Array, changed: Array | None, where: Array | None) -> None:
        """Add what the numbers of a chunk say; `where` are the places of the elements in it, when it is not all."""
        forms = [form for form in self._forms if form is not None]
        found = measure(
            a,
            b,
            numbers=forms[0].numbers,
            tolerance=self._tolerance,
            changed=changed,
            least_abs=self._abs.difference,
            least_rel=self._rel.difference,
        )
        self._values += found.values
        self._beyond += found.beyond
        self._not_finite += found.not_finite
        self._zero_in_b += found.zero_in_b
        if found.first >= 0:
            self._see_first(found.first if where is None else int(where[found.first]))

        def best(peak: Peak | None, before: _Best) -> _Best:
            if peak is None:
                return before
            at = peak.element if where is None else int(where[peak.element])
            return _Best(
                peak.difference, self._position + at, _number(a, peak.element, forms[0]), _number(b, peak.element, forms[-1])
            )

        self._abs, self._rel = best(found.peak_abs, self._abs), best(found.peak_rel, self._rel)

    def _see_first(self, at: int) -> None:
        if self._first < 0:
            self._first = self._position + at


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element by its place in row-major order. Pure."""
    index: list[int] = []
    for side in reversed(shape):
        position, at = divmod(position, side)
        index.append(at)
    return tuple(reversed(index))


def _are_equal(a: memoryview, b: memoryview) -> bool:
    import numpy as np

    return bool((np.frombuffer(a, "u1") == np.frombuffer(b, "u1")).all())


def _read_alike(of_a: Form, a: Array, of_b: Form, b: Array) -> tuple[Array, Array]:
    """The numbers of both sides in one form that holds both: exact, but for 64-bit integers beside floating point."""
    import numpy as np

    with np.errstate(invalid="ignore"):  # signalling NaNs are quieted, which counts as nothing here
        x, y = of_a.read(a), of_b.read(b)
    names = {of_a.numpy_name, of_b.numpy_name}
    if len(names) == 1 and of_a.numbers == of_b.numbers:
        return x, y
    if "complex128" in names:
        return x.astype("c16"), y.astype("c16")
    if of_a.is_integral and of_b.is_integral:
        return tuple(n if n.dtype.kind in "iu" else n.astype("i8") for n in (x, y))  # type: ignore[return-value]  # two in, two out
    return x.astype("f8"), y.astype("f8")


def _number(numbers: Array, element: int, form: Form) -> Number:
    """The value of an element, as Python has it."""
    if form.numbers > 1:
        return tuple(numbers[element * form.numbers : (element + 1) * form.numbers].tolist())
    value: Number = numbers[element].item()
    return int(value) if form.is_integral and isinstance(value, float) else value
