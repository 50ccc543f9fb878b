"""A stretch of bytes that holds one container: a file, an item inside a file, or an item inside a compressed stream."""

from __future__ import annotations

from ckpttools.model import Encoding
from ckpttools.storage.decoding import DecodedStream
from ckpttools.storage.source import Source, read

_CACHED_BYTES = 64 << 10
"""Headers and directories of most containers fit in their first and last 64 KiB, so that two reads serve them all."""


class Region:
    """Random access to a container by offsets that count from its start. Not thread-safe."""

    def __init__(self, source: Source, file: str, offset: int, length: int, encoding: Encoding | None = None) -> None:
        """Args: offset: in the file, or in the decoded stream when `encoding` is given; length: bytes."""
        self.source = source
        self.file = file
        self.offset = offset
        self.length = length
        self.encoding = encoding
        self._stream = DecodedStream(source, file, encoding) if encoding else None
        self._cached: list[tuple[int, bytes]] = []

    @classmethod
    def decoded(cls, source: Source, file: str, encoding: Encoding) -> Region:
        """The whole decoded content of a compressed stretch; decodes it once to learn its length."""
        return cls(source, file, 0, DecodedStream(source, file, encoding).length(), encoding)

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` in the container, which must lie inside it.

        Raises: ValueError: when they do not. StorageError: when the file does not have them.
        """
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"bytes [{offset}, {offset + length}) are not inside a container of {self.length} bytes")
        for start, data in reversed(self._cached):  # what is asked for next mostly lies beside what was read last
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        if length >= _CACHED_BYTES:
            return self._read(offset, length)
        start = max(0, self.length - _CACHED_BYTES) if offset + length > self.length - _CACHED_BYTES else offset
        data = self._read(start, min(_CACHED_BYTES, self.length - start))
        self._cached = [*self._cached[-7:], (start, data)]
        return data[offset - start : offset - start + length]

    def forget(self) -> None:
        """Give back the memory of what was read; it is read again when it is asked for."""
        self._cached = []

    def _read(self, offset: int, length: int) -> bytes:
        if self._stream is None:
            return read(self.source, self.file, self.offset + offset, length)
        buffer = bytearray(length)
        self._stream.read_into(self.offset + offset, memoryview(buffer))
        return bytes(buffer)

    def where(self, offset: int | None = None) -> str:
        """The place for messages: the file, with the byte where one is given or the region does not start at 0."""
        if offset is None and self.offset == 0 and self.encoding is None:
            return self.file
        if self.encoding is not None:
            inner = "" if offset is None else f" (decoded byte {self.offset + offset})"
            return f"{self.file} at byte {self.encoding.offset}{inner}"
        return f"{self.file} at byte {self.offset + (offset or 0)}"
