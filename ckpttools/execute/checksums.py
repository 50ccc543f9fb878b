"""CRC-32 of stretches that were written in pieces, and the bytes of a file that do not come from the source.

The slots under one checksum pass through different threads in any order, so each has a CRC of its own, and those are put
together by arithmetic.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

from ckpttools.execute.records import Place, SegmentRecord
from ckpttools.model import ChecksumSlot, Literal
from ckpttools.plan import PlannedFile, segment_length

_POLYNOMIAL = 0xEDB88320
_RUN_BYTES = 1 << 20


def combine_crc32(first: int, second: int, second_length: int) -> int:
    """The CRC-32 of two stretches one after the other, from theirs; `second_length` in bytes. Pure."""
    return _multiply(_power_of_x(8 * second_length), first) ^ second


def _multiply(a: int, b: int) -> int:
    """A * b modulo the polynomial of CRC-32, in its reflected form: bit 31 is the constant term."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    """X ** exponent modulo the polynomial, by squaring."""
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def known_runs(file: PlannedFile, i: int, segments: Mapping[Place, SegmentRecord]) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of the literals and checksums of the `i`-th file, neighbours joined."""
    start, run = 0, bytearray()
    for segment in file.segments:
        data = None
        if isinstance(segment, Literal):
            data = segment.data
        elif isinstance(segment, ChecksumSlot):
            data = checksum_value(file, i, segment, segments).to_bytes(4, "little")
        if data is None or start + len(run) != segment.offset or len(run) >= _RUN_BYTES:
            if run:
                yield start, bytes(run)
            start, run = segment.offset, bytearray()
        run += data or b""
    if run:
        yield start, bytes(run)


def checksum_value(file: PlannedFile, i: int, checksum: ChecksumSlot, segments: Mapping[Place, SegmentRecord]) -> int:
    """The CRC-32 of the segments under a checksum of the `i`-th file, given the records of the copied ones.

    A checksum may cover earlier ones, which are computed anew: few do, and a file may have millions.
    """
    crc = 0
    for j, segment in file.walk(checksum.covers_offset, checksum.covers_offset + checksum.covers_length):
        if isinstance(segment, Literal):
            crc = zlib.crc32(segment.data, crc)
        elif isinstance(segment, ChecksumSlot):
            crc = zlib.crc32(checksum_value(file, i, segment, segments).to_bytes(4, "little"), crc)
        elif segment_length(segment):
            of_segment = segments[i, j].crc
            if of_segment is None:
                raise ValueError(f"no CRC was taken of segment {j} of {file.path}")
            crc = combine_crc32(crc, of_segment, segment_length(segment)) if crc else of_segment
    return crc
