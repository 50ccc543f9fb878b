"""Counts values that nobody wants: NaN and infinity in floats, bytes other than 0 and 1 in bools."""

from __future__ import annotations

from dataclasses import dataclass

from ckpttools.dtypes import DType
from ckpttools.findings import Finding

_EXPONENT_BITS = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7), "float8_e5m2": (5, 2)}
"""Bits of exponent and fraction of the formats in which an exponent of all ones means infinity or NaN."""
_NAN_BYTES = {
    "float8_e4m3fn": (0x7F, 0xFF),
    "float8_e4m3fnuz": (0x80,),
    "float8_e5m2fnuz": (0x80,),
    "float8_e8m0fnu": (0xFF,),
}
"""Formats without infinity: the bytes that are NaN."""


@dataclass(slots=True)
class ValueReport:
    """Counts over one tensor."""

    not_finite: int = 0
    noncanonical_bool: int = 0

    def findings(self, name: str) -> list[Finding]:
        """A finding for each kind that was counted."""
        found = []
        if self.not_finite:
            found.append(Finding("not-finite", name, "finite values", f"{self.not_finite} that are NaN or infinite"))
        if self.noncanonical_bool:
            found.append(Finding("noncanonical-bool", name, "bytes 0 and 1", f"{self.noncanonical_bool} other bytes"))
        return found


def count_unusual(tile: memoryview, dtype: DType, report: ValueReport) -> None:
    """Add what is unusual in a tile to the report, by bits: no value is computed."""
    import numpy as np

    if dtype.name == "bool":
        report.noncanonical_bool += int(np.count_nonzero(np.frombuffer(tile, "u1") > 1))
    elif dtype.name in _NAN_BYTES:
        report.not_finite += int(np.count_nonzero(np.isin(np.frombuffer(tile, "u1"), _NAN_BYTES[dtype.name])))
    base = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}.get(dtype.name, dtype.name)
    if base in _EXPONENT_BITS:
        exponent, fraction = _EXPONENT_BITS[base]
        bits = np.frombuffer(tile, f"u{(1 + exponent + fraction) // 8}")
        mask = bits.dtype.type(((1 << exponent) - 1) << fraction)
        report.not_finite += int(np.count_nonzero((bits & mask) == mask))
