"""Arranges a file that `torch.load` reads (with `weights_only=True` too): the zip archive of torch.save, to the byte.

Everything but the tensors' values is known beforehand; the CRC-32 of a storage is known when its bytes have passed, so its
places (data descriptor, central directory) are checksum slots. `.data/serialization_id` is left out: it is a hash of CRCs
that no loader needs, and without it equal values give equal files.

Source: pytorch/pytorch, caffe2/serialize/inline_container.cc and torch/serialization.py, v2.13.0.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttools.containers.local_boxes import NOTE_NAME
from ckpttools.dtypes import DType
from ckpttools.errors import ConversionError
from ckpttools.geometry import row_major_strides
from ckpttools.model import ArrangedFile, ChecksumSlot, Frame, Literal, Path, PathKey, Slot, TensorSpec, render_path
from ckpttools.pickles.records import Global, Object, Persistent
from ckpttools.pickles.writer import write_pickle
from ckpttools.placement.held import HeldTensor, TurnedTensors

_ALIGNMENT = 64
_LIMIT32 = 0xFFFFFFFF
_FLAGS = 0x0808
_ROOT = "archive"
_MAX_JOINED_BYTES = 1024


def tensor_record(spec: TensorSpec, key: str) -> Object:
    """The rebuild call of a dense row-major tensor in storage `key`, as torch.save pickles it.

    Raises: ConversionError: for a dtype that torch has no dense tensor of.
    """
    dtype = spec.dtype
    if dtype.kind == "quantized" or dtype.is_sub_byte:
        raise ConversionError(f"torch has no plain tensor of {dtype}: {spec.name}", hints=[f"--exclude '{spec.name}'"])
    strides = row_major_strides(spec.shape)
    hooks = Object(Global("collections", "OrderedDict"), ())
    numel = spec.volume if dtype.storage_class else spec.length_bytes
    storage = Global("torch", dtype.storage_class) if dtype.storage_class else Global("torch.storage", "UntypedStorage")
    pid = Persistent(("storage", storage, key, "cpu", numel))
    if dtype.storage_class:
        return Object(Global("torch._utils", "_rebuild_tensor_v2"), (pid, 0, spec.shape, strides, False, hooks))
    named = Global("torch", dtype.name)
    return Object(Global("torch._utils", "_rebuild_tensor_v3"), (pid, 0, spec.shape, strides, False, hooks, named))


@dataclass(frozen=True)
class FlatStorage:
    """Shares of several tensors in one flat tensor, with zeros between them."""

    spec: TensorSpec
    """Of the flat tensor: one dimension."""
    parts: tuple[tuple[int, HeldTensor | TurnedTensors], ...]
    """(first element, share) in order; apart from each other."""

    def fill(self, offset: int) -> tuple[list[Slot], list[Literal]]:
        """The slots of the shares and the zeros between them, from byte `offset` of a file on."""
        slots: list[Slot] = []
        gaps: list[Literal] = []
        at = 0
        for start, share in (*self.parts, (self.spec.volume, None)):
            place = self.spec.dtype.length_bytes(start)
            if place > at:
                gaps.append(Literal(offset + at, bytes(place - at)))
            if share is not None:
                slots += share.slots(offset + place)
                at = place + share.spec.length_bytes
        return slots, gaps


Storage = TensorSpec | HeldTensor | TurnedTensors | FlatStorage | bytes
"""What fills a storage: a whole tensor, a rank's share of one, shares of several, or bytes that are known."""


def arrange_archive(path: str, value: object, storages: Mapping[str, Storage], *, note: bytes = b"") -> ArrangedFile:
    """The archive of a value whose tensors are `tensor_record`s with the keys of `storages`. Pure.

    Args: note: of `local_boxes`, for a member that torch does not look at; none when empty.
    """
    archive = _Archive()
    archive.add_bytes("data.pkl", write_pickle(value, protocol=2))
    if note:
        archive.add_bytes(NOTE_NAME, note)
    archive.add_bytes(".format_version", b"1")
    archive.add_bytes(".storage_alignment", str(_ALIGNMENT).encode())
    archive.add_bytes("byteorder", b"little")
    for key, storage in storages.items():
        if isinstance(storage, bytes):
            archive.add_bytes(f"data/{key}", storage)
        elif isinstance(storage, (HeldTensor, TurnedTensors)):
            archive.add_slots(f"data/{key}", storage.spec.length_bytes, storage.slots)
        elif isinstance(storage, FlatStorage):
            archive.add_filled(f"data/{key}", storage)
        else:
            archive.add_slots(f"data/{key}", storage.length_bytes, _whole(storage))
    archive.add_bytes("version", b"3\n")
    return archive.finish(path)


def object_archive(value: object) -> bytes:
    """The archive of a value without tensors. Pure."""
    return b"".join(literal.data for literal in arrange_archive("", value, {}).literals)


@dataclass(frozen=True, slots=True)
class TensorItem:
    """The archive of one tensor of a dtype and shape, wherever it is put and whatever its values are."""

    length_bytes: int
    data_offset: int
    data_length: int
    frame: Frame

    @classmethod
    def of(cls, dtype: DType, shape: tuple[int, ...]) -> TensorItem:
        """Arrange it. Raises ConversionError for a dtype that torch has no dense tensor of."""
        spec = TensorSpec("", dtype, shape)
        file = arrange_archive("", tensor_record(spec, "0"), {"0": spec})
        (slot,) = file.slots
        literals = [Literal(x.offset - slot.offset, x.data) for x in _merged(file.literals, slot.offset)]
        checksums = [ChecksumSlot(x.offset - slot.offset, x.covers_offset - slot.offset, x.covers_length) for x in file.checksums]
        before = tuple(x for x in literals if x.offset < 0)
        after: list[Literal | ChecksumSlot] = [*(x for x in literals if x.offset >= 0), *checksums]
        after.sort(key=lambda x: x.offset)
        return cls(file.length_bytes, slot.offset, slot.length, Frame(before, tuple(after)))


def _merged(literals: Sequence[Literal], place: int) -> tuple[Literal, ...]:
    """Neighbours that touch put together, but not across the place of a slot, which may be empty."""
    groups: list[list[Literal]] = []
    for literal in literals:
        last = groups[-1][-1] if groups else None
        if last is not None and last.offset + len(last.data) == literal.offset != place:
            groups[-1].append(literal)
        else:
            groups.append([literal])
    return tuple(Literal(group[0].offset, b"".join(x.data for x in group)) for group in groups)


def _whole(spec: TensorSpec) -> Callable[[int], list[Slot]]:
    return lambda offset: [Slot(spec.name, spec.box, offset, spec.length_bytes)]


@dataclass(slots=True)
class _Archive:
    """An archive as it grows."""

    position: int = 0
    slots: list[Slot] = field(default_factory=list)
    literals: list[Literal] = field(default_factory=list)
    checksums: list[ChecksumSlot] = field(default_factory=list)
    directory: list[tuple[str, int, int, int, int | None]] = field(default_factory=list)
    """(name, header offset, data offset, data length, CRC-32 where it is known)."""
    empty_slot: int = -1
    """Where the last slot without bytes is: no literal may reach across it."""

    def add_bytes(self, name: str, data: bytes) -> None:
        """A member whose bytes are known."""
        header, start = self._header(name, len(data))
        crc = zlib.crc32(data)
        self._literal(header)
        self._literal(data)
        self.directory.append((name, start, self.position - len(data), len(data), crc))
        if data:
            self._literal(b"PK\x07\x08" + struct.pack("<III", crc, len(data), len(data)))

    def add_filled(self, name: str, storage: FlatStorage) -> None:
        """A member that slots fill, and zeros between them."""

        def slots(offset: int) -> list[Slot]:
            found, gaps = storage.fill(offset)
            self.literals += gaps
            return found

        self.add_slots(name, storage.spec.length_bytes, slots)

    def add_slots(self, name: str, length: int, slots: Callable[[int], list[Slot]]) -> None:
        """A member of `length` bytes that slots fill from the offset on that they are asked for."""
        header, start = self._header(name, length)
        self._literal(header)
        data = self.position
        self.slots += slots(data)
        self.position += length
        self.empty_slot = self.position  # what a checksum covers, zeros at the end included, is not joined to what follows
        self.directory.append((name, start, data, length, None if length else 0))
        if length:
            self._literal(b"PK\x07\x08")
            self._checksum(data, length)
            self._literal(struct.pack("<QQ" if length >= _LIMIT32 else "<II", length, length))

    def _header(self, name: str, length: int) -> tuple[bytes, int]:
        """A local header whose data starts at a multiple of 64 bytes, and where it starts."""
        start, encoded = self.position, f"{_ROOT}/{name}".encode()
        wide = b""
        if length >= _LIMIT32 or start >= _LIMIT32:
            numbers = ([length, length] if length >= _LIMIT32 else []) + ([start] if start >= _LIMIT32 else [])
            wide = struct.pack("<HH", 1, 8 * len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers)
        unpadded = start + 30 + len(encoded) + len(wide) + 4
        padding = -unpadded % _ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        fixed = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(encoded), len(extra))
        return fixed + encoded + extra, start

    def _literal(self, data: bytes) -> None:
        """Small neighbours become one: there are five between two tensors, and files of thousands of ranks."""
        if not data:
            return
        last = self.literals[-1] if self.literals else None
        touches = last is not None and last.offset + len(last.data) == self.position != self.empty_slot
        if last is not None and touches and len(last.data) + len(data) <= _MAX_JOINED_BYTES:
            self.literals[-1] = Literal(last.offset, last.data + data)
        else:
            self.literals.append(Literal(self.position, data))
        self.position += len(data)

    def _checksum(self, offset: int, length: int) -> None:
        self.checksums.append(ChecksumSlot(self.position, offset, length))
        self.position += 4

    def finish(self, path: str) -> ArrangedFile:
        """The central directory and its end records."""
        start = self.position
        for name, header, data, length, crc in self.directory:
            self._directory_entry(name, header, data, length, crc)
        length, count = self.position - start, len(self.directory)
        end64 = self.position
        self._literal(struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, length, start))
        self._literal(struct.pack("<4sIQI", b"PK\x06\x07", 0, end64, 1))
        stated = [min(count, 0xFFFF), min(count, 0xFFFF), min(length, _LIMIT32), min(start, _LIMIT32)]
        self._literal(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, *stated, 0))
        return ArrangedFile(path, self.position, tuple(self.slots), tuple(self.literals), tuple(self.checksums))

    def _directory_entry(self, name: str, header: int, data: int, length: int, crc: int | None) -> None:
        encoded = f"{_ROOT}/{name}".encode()
        numbers = ([length, length] if length >= _LIMIT32 else []) + ([header] if header >= _LIMIT32 else [])
        extra = struct.pack("<HH", 1, 8 * len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers) if numbers else b""
        short, place = min(length, _LIMIT32), min(header, _LIMIT32)
        self._literal(struct.pack("<4sHHHHHH", b"PK\x01\x02", 0, 0, _FLAGS, 0, 0, 0))
        if crc is None:
            self._checksum(data, length)
        else:
            self._literal(struct.pack("<I", crc))
        rest = struct.pack("<IIHHHHHII", short, short, len(encoded), len(extra), 0, 0, 0, 0, place)
        self._literal(rest + encoded + extra)


def nest(
    entries: Sequence[tuple[Path, object]],
    sequences: Mapping[Path, str],
    mappings: Mapping[Path, Object] | None = None,
    at: Path = (),
) -> object:
    """A nested value from typed paths. Pure.

    Args:
        sequences: path of each branch that is a `list` or `tuple`; all others are dicts. One whose items are not all
            there becomes a dict, so that no item changes its number.
        mappings: path of each branch that is a mapping of another class: an object without what it maps.

    Raises: ConversionError: when one entry lies below another that is not a branch.
    """
    if len(entries) == 1 and not entries[0][0]:
        return entries[0][1]
    groups: dict[PathKey, list[tuple[Path, object]]] = {}
    for path, value in entries:
        if not path:
            raise ConversionError(f"`{render_path(at)}` is an entry, and others lie below it")
        groups.setdefault(path[0], []).append((path[1:], value))
    built = {key: nest(below, sequences, mappings, (*at, key)) for key, below in groups.items()}
    kind = sequences.get(at)
    if kind and sorted(map(repr, built)) == sorted(map(repr, range(len(built)))):
        items = [built[i] for i in range(len(built))]
        return tuple(items) if kind == "tuple" else items
    empty = (mappings or {}).get(at)
    return built if empty is None else replace(empty, pairs=list(built.items()))
