"""Whether a weight can be the rounding of a stretch of masters, told by a few of their elements.

With ZeRO off nothing names what the optimizer keeps, and shapes alone often fit several orders; values rarely do. Only samples
are read, so a yes is a hint: `validate` holds all elements against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import error, pack, unpack

from ckpttools.layouts.deepspeed.states import Files, Stored

_SAMPLE = 48
"""Elements in each of up to three samples of a weight."""


@dataclass(slots=True)
class Likeness:
    """Compares samples; remembers what was read."""

    files: Files
    _read: dict[tuple[str, int, int], bytes] = field(default_factory=dict)

    def may_round_to(self, master: Stored, weight: Stored, first: int = 0) -> bool:
        """Whether the masters from element `first` on can be those of a weight; True where it cannot be told.

        Raises StorageError.
        """
        if first + weight.numel > master.numel:
            return False
        if not (_is_plain(master) and _is_plain(weight)) or master.dtype.name != "float32":
            return True
        if weight.dtype.name not in ("float32", "bfloat16", "float16"):
            return False
        for start, length in _samples(weight.numel):
            masters = unpack(f"<{length}I", self._bytes(master, first + start, length))
            code = "I" if weight.dtype.item_bytes == 4 else "H"
            weights = unpack(f"<{length}{code}", self._bytes(weight, start, length))
            if any(_rounded(m, weight.dtype.name) not in (w, None) for m, w in zip(masters, weights, strict=True)):
                return False
        return True

    def _bytes(self, stored: Stored, start: int, length: int) -> bytes:
        item = stored.dtype.item_bytes
        offset = stored.extent.offset + start * item
        key = (stored.extent.file, offset, length * item)
        if key not in self._read:
            data = bytearray(length * item)
            self.files.source.read_into(stored.extent.file, offset, memoryview(data))
            self._read[key] = bytes(data)
        return self._read[key]


def _is_plain(stored: Stored) -> bool:
    return stored.extent.strides is None and not stored.extent.transforms and stored.extent.encoding is None


def _samples(numel: int) -> list[tuple[int, int]]:
    """(first element, number) of each sample: the start, the middle and the end. Pure."""
    if numel <= 3 * _SAMPLE:
        return [(0, numel)] if numel else []
    return [(0, _SAMPLE), ((numel - _SAMPLE) // 2, _SAMPLE), (numel - _SAMPLE, _SAMPLE)]


def _rounded(bits: int, dtype: str) -> int | None:
    """The bits of a float32 rounded to nearest even; None for NaN, whose payload is free. Pure."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return None
    if dtype == "float32":
        return bits
    if dtype == "bfloat16":
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    (value,) = unpack("<f", pack("<I", bits))
    try:
        return int.from_bytes(pack("<e", value), "little")
    except (OverflowError, error):
        return 0xFC00 if value < 0 else 0x7C00
