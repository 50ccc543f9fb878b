"""Where the bytes of one segment go, in order: hashed, summed and written piece by piece while they are in the cache."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cached_property

from ckpttools.digest import Hasher
from ckpttools.execute.records import SegmentRecord
from ckpttools.storage.writing import WRITE_BYTES

Write = Callable[[int, memoryview], None]
"""Writes bytes at an offset of one output file."""


class Sink:
    """Takes the bytes of a segment from the first to the last."""

    def __init__(self, write: Write, offset: int, hasher: Hasher, *, with_crc: bool) -> None:
        self._write = write
        self._offset = offset
        self._hasher = hasher
        self._crc = 0 if with_crc else None

    def put(self, data: memoryview) -> None:
        """Take further bytes."""
        for start in range(0, len(data), WRITE_BYTES):
            piece = data[start : start + WRITE_BYTES]
            self._hasher.update(piece)
            if self._crc is not None:
                self._crc = zlib.crc32(piece, self._crc)
            self._write(self._offset, piece)
            self._offset += len(piece)

    @cached_property
    def record(self) -> SegmentRecord:
        """What is known of the bytes, to be asked when all have been taken."""
        return SegmentRecord(self._hasher.hexdigest(), self._crc)
