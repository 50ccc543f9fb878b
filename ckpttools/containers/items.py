"""Opens the items that a manifest points to: whole torch files inside `.distcp` files, one per stored box.

A manifest says where an item lies; only the item's own directory says where in it the values are. Opening every item
is not needed to say what a checkpoint is, so it is done when values, exact places or the structure are asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ckpttools.containers.checksum_table import ChecksumTable
from ckpttools.containers.region import Region
from ckpttools.containers.torch_entries import RankFile, read_object
from ckpttools.containers.torch_extents import Expansion, locate_tensor
from ckpttools.containers.torch_file import TorchFile, read_torch_file
from ckpttools.containers.torch_values import MalformedError, read_tensor
from ckpttools.containers.trees import persistent_ids
from ckpttools.errors import StorageError
from ckpttools.findings import Finding
from ckpttools.model import Checkpoint, Extent, ItemPart, ObjectEntry, Piece, TensorEntry
from ckpttools.pickles.views import kind_of
from ckpttools.storage.source import Source, is_url

_URL_THREADS = 16
"""Opening an item is one or two round trips; on a local disk threads gain nothing, since parsing holds the lock."""


@dataclass(slots=True)
class _Opened:
    """What opening the items of one file brought to light."""

    extents: dict[Extent, Extent] = field(default_factory=dict)
    records: dict[Extent, RankFile] = field(default_factory=dict)
    checksums: ChecksumTable = field(default_factory=ChecksumTable)
    findings: list[Finding] = field(default_factory=list)
    failed: dict[Extent, list[Finding]] = field(default_factory=dict)
    """What is wrong with items that did not open, or not as they should."""

    def add(self, other: _Opened) -> None:
        """Take over what the items of another file brought to light."""
        self.extents |= other.extents
        self.records |= other.records
        self.checksums.extend(other.checksums)
        self.findings += other.findings
        self.failed |= other.failed

    expansion: Expansion = field(default_factory=Expansion)

    def set_apart(self, extent: Extent, start: int) -> None:
        """Keep the findings from `start` on by themselves, when they say that something is wrong with their item."""
        if any(f.is_error for f in self.findings[start:]):
            self.failed[extent] = self.findings[start:]
            del self.findings[start:]


def locate(source: Source, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with every item opened: exact extents, records of objects, stored checksums, further findings.

    Pieces whose item does not open are dropped, so that what is left can be read; a finding says so.
    """
    wanted: dict[str, list[tuple[Extent, str, TensorEntry | None, Piece | None]]] = defaultdict(list)
    for entry in checkpoint.tensors:
        for piece in (*entry.pieces, *entry.replicas):
            if piece.extent.container:
                wanted[piece.extent.file].append((piece.extent, entry.name, entry, piece))
    for obj in checkpoint.objects:
        if obj.extent is not None and obj.extent.container:
            wanted[obj.extent.file].append((obj.extent, obj.name, None, None))
    if not wanted:
        return checkpoint
    with ThreadPoolExecutor(_URL_THREADS if is_url(source.location) else 1) as pool:
        parts = list(pool.map(lambda file: _open_items(source, wanted[file]), sorted(wanted)))
    opened = _Opened(checksums=ChecksumTable(checkpoint.checksums))
    for part in parts:
        opened.add(part)
    objects = tuple(_with_good_copy(source, o, opened) for o in checkpoint.objects)
    located = replace(
        checkpoint,
        tensors=tuple(_with_extents(t, opened.extents) for t in checkpoint.tensors),
        objects=objects,
        checksums=opened.checksums,
        findings=(*checkpoint.findings, *opened.findings, *_failures(checkpoint.tensors, opened)),
    )
    return _with_records(located, opened.records)


def _with_good_copy(source: Source, entry: ObjectEntry, opened: _Opened) -> ObjectEntry:
    """The object at the first of its copies with which nothing is wrong, when something is wrong with itself."""
    findings = opened.failed.get(entry.extent, []) if entry.extent is not None else []
    for copy in entry.copies if findings else ():
        part = _open_items(source, [(copy, entry.name, None, None)])
        opened.add(part)
        if copy in part.records and copy not in part.failed:
            opened.findings += [_as_difference(f, copy.file) for f in findings]
            del opened.failed[entry.extent]  # type: ignore[arg-type]  # there are findings, so there is an extent
            return replace(entry, extent=copy)
    return entry


def _open_items(source: Source, items: Sequence[tuple[Extent, str, TensorEntry | None, Piece | None]]) -> _Opened:
    """Open the items of one file, in the order of their bytes."""
    opened = _Opened()
    place: object = None
    for extent, name, entry, piece in sorted(items, key=lambda item: item[0].offset):
        if extent in opened.extents or extent in opened.records or extent in opened.failed:
            continue
        before = len(opened.findings)
        if place != (extent.offset, extent.length, extent.encoding):  # parts of one item follow each other
            try:
                region = _region(source, extent)
                file = read_torch_file(region)
            except StorageError as e:
                where = f"{name} in {e.where or extent.file}"
                opened.findings.append(Finding(e.finding_code, where, e.expected or "readable bytes", e.found or e.message))
                opened.set_apart(extent, before)
                place = None
                continue
            place = (extent.offset, extent.length, extent.encoding)
            opened.findings += [replace(f, where=f"{name}: {f.where}") for f in file.findings]
            opened.checksums.add(name, file.checksums)
            opened.expansion.add_file(file)
        if entry is None or piece is None:
            if file.value is not None or not any(f.is_error for f in file.findings):
                opened.records[extent] = RankFile(extent.file, 0, region, file)
        else:
            _open_tensor(opened, region, file, extent, entry, piece)
        opened.set_apart(extent, before)
    return opened


def open_item(source: Source, extent: Extent) -> TorchFile:
    """The torch file that a lazy extent is. Raises StorageError."""
    return read_torch_file(_region(source, extent))


def _failures(tensors: Sequence[TensorEntry], opened: _Opened) -> Iterator[Finding]:
    """What is wrong with items; where nothing is wrong with another copy of the box, it is the copies that differ."""
    failed = dict(opened.failed)
    for entry in tensors if failed else ():
        copies = (*entry.pieces, *entry.replicas)
        for piece in copies:
            sound = (p for p in copies if p.box == piece.box and p.extent not in opened.failed)
            good = next((p for p in sound if not p.extent.container or p.extent in opened.extents), None)
            for finding in failed.pop(piece.extent, ()):
                yield finding if good is None else _as_difference(finding, good.extent.file)
    for findings in failed.values():
        yield from findings


def _as_difference(finding: Finding, good: str) -> Finding:
    """What is wrong with one copy, told as what it is where another is good."""
    if not finding.is_error:
        return finding
    return Finding("replica-mismatch", finding.where, f"{finding.expected}, as in {good}", f"{finding.code}: {finding.found}")


def _region(source: Source, extent: Extent) -> Region:
    if extent.encoding is None:
        return Region(source, extent.file, extent.offset, extent.length)
    return Region.decoded(source, extent.file, extent.encoding)


def _open_tensor(opened: _Opened, region: Region, file: TorchFile, extent: Extent, entry: TensorEntry, piece: Piece) -> None:
    """The exact extent of the tensor in an item, if it is what the manifest says."""
    where = f"{entry.name} in {region.where()}"
    if file.value is None:
        return
    try:
        tensor = read_tensor(file.value)
    except MalformedError as e:
        opened.findings.append(Finding("piece-mismatch", where, "a tensor", str(e)))
        return
    shape = piece.box.sizes if extent.part is None else extent.part.shape
    if (tensor.dtype, tensor.shape) != (entry.spec.dtype, shape):
        expected = f"{entry.spec.dtype} {list(shape)}"
        opened.findings.append(Finding("piece-mismatch", where, expected, f"{tensor.dtype} {list(tensor.shape)}"))
        return
    exact = locate_tensor(file, extent.file, tensor, where, opened.expansion)
    if not isinstance(exact, Finding) and extent.part is not None:
        exact = _narrowed(exact, extent.part, entry.spec.dtype.length_bytes(1), piece.box.volume, where)
    if isinstance(exact, Finding):
        opened.findings.append(exact)
    else:
        opened.extents[extent] = replace(exact, transforms=(*exact.transforms, *extent.transforms))


def _narrowed(whole: Extent, part: ItemPart, item_bytes: int, volume: int, where: str) -> Extent | Finding:
    """The part of an item that a piece is."""
    if whole.strides is not None:
        return Finding("piece-mismatch", where, "a dense tensor", f"strides {list(whole.strides)}")
    return replace(whole, offset=whole.offset + part.first * item_bytes, length=volume * item_bytes)


def _with_extents(entry: TensorEntry, extents: dict[Extent, Extent]) -> TensorEntry:
    def exact(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return tuple(
            replace(p, extent=extents[p.extent]) if p.extent.container else p
            for p in pieces
            if not p.extent.container or p.extent in extents
        )

    pieces, replicas = exact(entry.pieces), list(exact(entry.replicas))
    if len(pieces) < len(entry.pieces):  # a copy takes the place of a piece that does not open
        lost = {p.box for p in entry.pieces} - {p.box for p in pieces}
        for box in lost:
            copy = next((r for r in replicas if r.box == box), None)
            if copy is not None:
                pieces = (*pieces, copy)
                replicas.remove(copy)
    return replace(entry, pieces=pieces, replicas=tuple(replicas))


def _with_records(checkpoint: Checkpoint, records: dict[Extent, RankFile]) -> Checkpoint:
    """The checkpoint with the values of its objects; an object that holds tensors gives way to what is in it."""
    tensors, objects, trees = list(checkpoint.tensors), [], dict(checkpoint.trees)
    findings = list(checkpoint.findings)
    for obj in checkpoint.objects:
        file = records.get(obj.extent) if obj.extent is not None else None
        if file is None:
            objects.append(obj)
        elif next(persistent_ids(file.torch.value), None) is None:
            objects.append(replace(obj, record=file.torch.value, kind=kind_of(file.torch.value)))
        else:
            inner = read_object(file, obj.path)
            tensors += [replace(t, family=obj.family) for t in inner.tensors]
            objects += [replace(o, family=obj.family) for o in inner.objects]
            trees |= inner.trees
            findings += inner.findings
    return replace(
        checkpoint, tensors=tuple(tensors), objects=tuple(objects), trees=trees, findings=tuple(dict.fromkeys(findings))
    )
