"""Holds the checksums that a writer stored against the bytes, as they happen to pass on their way somewhere else.

Reading a tensor usually reads its stored record from the first byte to the last, so the record's CRC-32 falls out of
reads that are made anyway. What did not pass in order is read by itself at the end.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckpttools.dtypes import BY_NAME
from ckpttools.errors import StorageError
from ckpttools.findings import Finding
from ckpttools.gather import Gather
from ckpttools.model import Encoding, Extent, Piece, StoredChecksum, TensorEntry, TensorSpec

_PAST_ALL = 1 << 63


@dataclass(slots=True)
class _Running:
    """A CRC-32 that has grown up to `next_offset`."""

    checksum: StoredChecksum
    next_offset: int
    value: int = 0


class ChecksumIndex:
    """Finds the checksum whose record holds an extent."""

    def __init__(self, checksums: Sequence[StoredChecksum]) -> None:
        self._places: dict[tuple[str, Encoding | None], list[tuple[int, int, int]]] = defaultdict(list)
        for number, checksum in enumerate(checksums):
            place = (checksum.offset, checksum.offset + checksum.length, number)
            self._places[checksum.file, checksum.encoding].append(place)
        for places in self._places.values():
            places.sort()

    def holding(self, extent: Extent) -> int | None:
        """The position (in the input) of the checksum whose record holds all of an extent."""
        places = self._places.get((extent.file, extent.encoding), [])
        at = bisect_right(places, (extent.offset, _PAST_ALL, _PAST_ALL)) - 1
        if at < 0 or not extent.length or extent.offset + extent.length > places[at][1]:
            return None
        return places[at][2]

    def inside(self, extent: Extent) -> list[int]:
        """The positions of the checksums whose records lie in a stretch of a file: a whole archive has several."""
        places = self._places.get((extent.file, extent.encoding), [])
        stop = extent.offset + extent.length
        found = []
        for start, end, number in places[bisect_left(places, (extent.offset, 0, 0)) :]:
            if start >= stop:
                break
            if end <= stop:
                found.append(number)
        return found


class ChecksumWatch:
    """The checksums of some records. `watch` may be called from several threads, each reading other records."""

    def __init__(self, checksums: Iterable[StoredChecksum]) -> None:
        self._all = [_Running(c, c.offset) for c in checksums]
        self._running = {(r.checksum.file, r.checksum.encoding, r.next_offset): r for r in self._all if r.checksum.length}

    def __bool__(self) -> bool:
        return bool(self._all)

    def watch(self, file: str, encoding: Encoding | None, offset: int, view: memoryview) -> None:
        """See stored bytes pass; what continues a record counts towards its checksum."""
        running = self._running.pop((file, encoding, offset), None)
        if running is not None:
            room = running.checksum.offset + running.checksum.length - offset
            running.value = zlib.crc32(view[:room], running.value)
            running.next_offset += min(len(view), room)
            self._running[file, encoding, running.next_offset] = running

    def finish(self, gather: Gather, progress: Callable[[int], None] | None = None) -> list[Finding]:
        """Read what did not pass, and return a finding per record whose bytes are not those that were written.

        Nothing is remembered of what is read here, so that bytes may pass, and this may be asked, again.
        """
        return [f for running in self._all for f in _finish(running, gather, progress)]


def _finish(running: _Running, gather: Gather, progress: Callable[[int], None] | None) -> list[Finding]:
    checksum, value = running.checksum, running.value
    try:
        if running.next_offset < checksum.offset + checksum.length:
            for tile in gather.stream(_rest(running)):
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


def _rest(running: _Running) -> TensorEntry:
    """What has not passed of a record, as a tensor of bytes, so that it is read like everything else."""
    checksum, start = running.checksum, running.next_offset
    length = checksum.offset + checksum.length - start
    spec = TensorSpec(checksum.label, BY_NAME["uint8"], (length,))
    extent = Extent(checksum.file, start, length, encoding=checksum.encoding)
    return TensorEntry(spec, (checksum.label,), (Piece(spec.box, extent),))
