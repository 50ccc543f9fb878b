"""Holds the checksums that a writer stored against the bytes, as they happen to pass on their way somewhere else.

Reading a tensor usually reads its stored record from the first byte to the last, so the record's CRC-32 falls out of
reads that are made anyway. What did not pass in order is read by itself at the end.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import overload

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import StorageError
from ckpttools.findings import Finding
from ckpttools.gather import Gather
from ckpttools.model import Encoding, Extent, Piece, StoredChecksum, TensorEntry, TensorSpec


class ChosenChecksums(Sequence[StoredChecksum]):
    """Some of very many checksums, by their numbers."""

    def __init__(self, checksums: Sequence[StoredChecksum], numbers: Iterable[int]) -> None:
        self._checksums = checksums
        self._numbers = array("Q", numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> StoredChecksum: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[StoredChecksum]: ...
    def __getitem__(self, number: int | slice) -> StoredChecksum | Sequence[StoredChecksum]:
        if isinstance(number, slice):
            return ChosenChecksums(self._checksums, self._numbers[number])
        return self._checksums[self._numbers[number]]


class _Places:
    """The records of one file (or decoded stream), in the order of their bytes; of those that begin alike the longest last."""

    def __init__(self) -> None:
        self.starts, self.stops, self.numbers = array("Q"), array("Q"), array("Q")

    def sort(self) -> None:
        order = sorted(range(len(self.starts)), key=lambda k: (self.starts[k], self.stops[k]))
        for column in (self.starts, self.stops, self.numbers):
            column[:] = array("Q", (column[k] for k in order))


class ChecksumIndex:
    """Finds the checksum whose record holds an extent. Keeps three numbers of each, since there may be millions."""

    def __init__(self, checksums: Iterable[StoredChecksum]) -> None:
        self._places: dict[tuple[str, Encoding | None], _Places] = defaultdict(_Places)
        for number, checksum in enumerate(checksums):
            places = self._places[checksum.file, checksum.encoding]
            places.starts.append(checksum.offset)
            places.stops.append(checksum.offset + checksum.length)
            places.numbers.append(number)
        for places in self._places.values():
            places.sort()

    def holding(self, extent: Extent) -> int | None:
        """The position (in the input) of the checksum whose record holds all of an extent."""
        places = self._places.get((extent.file, extent.encoding))
        at = bisect_right(places.starts, extent.offset) - 1 if places is not None else -1
        if places is None or at < 0 or not extent.length or extent.offset + extent.length > places.stops[at]:
            return None
        return places.numbers[at]

    def starting(self, file: str, encoding: Encoding | None, offset: int) -> int | None:
        """The position of the checksum whose record, of some bytes, starts at a byte."""
        places = self._places.get((file, encoding))
        at = bisect_right(places.starts, offset) - 1 if places is not None else -1
        if places is None or at < 0 or places.starts[at] != offset or places.stops[at] == offset:
            return None
        return places.numbers[at]

    def inside(self, extent: Extent) -> list[int]:
        """The positions of the checksums whose records lie in a stretch of a file: a whole archive has several."""
        places = self._places.get((extent.file, extent.encoding), _Places())
        stop = extent.offset + extent.length
        low, high = bisect_left(places.starts, extent.offset), bisect_left(places.starts, stop)
        return [places.numbers[at] for at in range(low, high) if places.stops[at] <= stop]


class ChecksumWatch:
    """The checksums of some records. `watch` may be called from several threads, each reading other records."""

    def __init__(self, checksums: Sequence[StoredChecksum]) -> None:
        self._checksums = checksums
        self._index = ChecksumIndex(checksums)
        self._is_proved = bytearray(len(checksums))
        self._passed: dict[int, tuple[int, int]] = {}
        """Of records that are not proved: (the first byte that did not pass, the CRC-32 up to it)."""
        self._running: dict[tuple[str, Encoding | None, int], int] = {}
        """Where a record goes on whose first bytes have passed -> its number."""

    def __bool__(self) -> bool:
        return len(self._checksums) > 0

    def watch(self, file: str, encoding: Encoding | None, offset: int, view: memoryview) -> None:
        """See stored bytes pass; what begins or continues a record counts towards its checksum."""
        number = self._running.pop((file, encoding, offset), None)
        if number is None:
            number = self._index.starting(file, encoding, offset)
            if number is None or self._is_proved[number] or number in self._passed:
                return
        checksum = self._checksums[number]
        stop = min(offset + len(view), checksum.offset + checksum.length)
        value = zlib.crc32(view[: stop - offset], self._passed.get(number, (0, 0))[1])
        if stop < checksum.offset + checksum.length:
            self._running[file, encoding, stop] = number
        elif value == checksum.expected:
            self._is_proved[number] = True
            self._passed.pop(number, None)
            return
        self._passed[number] = stop, value

    def finish(self, gather: Gather, progress: Callable[[int], None] | None = None) -> list[Finding]:
        """Read what did not pass, and return a finding per record whose bytes are not those that were written.

        Nothing is remembered of what is read here, so that bytes may pass, and this may be asked, again.
        """
        return [
            finding
            for number, is_proved in enumerate(self._is_proved)
            if not is_proved
            for finding in _finish(self._checksums[number], self._passed.get(number), gather, progress)
        ]


def _finish(
    checksum: StoredChecksum, passed: tuple[int, int] | None, gather: Gather, progress: Callable[[int], None] | None
) -> list[Finding]:
    start, value = passed or (checksum.offset, 0)
    try:
        if start < checksum.offset + checksum.length:
            for tile in gather.stream(_rest(checksum, start)):
                value = zlib.crc32(tile, value)
                if progress is not None:
                    progress(len(tile))
    except StorageError as e:
        where = f"`{checksum.label}` in {e.where}"
        return [Finding(e.finding_code, where, e.expected or "readable bytes", e.found or e.message)]
    if value == checksum.expected:
        return []
    start = checksum.encoding.offset if checksum.encoding else checksum.offset
    where = f"`{checksum.label}` in {checksum.file} at byte {start}"
    return [Finding("checksum-mismatch", where, f"CRC-32 {checksum.expected:08x}", f"{value:08x}")]


def _rest(checksum: StoredChecksum, start: int) -> TensorEntry:
    """What has not passed of a record, as a tensor of bytes, so that it is read like everything else."""
    length = checksum.offset + checksum.length - start
    spec = TensorSpec(checksum.label, BY_NAME["uint8"], (length,))
    extent = Extent(checksum.file, start, length, encoding=checksum.encoding)
    return TensorEntry(spec, (checksum.label,), (Piece(spec.box, extent),))
