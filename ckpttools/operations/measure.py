"""Measures a chunk of numbers against another: how many differ, the largest absolute and relative difference.

Pure arithmetic on numpy arrays, float64 or as good: what float32 finds to be near the largest is computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

_SLACK = 2.0**-20
"""More than float32 can be wrong by in a difference or a quotient, relative to it."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """When two values count as equal: |a - b| <= atol + rtol * |b|, infinities of one sign, or NaN on both sides.

    That is numpy's `isclose` with `equal_nan=True`.
    """

    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest difference of a chunk, and which element has it."""

    difference: float | int
    element: int


@dataclass(frozen=True, slots=True)
class Measure:
    """What a chunk adds to the comparison of two tensors; counts are of elements."""

    values: int
    beyond: int
    not_finite: int
    zero_in_b: int
    first: int
    """The first element whose values differ; -1 for none."""
    peak_abs: Peak | None
    """None where nothing is larger than what was found before."""
    peak_rel: Peak | None


def measure(
    a: Array,
    b: Array,
    *,
    numbers: int = 1,
    tolerance: Tolerance | None = None,
    changed: Array | None = None,
    least_abs: float = 0,
    least_rel: float = 0,
) -> Measure:
    """How the numbers of two chunks differ. Pure.

    Args:
        a, b: of one form: float32, float64, complex128, or 64-bit integers of which one may be signed.
        numbers: per element.
        changed: whose bits differ, per element, so that NaN equals only itself; without it NaN equals NaN.
        least_abs, least_rel: only a difference larger than that is told.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        distance = _distance(a, b)
        odd: Array | None = None
        if np.isfinite(distance.max()):
            differs, size = distance != 0, _magnitude(b)
        else:
            a, b = _widened(a), _widened(b)
            finite = np.isfinite(a) & np.isfinite(b)
            are_nan = np.isnan(a) & np.isnan(b)
            differs = (a != b) & (~are_nan if changed is None else changed.repeat(numbers))
            odd = differs & ~finite
            distance = np.where(finite, _clamped(_distance(a, b)), 0)
            size = np.where(finite, _magnitude(b), 1)
        is_zero = size == 0
        has_zero = bool(is_zero.any())
        quotient = distance / (np.where(is_zero, np.inf, size).astype(size.dtype) if has_zero else size)
        slack = _SLACK if distance.dtype == np.float32 else 0.0
        far = _beyond(a, b, distance, size, tolerance) if tolerance is not None else None
        if far is not None and odd is not None:
            far |= odd & ~are_nan
        of_elements = _per_element(differs, numbers)
        values = int(np.count_nonzero(of_elements))
        return Measure(
            values=values,
            beyond=_count(far, numbers),
            not_finite=_count(odd, numbers),
            zero_in_b=_count(is_zero & differs, numbers) if has_zero else 0,
            first=int(np.argmax(of_elements)) if values else -1,
            peak_abs=_peak(distance, slack, least_abs, lambda at: _distance(_widened(a[at]), _widened(b[at])), numbers),
            peak_rel=_peak(quotient, slack, least_rel, lambda at: _quotient(_widened(a[at]), _widened(b[at])), numbers),
        )


def _peak(found: Array, slack: float, least: float, exact: Callable[[Array], Array], numbers: int) -> Peak | None:
    """The largest of differences that are right but for `slack`; None when it is not larger than `least`."""
    import numpy as np

    top = found.max()
    if not top or float(top) * (1 + slack) <= least:
        return None
    at = np.flatnonzero(found >= (found.dtype.type(float(top) * (1 - slack)) if slack else top))
    values = _clamped(exact(at) if slack else found[at])
    best = int(np.argmax(values))
    if values[best] <= least:
        return None
    return Peak(values[best].item(), int(at[best]) // numbers)


def _beyond(a: Array, b: Array, distance: Array, size: Array, tolerance: Tolerance) -> Array:
    """Which finite numbers are farther apart than the tolerance allows, in float64."""
    import numpy as np

    if float(distance.max()) <= tolerance.atol:
        return np.zeros(len(distance), bool)
    if distance.dtype == np.float32:
        distance, size = _distance(_widened(a), _widened(b)), size.astype("f8")
    far: Array = distance.astype("f8") > tolerance.atol + tolerance.rtol * size
    return far


def _distance(a: Array, b: Array) -> Array:
    """|a - b|; of 64-bit integers as uint64, exact up to 2**64 - 1 and that beyond."""
    import numpy as np

    if a.dtype.kind in "iu":
        return _integer_distance(a, b)
    distance: Array = np.abs(a - b)
    return distance


def _integer_distance(a: Array, b: Array) -> Array:
    import numpy as np

    if a.dtype == b.dtype:
        distance: Array = np.maximum(a, b).view("u8") - np.minimum(a, b).view("u8")
        return distance
    signed, other = (a, b) if a.dtype.kind == "i" else (b, a)
    bits = signed.view("u8")
    is_negative = signed < 0
    total = other + (~bits + np.uint64(1))  # |signed| where it is negative
    total[total < other] = np.iinfo("u8").max
    mixed: Array = np.where(is_negative, total, np.maximum(bits, other) - np.minimum(bits, other))
    return mixed


def _quotient(a: Array, b: Array) -> Array:
    import numpy as np

    size = _magnitude(b)
    quotient: Array = _distance(a, b) / np.where(size == 0, np.inf, size)
    return quotient


def _magnitude(numbers: Array) -> Array:
    """|numbers|, of integers as float64, since they divide."""
    import numpy as np

    magnitude: Array = np.abs(numbers.astype("f8") if numbers.dtype.kind in "iu" else numbers)
    return magnitude


def _widened(numbers: Array) -> Array:
    return numbers.astype("f8") if numbers.dtype == "f4" else numbers


def _clamped(found: Array) -> Array:
    """With the largest float64 for what is larger than that."""
    import numpy as np

    return found if found.dtype.kind in "iu" else np.minimum(found, sys.float_info.max)


def _per_element(mask: Array, numbers: int) -> Array:
    import numpy as np

    rows: Array = mask.reshape(-1, numbers)
    return mask if numbers == 1 else np.asarray(rows.any(axis=1))


def _count(mask: Array | None, numbers: int) -> int:
    import numpy as np

    return 0 if mask is None else int(np.count_nonzero(_per_element(mask, numbers)))
