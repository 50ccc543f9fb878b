"""Opens the items that a manifest points to: whole torch files inside `.distcp` files, one per stored box.

A manifest says where an item lies; only the item's own directory says where in it the values are. Opening every item
is not needed to say what a checkpoint is, so it is done when values, exact places or the structure are asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ckpttools.containers.region import Region
from ckpttools.containers.torch_entries import RankFile, read_object
from ckpttools.containers.torch_extents import Expansion, locate_tensor
from ckpttools.containers.torch_file import TorchFile, read_torch_file
from ckpttools.containers.torch_values import MalformedError, read_tensor
from ckpttools.containers.trees import persistent_ids
from ckpttools.errors import StorageError
from ckpttools.findings import Finding
from ckpttools.model import Checkpoint, Extent, ItemPart, Piece, StoredChecksum, TensorEntry
from ckpttools.pickles.views import kind_of
from ckpttools.storage.source import Source, is_url

_URL_THREADS = 16
"""Opening an item is one or two round trips; on a local disk threads gain nothing, since parsing holds the lock."""


@dataclass(slots=True)
class _Opened:
    """What opening the items of one file brought to light."""

    extents: dict[Extent, Extent] = field(default_factory=dict)
    records: dict[Extent, RankFile] = field(default_factory=dict)
    checksums: list[StoredChecksum] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    expansion: Expansion = field(default_factory=Expansion)


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
    extents = {k: v for part in parts for k, v in part.extents.items()}
    records = {k: v for part in parts for k, v in part.records.items()}
    located = replace(
        checkpoint,
        tensors=tuple(_with_extents(t, extents) for t in checkpoint.tensors),
        checksums=(*checkpoint.checksums, *(c for part in parts for c in part.checksums)),
        findings=(*checkpoint.findings, *(f for part in parts for f in part.findings)),
    )
    return _with_records(located, records)


def _open_items(source: Source, items: Sequence[tuple[Extent, str, TensorEntry | None, Piece | None]]) -> _Opened:
    """Open the items of one file, in the order of their bytes."""
    opened = _Opened()
    place: object = None
    for extent, name, entry, piece in sorted(items, key=lambda item: item[0].offset):
        if extent in opened.extents or extent in opened.records:
            continue
        if place != (extent.offset, extent.length, extent.encoding):  # parts of one item follow each other
            try:
                region = _region(source, extent)
                file = read_torch_file(region)
            except StorageError as e:
                where = f"{name} in {e.where or extent.file}"
                opened.findings.append(Finding(e.finding_code, where, e.expected or "readable bytes", e.found or e.message))
                place = None
                continue
            place = (extent.offset, extent.length, extent.encoding)
            opened.findings += [replace(f, where=f"{name}: {f.where}") for f in file.findings]
            for c in file.checksums:  # a constructor: `replace` takes three times as long, and there are millions
                labelled = StoredChecksum(c.file, c.offset, c.length, c.expected, f"{name}: {c.label}", c.encoding)
                opened.checksums.append(labelled)
            opened.expansion.add_file(file)
        if entry is None or piece is None:
            opened.records[extent] = RankFile(extent.file, 0, region, file)
        else:
            _open_tensor(opened, region, file, extent, entry, piece)
    return opened


def open_item(source: Source, extent: Extent) -> TorchFile:
    """The torch file that a lazy extent is. Raises StorageError."""
    return read_torch_file(_region(source, extent))


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

    return replace(entry, pieces=exact(entry.pieces), replicas=exact(entry.replicas))


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
