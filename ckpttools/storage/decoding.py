"""Reads inside compressed stretches of files (zstd items of DCP, deflated zip members) in bounded memory.

A compressed stream can only be read forwards, so a `DecodedStream` keeps a cursor and starts again when it is asked for
earlier bytes. Row-major reading of a tensor asks forwards, so each byte is decoded once.
"""

from __future__ import annotations

import zlib
from typing import IO, Protocol, cast

from ckpttools.errors import BadStreamError, MissingExtraError, StorageError
from ckpttools.model import Encoding
from ckpttools.storage.source import Source, read

_BLOCK_BYTES = 1 << 20


class _Decoder(Protocol):
    """Gives decoded bytes, never more than asked for: a kilobyte of a compressed bomb may stand for gigabytes."""

    def read(self, most: int, /) -> bytes:
        """Up to `most` further decoded bytes; none at the end of the stream."""
        ...


class _Stored:
    """The compressed bytes of a stretch, one after the other."""

    def __init__(self, source: Source, file: str, encoding: Encoding) -> None:
        self._source = source
        self._file = file
        self._encoding = encoding
        self._consumed = 0

    def read(self, most: int = _BLOCK_BYTES) -> bytes:
        """Up to `most` further bytes as stored."""
        count = min(most, _BLOCK_BYTES, self._encoding.length - self._consumed)
        data = read(self._source, self._file, self._encoding.offset + self._consumed, count) if count else b""
        self._consumed += count
        return data


class _Deflate:
    def __init__(self, stored: _Stored) -> None:
        self._stored = stored
        self._decoder = zlib.decompressobj(-zlib.MAX_WBITS)

    def read(self, most: int, /) -> bytes:
        while not self._decoder.eof:
            data = self._decoder.unconsumed_tail or self._stored.read()
            decoded = self._decoder.decompress(data, most)
            if decoded or not data:
                return decoded
        return b""


def _open_decoder(codec: str, stored: _Stored) -> tuple[_Decoder, type[Exception]]:
    """A decoder of a stretch, and the error that it raises for bad data."""
    if codec == "deflate":
        return _Deflate(stored), zlib.error
    if codec != "zstd":
        raise StorageError(f"unknown compression: {codec}", expected="zstd or deflate", found=codec)
    try:
        import zstandard
    except ImportError as e:
        raise MissingExtraError("reading zstd items needs the package zstandard", hints=["pip install 'ckpttools[zstd]'"]) from e
    return zstandard.ZstdDecompressor().stream_reader(cast("IO[bytes]", stored)), zstandard.ZstdError


class DecodedStream:
    """The decoded bytes of one compressed stretch. Not thread-safe."""

    def __init__(self, source: Source, file: str, encoding: Encoding) -> None:
        self._source = source
        self._file = file
        self._encoding = encoding
        self._restart()

    def _restart(self) -> None:
        self._decoder, self._error = _open_decoder(self._encoding.codec, _Stored(self._source, self._file, self._encoding))
        self._position = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with decoded bytes from `offset`. Raises StorageError when the stream is bad or ends before."""
        if offset < self._position:
            self._restart()
        self._skip(offset - self._position)
        done = 0
        while done < len(buffer):
            block = self._next(len(buffer) - done)
            if not block:
                raise self._bad("ends early", f"at least {offset + len(buffer)} decoded bytes", f"{offset + done} bytes")
            buffer[done : done + len(block)] = block
            done += len(block)

    def length(self) -> int:
        """Decoded bytes in all; decodes to the end."""
        while self._next(_BLOCK_BYTES):
            pass
        return self._position

    def _skip(self, count: int) -> None:
        while count > 0:
            block = self._next(count)
            if not block:
                return
            count -= len(block)

    def _next(self, most: int) -> bytes:
        """Up to `most` further decoded bytes; empty at the end of the stream."""
        try:
            block = self._decoder.read(min(most, _BLOCK_BYTES))
        except self._error as e:
            raise self._bad("does not decode", "a valid stream", str(e)) from e
        self._position += len(block)
        return block

    def _bad(self, what: str, expected: str, found: str) -> StorageError:
        where = f"{self._file} at byte {self._encoding.offset}"
        return BadStreamError(f"a {self._encoding.codec} stream {what}", where=where, expected=expected, found=found)
