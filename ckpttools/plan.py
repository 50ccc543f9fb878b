"""Plan: every output file of a conversion to the byte, before one is written; pure data, no I/O.

A file is tiled by segments: a slot (a box of a source tensor, perhaps cast), a carry (a stretch of a source file as it
is), a literal, or a checksum slot. What is copied has a number in its file; the rest is known, or follows from what is
copied. One executor runs every plan; a plan can be printed, counted, split and resumed. Read `make` and `Plan` first.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge

from ckpttools.cast import require_castable
from ckpttools.dtypes import DType
from ckpttools.errors import ConversionError
from ckpttools.geometry import BoxIndex, cover, factored
from ckpttools.model import (
    ArrangedFile,
    Arrangement,
    Carry,
    Checkpoint,
    ChecksumSlot,
    Extent,
    FileEntry,
    Frame,
    Literal,
    Slot,
    TensorEntry,
)
from ckpttools.storage.source import Listing

_BLOCK_BYTES = 4096
_RECORD_BYTES = 512
"""What the journal takes per slot, roughly."""


Copied = Slot | Carry
Known = Literal | ChecksumSlot
Segment = Copied | Known


def segment_length(segment: Segment) -> int:
    """Bytes that a segment takes in its output file. Pure."""
    if isinstance(segment, Literal):
        return len(segment.data)
    return 4 if isinstance(segment, ChecksumSlot) else segment.length


@dataclass(frozen=True)
class PlannedFile:
    """One output file and the segments that tile it."""

    path: str
    length_bytes: int
    copied: tuple[Copied, ...] = ()
    """What comes from the source, in the order of the offsets; a segment's number is its place here."""
    known: tuple[Known, ...] = ()
    """What does not, but for the frames of slots; in the order of the offsets."""
    is_commit_record: bool = False
    """Whether its presence makes the snapshot readable, so that it is written last."""

    @property
    def segments(self) -> Iterator[Segment]:
        """Everything that tiles it, in order."""
        return (segment for _, segment in self.walk())

    def walk(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Segment]]:
        """The segments that begin in bytes [start, stop), in order, each with its number, -1 where it is not copied.

        Those of frames are made as they are asked for: kept, they would be most of a plan.
        """
        stop = self.length_bytes + 1 if stop is None else stop
        low, high = bisect_left(self._copied_offsets, start), bisect_left(self._copied_offsets, stop)
        copied = (x for j in range(max(0, low - 1), min(high + 1, len(self.copied))) for x in self._framed(j))
        known = self.known[bisect_left(self._known_offsets, start) : bisect_left(self._known_offsets, stop)]
        walked = merge(copied, ((-1, x) for x in known), key=_place) if known else copied
        return ((j, segment) for j, segment in walked if start <= segment.offset < stop)

    def _framed(self, j: int) -> Iterator[tuple[int, Segment]]:
        segment = self.copied[j]
        frame = segment.frame if isinstance(segment, Slot) else None
        if frame is None:
            yield j, segment
            return
        yield from ((-1, _moved(x, segment.offset)) for x in frame.before)
        yield j, segment
        yield from ((-1, _moved(x, segment.offset)) for x in frame.after)

    @cached_property
    def _copied_offsets(self) -> array[int]:
        return array("Q", (x.offset for x in self.copied))

    @cached_property
    def _known_offsets(self) -> array[int]:
        return array("Q", (x.offset for x in self.known))

    @cached_property
    def is_summed(self) -> bytearray:
        """By number: whether a checksum covers the segment."""
        found = bytearray(isinstance(x, Slot) and _is_summed(x) for x in self.copied)
        for checksum in (x for x in self.known if isinstance(x, ChecksumSlot)):
            for j, _ in self.walk(checksum.covers_offset, checksum.covers_offset + checksum.covers_length):
                if j >= 0:
                    found[j] = 1
        return found


def _is_summed(slot: Slot) -> bool:
    return slot.frame is not None and any(isinstance(x, ChecksumSlot) for x in slot.frame.after)


def _moved(segment: Known, offset: int) -> Known:
    """A part of a frame, for a slot at an offset."""
    if isinstance(segment, Literal):
        return Literal(segment.offset + offset, segment.data)
    return ChecksumSlot(segment.offset + offset, segment.covers_offset + offset, segment.covers_length)


@dataclass(frozen=True, slots=True)
class PlacedSlot:
    """A slot, and where in the plan it stands."""

    file: int
    """Position of the file in the plan."""
    number: int
    """Of the slot in the file."""
    slot: Slot


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One output tensor: where its values come from, as what they are written, and where."""

    name: str
    source: TensorEntry
    dtype: DType
    slots: tuple[PlacedSlot, ...]
    """Each element of the tensor is in one of them, or in several: a copy per rank, which ranks may cut at different places."""

    @property
    def is_cast(self) -> bool:
        """Whether its values change: the only case in which a conversion computes anything."""
        return self.dtype != self.source.spec.dtype


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A source file that a plan draws on, as it was when the plan was made."""

    path: str
    length_bytes: int
    modified_s: float | None = None


@dataclass(frozen=True)
class Plan:
    """What is to be written, and from what. Equal inputs give equal plans."""

    source: str
    """Location of the source."""
    files: tuple[PlannedFile, ...]
    tensors: Mapping[str, PlannedTensor]
    """By output name."""
    source_files: tuple[SourceFile, ...]
    roots: tuple[str, ...] = ()
    """All locations of a source that is spread over several; `source` is the first."""

    @cached_property
    def bytes_written(self) -> int:
        """Bytes of all output files."""
        return sum(f.length_bytes for f in self.files)

    @cached_property
    def bytes_read(self) -> int:
        """Bytes of source values and carried stretches; each is read once."""
        carried = sum(s.length for f in self.files for s in f.copied if isinstance(s, Carry))
        return carried + sum(t.source.spec.length_bytes for t in self.tensors.values())

    @cached_property
    def space_bytes(self) -> int:
        """Bytes of free space that writing takes, files in whole blocks and the journal included."""
        blocks = sum(-(-f.length_bytes // _BLOCK_BYTES) for f in self.files)
        records = sum(len(t.slots) for t in self.tensors.values()) + len(self.files)
        return blocks * _BLOCK_BYTES + records * _RECORD_BYTES

    @cached_property
    def inodes(self) -> int:
        """Files and directories that writing makes, those of the partial directory included."""
        directories = {d for f in self.files for d in _parents(f.path)}
        return len(self.files) + len(directories) + 4

    @cached_property
    def fingerprint(self) -> str:
        """An identity of all that decides what is written: what a journal must have for its run to go on."""
        sha256 = hashlib.sha256()
        for line in _identity(self):
            sha256.update(line.encode("utf-8", "surrogatepass") + b"\n")
        return sha256.hexdigest()

    def describe(self) -> dict[str, object]:
        """What `--dry-run` shows, ready for JSON."""
        drawn = _draws(self)
        return {
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "space_bytes": self.space_bytes,
            "inodes": self.inodes,
            "casts": [
                {"tensor": t.name, "from": t.source.spec.dtype.name, "to": t.dtype.name}
                for t in self.tensors.values()
                if t.is_cast
            ],
            "files": [
                {
                    "path": file.path,
                    "bytes": file.length_bytes,
                    "tensors": len({s.tensor for s in file.copied if isinstance(s, Slot)}),
                    "is_commit_record": file.is_commit_record,
                    "sources": [{"file": path, "bytes": count} for path, count in sorted(sources.items())],
                }
                for file, sources in zip(self.files, drawn, strict=True)
            ],
        }


def make(
    checkpoint: Checkpoint,
    arrangement: Arrangement,
    *,
    tensor_of: Mapping[str, TensorEntry],
    casts: Mapping[str, DType] | None = None,
    companions: Sequence[FileEntry] = (),
    listing: Listing | None = None,
) -> Plan:
    """The plan that fills an arrangement's slots from the tensors of a checkpoint. Pure.

    Args:
        tensor_of: output name -> source tensor.
        casts: output name -> dtype to write; a tensor that already has it is not touched.
        companions: source files to carry along whole, under their own paths.
        listing: of the source; with it a resumed run notices that a source file was replaced.

    Raises:
        ConversionError: when two output files have one name, or a cast does not exist.
        ValueError: when the arrangement does not tile its files, or its slots do not cover their tensors; a bug of a layout.
    """
    files = [_plan_file(f) for f in arrangement.files]
    for companion in companions:
        carry = Carry(companion.path, 0, 0, companion.length_bytes)
        files.append(PlannedFile(companion.path, companion.length_bytes, (carry,)))
    _require_paths(files)
    tensors = _plan_tensors(files, tensor_of, casts or {})
    sources = _source_files(checkpoint, files, tensors, listing)
    return Plan(checkpoint.path, tuple(files), tensors, sources, checkpoint.roots)


def _plan_file(file: ArrangedFile) -> PlannedFile:
    copied: list[Copied] = sorted((*file.slots, *file.carries), key=lambda x: (x.offset, x.length))
    known: list[Known] = sorted((*file.literals, *file.checksums), key=lambda x: (x.offset, segment_length(x)))
    planned = PlannedFile(file.path, file.length_bytes, tuple(copied), tuple(known), file.is_commit_record)
    position = 0
    seen: set[tuple[int, int]] = set()
    for _, segment in planned.walk(stop=1 << 63):
        if segment.offset != position:
            what = "nothing fills" if segment.offset > position else "two segments share"
            raise ValueError(f"{what} byte {min(position, segment.offset)} of {file.path}")
        position += segment_length(segment)
        if isinstance(segment, Slot) and segment.frame is not None and (id(segment.frame), segment.length) not in seen:
            seen.add((id(segment.frame), segment.length))  # what holds of one such slot holds of all
            for x in segment.frame.after:
                _require_whole_segments(planned, _moved(x, segment.offset))
    if position != file.length_bytes:
        raise ValueError(f"{file.path} is said to have {file.length_bytes} bytes, its segments have {position}")
    for x in known:
        _require_whole_segments(planned, x)
    return planned


def _place(numbered: tuple[int, Segment]) -> tuple[int, int]:
    """Sorts segments by offset, those without bytes before the one that starts at the same byte."""
    return numbered[1].offset, segment_length(numbered[1])


def _require_whole_segments(file: PlannedFile, checksum: Known) -> None:
    """A checksum lies behind what it covers, and covers whole segments, whose CRCs can be put together."""
    if isinstance(checksum, Literal):
        return
    start, stop = checksum.covers_offset, checksum.covers_offset + checksum.covers_length
    covered = sum(segment_length(x) for _, x in file.walk(start, stop))
    if stop > checksum.offset or covered != stop - start:
        raise ValueError(f"a checksum of {file.path} covers parts of segments or itself: bytes {start} to {stop}")


def _require_paths(files: Sequence[PlannedFile]) -> None:
    """Every output file has a name of its own that stays inside the destination."""
    taken: set[str] = set()
    for file in files:
        parts = file.path.split("/")
        if "\0" in file.path or any(p in ("", ".", "..") for p in parts):
            raise ConversionError(f"an output file would leave the destination: {file.path}")
        if file.path in taken:
            raise ConversionError(f"two output files have the same name: {file.path}")
        taken.add(file.path)
    for file in files:
        for directory in _parents(file.path):
            if directory in taken:
                raise ConversionError(f"an output file has the name of a directory: {directory}")


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def _plan_tensors(
    files: Sequence[PlannedFile], tensor_of: Mapping[str, TensorEntry], casts: Mapping[str, DType]
) -> dict[str, PlannedTensor]:
    """Every tensor with its slots: their boxes cover it (an element may be there several times), each slot as long as its box."""
    places: dict[str, list[PlacedSlot]] = {name: [] for name in tensor_of}
    for i, file in enumerate(files):
        for j, segment in enumerate(file.copied):
            if isinstance(segment, Slot):
                if segment.tensor not in places:
                    raise ValueError(f"{file.path} has a slot for a tensor that was not selected: {segment.tensor}")
                places[segment.tensor].append(PlacedSlot(i, j, segment))
    tensors: dict[str, PlannedTensor] = {}
    for name, slots in places.items():
        source = tensor_of[name]
        dtype = casts.get(name, source.spec.dtype)
        if dtype != source.spec.dtype:
            require_castable(name, source.spec.dtype, dtype)
        tensors[name] = PlannedTensor(name, source, dtype, tuple(slots))
        _require_slots(tensors[name])
    return tensors


def _require_slots(tensor: PlannedTensor) -> None:
    slots = [placed.slot for placed in tensor.slots]
    for slot in slots:
        if slot.length != tensor.dtype.length_bytes(slot.box.volume):
            raise ValueError(f"a slot of {tensor.name} has {slot.length} bytes for {slot.box.volume} of {tensor.dtype}")
    boxes = list(dict.fromkeys(slot.box for slot in slots))
    found = cover(tensor.source.spec.shape, boxes) if boxes else None
    if found is None or found.out_of_bounds or found.missing:
        raise ValueError(f"the slots of {tensor.name} do not cover its shape {list(tensor.source.spec.shape)}")
    if len(boxes) > 1 and tensor.dtype.is_sub_byte:
        raise ConversionError(f"a {tensor.dtype} tensor cannot be cut: {tensor.name}")


def _source_files(
    checkpoint: Checkpoint, files: Sequence[PlannedFile], tensors: Mapping[str, PlannedTensor], listing: Listing | None
) -> tuple[SourceFile, ...]:
    """The source files that are drawn on; lengths and times of the listing where there is one."""
    paths = {e.file for t in tensors.values() for p in t.source.pieces for e in (p.extent, *p.mean_with)}
    paths |= {s.source_file for f in files for s in f.copied if isinstance(s, Carry)}
    lengths = {f.path: f.length_bytes for f in checkpoint.files}
    found = []
    for path in sorted(paths):
        listed = listing.find(path) if listing is not None else None
        if listed is not None:
            found.append(SourceFile(path, listed.length_bytes, listed.modified_s))
        else:
            found.append(SourceFile(path, lengths.get(path, -1)))
    return tuple(found)


def _identity(plan: Plan) -> Iterator[str]:
    """Lines that say all that decides what is written."""
    yield repr(plan.source)
    yield from map(repr, plan.roots)
    for source in plan.source_files:
        yield repr((source.path, source.length_bytes, source.modified_s))
    for tensor in plan.tensors.values():
        spec = tensor.source.spec
        yield repr((tensor.name, spec.name, spec.dtype.name, spec.shape, tensor.source.factors, tensor.dtype.name))
        for piece in tensor.source.pieces:
            extents = "".join(map(_extent_identity, (piece.extent, *piece.mean_with)))
            yield f"{piece.box.offsets}{piece.box.sizes}{extents}"
    frames: dict[int, str] = {}
    for file in plan.files:
        yield repr((file.path, file.length_bytes, file.is_commit_record))
        for segment in file.copied:
            if isinstance(segment, Slot):
                frame = _frame_identity(segment.frame, frames) if segment.frame is not None else ""
                yield f"{segment.offset} {segment.length} {segment.box.offsets}{segment.box.sizes}{segment.tensor!r}{frame}"
            else:
                yield repr(segment)
        yield from map(_known_identity, file.known)


def _frame_identity(frame: Frame, known: dict[int, str]) -> str:
    """By what it is at: frames are few, and slots many."""
    if id(frame) not in known:
        lines = map(_known_identity, (*frame.before, *frame.after))
        known[id(frame)] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return known[id(frame)]


def _known_identity(segment: Known) -> str:
    if isinstance(segment, Literal):
        return f"{segment.offset} {hashlib.sha256(segment.data).hexdigest()}"
    return repr(segment)


def _extent_identity(extent: Extent) -> str:
    """Short for the usual extent: half a million of them are no rarity."""
    plain = Extent(extent.file, extent.offset, extent.length)
    return f"{extent.offset} {extent.length} {extent.file!r}" if extent == plain else repr(extent)


def _draws(plan: Plan) -> list[dict[str, int]]:
    """Per output file: source file -> bytes of it that go there."""
    drawn: list[dict[str, int]] = [{} for _ in plan.files]
    for i, file in enumerate(plan.files):
        for segment in file.copied:
            if isinstance(segment, Carry):
                drawn[i][segment.source_file] = drawn[i].get(segment.source_file, 0) + segment.length
    for tensor in plan.tensors.values():
        pieces = tensor.source.pieces
        index = BoxIndex([p.box for p in pieces])
        for placed in tensor.slots:
            sources = drawn[placed.file]
            counted = (box for _, box in factored(placed.slot.box, tensor.source.factors))
            for k, shared in (hit for box in counted for hit in index.overlapping(box)):
                file_name = pieces[k].extent.file
                sources[file_name] = sources.get(file_name, 0) + tensor.source.spec.dtype.length_bytes(shared.volume)
    return drawn
