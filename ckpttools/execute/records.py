"""What is known of bytes once they have passed: digests and CRCs per segment, and what `run` returns.

`Records` is what the workers fill and the journal keeps; `Executed` is the same in the words of the plan.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from ckpttools.cast import CastCounts
from ckpttools.model import Carry, TensorSpec
from ckpttools.plan import Plan
from ckpttools.seals import SealedPiece

Place = tuple[int, int]
"""(position of a file in the plan, position of a segment in the file)."""


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """A slot or a carry that was written."""

    digest: str
    crc: int | None = None
    """CRC-32, where a checksum slot covers the segment."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor that was written."""

    source_digest: str
    digest: str
    counts: CastCounts | None = None
    rounded_digest: str = ""
    """Of the source's values rounded to another dtype, where that was asked for."""


class SegmentTable(MutableMapping[Place, SegmentRecord]):
    """The records of a run by place, in 37 bytes each: there may be a million of them, and they are kept to the end."""

    _ROW = struct.Struct("<BI32s")
    _ABSENT, _PLAIN, _SUMMED = range(3)

    def __init__(self, records: Mapping[Place, SegmentRecord] | None = None) -> None:
        self._files: dict[int, bytearray] = {}
        self.update(records or {})

    def __getitem__(self, place: Place) -> SegmentRecord:
        i, j = place
        rows, at = self._files.get(i, b""), j * self._ROW.size
        kind, crc, digest = self._ROW.unpack_from(rows, at) if at < len(rows) else (self._ABSENT, 0, b"")
        if kind == self._ABSENT:
            raise KeyError(place)
        return SegmentRecord(digest.hex(), crc if kind == self._SUMMED else None)

    def __setitem__(self, place: Place, record: SegmentRecord) -> None:
        i, j = place
        rows, at = self._files.setdefault(i, bytearray()), j * self._ROW.size
        if at >= len(rows):
            rows.extend(bytes(at + self._ROW.size - len(rows)))
        kind = self._PLAIN if record.crc is None else self._SUMMED
        self._ROW.pack_into(rows, at, kind, record.crc or 0, bytes.fromhex(record.digest))

    def __delitem__(self, place: Place) -> None:
        self[place]  # raises where there is none
        self._files[place[0]][place[1] * self._ROW.size] = self._ABSENT

    def __iter__(self) -> Iterator[Place]:
        return ((i, j) for i, rows in self._files.items() for j in range(len(rows) // self._ROW.size) if (i, j) in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(slots=True)
class Records:
    """What is known of the work that is done."""

    segments: MutableMapping[Place, SegmentRecord] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    files: set[int] = field(default_factory=set)
    """Files that are written from the first byte to the last (where files are written in order)."""

    def add(self, other: Records) -> None:
        """Take over what another one knows."""
        self.segments.update(other.segments)
        self.tensors.update(other.tensors)
        self.files |= other.files

    def copy(self) -> Records:
        """What is known now, whatever is added later."""
        return Records(SegmentTable(self.segments), dict(self.tensors), set(self.files))

    @property
    def touched(self) -> set[int]:
        """Positions of the files in which something was written."""
        return {i for i, _ in self.segments} | self.files


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor of the output."""

    spec: TensorSpec
    """As written."""
    source_digest: str
    """Of the values read, in the dtype of the source."""
    digest: str
    """Of the values written; the same unless they were cast."""
    counts: CastCounts | None = None
    """What the cast could not keep; None where there was none."""
    rounded_digest: str = ""
    """Of the values read, rounded to the dtype that was asked for; empty where none was."""


class WrittenPieces(Mapping[str, tuple[SealedPiece, ...]]):
    """Every tensor's boxes as they lie in the output, by name; made when asked for, from the plan and the records."""

    def __init__(self, plan: Plan, segments: Mapping[Place, SegmentRecord]) -> None:
        self._plan = plan
        self._segments = segments

    def __getitem__(self, name: str) -> tuple[SealedPiece, ...]:
        return tuple(
            SealedPiece(
                self._plan.files[placed.file].path,
                placed.slot.offset,
                placed.slot.length,
                placed.slot.box,
                self._segments[placed.file, placed.number].digest,
            )
            for placed in self._plan.tensors[name].slots
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.tensors)

    def __len__(self) -> int:
        return len(self._plan.tensors)


@dataclass(frozen=True, slots=True)
class WrittenCarry:
    """A stretch of a source file as it lies in the output."""

    source_file: str
    file: str
    offset: int
    length: int
    digest: str


@dataclass(frozen=True, slots=True)
class Executed:
    """What `run` did."""

    algorithm: str
    """Of all digests."""
    tensors: tuple[WrittenTensor, ...]
    pieces: Mapping[str, tuple[SealedPiece, ...]]
    """By tensor name: its boxes, one after the other as their files have them."""
    carries: tuple[WrittenCarry, ...]
    bytes_read: int
    """Of tensors and carried files, in this run."""
    bytes_written: int
    """Of all output files, those of an earlier run included."""
    resumed_bytes: int = 0
    """Bytes of tensors and carried files that an earlier run had written."""
    resumed_files: int = 0
    """Files of which an earlier run had written all that was not known beforehand."""
    is_verified: bool = False
    """Whether the output was read back and compared."""


def summarise(plan: Plan, records: Records, resumed: Records, *, algorithm: str, is_verified: bool) -> Executed:
    """The records of a finished run in the words of its plan. Pure."""
    fresh = [t.source.spec.length_bytes for t in plan.tensors.values() if t.name not in resumed.tensors]
    fresh += [carry.length for place, carry in _carries(plan) if place not in resumed.segments]
    return Executed(
        algorithm,
        tuple(_written_tensors(plan, records)),
        WrittenPieces(plan, records.segments),
        tuple(
            WrittenCarry(c.source_file, plan.files[i].path, c.offset, c.length, records.segments[i, j].digest)
            for (i, j), c in _carries(plan)
        ),
        bytes_read=sum(fresh),
        bytes_written=plan.bytes_written,
        resumed_bytes=sum(plan.files[i].copied[j].length for i, j in resumed.segments),
        resumed_files=sum(
            1 for i in resumed.touched if all((i, j) in resumed.segments for j in range(len(plan.files[i].copied)))
        ),
        is_verified=is_verified,
    )


def _carries(plan: Plan) -> Iterator[tuple[Place, Carry]]:
    for i, file in enumerate(plan.files):
        for j, segment in enumerate(file.copied):
            if isinstance(segment, Carry):
                yield (i, j), segment


def _written_tensors(plan: Plan, records: Records) -> Iterator[WrittenTensor]:
    for tensor in plan.tensors.values():
        record = records.tensors[tensor.name]
        spec = TensorSpec(tensor.name, tensor.dtype, tensor.source.spec.shape)
        yield WrittenTensor(spec, record.source_digest, record.digest, record.counts, record.rounded_digest)
