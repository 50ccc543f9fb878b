"""What is known of bytes once they have passed: digests and CRCs per segment, and what `run` returns.

`Records` is what the workers fill and the journal keeps; `Executed` is the same in the words of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpttools.cast import CastCounts
from ckpttools.model import Box, Carry, TensorSpec
from ckpttools.plan import Plan, segment_length

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


@dataclass(slots=True)
class Records:
    """What is known of the work that is done."""

    segments: dict[Place, SegmentRecord] = field(default_factory=dict)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    files: set[int] = field(default_factory=set)
    """Files that are written from the first byte to the last (where files are written in order)."""

    def add(self, other: Records) -> None:
        """Take over what another one knows."""
        self.segments.update(other.segments)
        self.tensors.update(other.tensors)
        self.files |= other.files

    @property
    def touched(self) -> set[int]:
        """Positions of the files in which something was written."""
        return {i for i, _ in self.segments} | self.files


@dataclass(frozen=True, slots=True)
class WrittenSlot:
    """One box of a tensor as it lies in the output."""

    tensor: str
    box: Box
    file: str
    offset: int
    length: int
    digest: str
    """Of the slot's bytes."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor of the output."""

    spec: TensorSpec
    """As written."""
    source_digest: str
    """Of the values read, in the dtype of the source."""
    digest: str
    """Of the values written; the same unless they were cast."""
    slots: tuple[WrittenSlot, ...]
    counts: CastCounts | None = None
    """What the cast could not keep; None where there was none."""
    rounded_digest: str = ""
    """Of the values read, rounded to the dtype that was asked for; empty where none was."""


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
        tuple(
            WrittenCarry(c.source_file, plan.files[i].path, c.offset, c.length, records.segments[i, j].digest)
            for (i, j), c in _carries(plan)
        ),
        bytes_read=sum(fresh),
        bytes_written=plan.bytes_written,
        resumed_bytes=sum(segment_length(plan.files[i].segments[j]) for i, j in resumed.segments),
        resumed_files=sum(1 for i in resumed.touched if all((i, j) in resumed.segments for j in plan.files[i].copied)),
        is_verified=is_verified,
    )


def _carries(plan: Plan) -> Iterator[tuple[Place, Carry]]:
    for i, file in enumerate(plan.files):
        for j, segment in enumerate(file.segments):
            if isinstance(segment, Carry):
                yield (i, j), segment


def _written_tensors(plan: Plan, records: Records) -> Iterator[WrittenTensor]:
    for tensor in plan.tensors.values():
        record = records.tensors[tensor.name]
        slots = tuple(
            WrittenSlot(
                tensor.name,
                placed.slot.box,
                plan.files[placed.file].path,
                placed.slot.offset,
                placed.slot.length,
                records.segments[placed.file, placed.segment].digest,
            )
            for placed in tensor.slots
        )
        spec = TensorSpec(tensor.name, tensor.dtype, tensor.source.spec.shape)
        yield WrittenTensor(spec, record.source_digest, record.digest, slots, record.counts, record.rounded_digest)
