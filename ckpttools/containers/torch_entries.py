"""Turns opened torch files into entries: one file, or one file per rank whose boxes are put together.

Over ranks, boxes of DTensors and ShardedTensors are pieces, and a box that several ranks hold is a piece and its
replicas. A plain tensor that every rank holds is replicated: it is never concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckpttools.containers.local_boxes import LocalBox
from ckpttools.containers.region import Region
from ckpttools.containers.sharded_values import ShardedReader, ShardedValue
from ckpttools.containers.torch_extents import Expansion, locate_tensor
from ckpttools.containers.torch_file import KnownPickles, TorchFile, read_torch_file
from ckpttools.containers.torch_values import (
    CompositeValue,
    MalformedError,
    MetaValue,
    TensorValue,
    WrapperValue,
    read_value,
)
from ckpttools.containers.trees import TreeLimitError, children, is_tensor_record, leaves
from ckpttools.dtypes import DType
from ckpttools.findings import Finding
from ckpttools.model import (
    Box,
    Extent,
    Mesh,
    ObjectEntry,
    Path,
    Piece,
    StoredChecksum,
    TensorEntry,
    TensorSpec,
    render_path,
)
from ckpttools.pickles.records import Global, Object
from ckpttools.pickles.views import kind_of
from ckpttools.storage.source import Source

_MAX_MESH_RANKS = 1 << 22


@dataclass(frozen=True, slots=True)
class RankFile:
    """An opened torch file and the rank that wrote it."""

    path: str
    rank: int
    region: Region
    torch: TorchFile


@dataclass(slots=True)
class Entries:
    """What a set of rank files holds together."""

    tensors: list[TensorEntry] = field(default_factory=list)
    objects: list[ObjectEntry] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    checksums: list[StoredChecksum] = field(default_factory=list)
    trees: dict[Path, object] = field(default_factory=dict)
    mesh: Mesh = field(default_factory=Mesh)
    ranks: int = 1
    """How many ranks the sharded tensors are spread over, as the files state it."""


@dataclass(slots=True)
class _Gathered:
    """What the ranks said of one path so far."""

    path: Path
    dtype: DType
    shape: tuple[int, ...]
    where: str
    pieces: dict[Box, Piece] = field(default_factory=dict)
    replicas: list[Piece] = field(default_factory=list)
    part_of: str = ""


def open_rank_file(source: Source, path: str, length_bytes: int, rank: int = 0, known: KnownPickles | None = None) -> RankFile:
    """Open one torch file. Raises StorageError.

    Args: known: shared by the files of one snapshot.
    """
    region = Region(source, path, 0, length_bytes)
    file = RankFile(path, rank, region, read_torch_file(region, known))
    region.forget()  # half a megabyte a file, and there are thousands
    return file


def read_entries(files: Sequence[RankFile], *, is_rank_local: bool = False) -> Entries:
    """The entries of one file, or of one per rank.

    Files in which nothing is sharded say nothing about what the ranks share, unless a note of ours does: then each rank's
    state is its own, as it is for the optimizer of FSDP1's local state dicts.

    Args: is_rank_local: each rank's state is its own (random states, data loaders); its entries are named by rank.
    """
    reader = _Reader(len(files) > 1 and (is_rank_local or not any(f.torch.note or _is_sharded(f.torch.value) for f in files)))
    for file in files:
        reader.entries.findings += file.torch.findings
        reader.entries.checksums += file.torch.checksums
        if file.torch.value is not None:
            reader.take(file)
    return reader.result()


def read_object(file: RankFile, path: Path) -> Entries:
    """The entries of an object that holds tensors, stored in a torch file of its own, under the path that leads to it."""
    reader = _Reader(is_rank_local=False)
    reader.take(file, path)
    return reader.result()


class _Reader:
    """Collects what each rank says of each path."""

    def __init__(self, is_rank_local: bool) -> None:
        self.entries = Entries()
        self._is_rank_local = is_rank_local
        self._expansion = Expansion()
        self._tensors: dict[tuple[object, ...], _Gathered] = {}
        self._objects: dict[tuple[object, ...], ObjectEntry] = {}

    def take(self, file: RankFile, prefix: Path = ()) -> None:
        """Add the leaves of one file."""
        if self._is_rank_local:
            prefix = (*prefix, f"rank_{file.rank}")
        self.entries.trees.setdefault(prefix, file.torch.value)
        if file.torch.note is not None:
            self.entries.ranks = max(self.entries.ranks, file.torch.note.mesh.ranks)
            self.entries.mesh = self.entries.mesh if self.entries.mesh.axes else file.torch.note.mesh
        sharded = ShardedReader(file.rank, lambda t: _read_ints(file, t))
        try:
            for leaf in leaves(file.torch.value):
                self._take_leaf(file, sharded, (*prefix, *leaf.path), leaf.record)
        except TreeLimitError as e:
            self.entries.findings.append(Finding("pickle-limit", file.path, "a tree of entries", str(e)))

    def result(self) -> Entries:
        """Everything taken, in the order of first appearance."""
        for gathered in self._tensors.values():
            spec = TensorSpec(render_path(gathered.path), gathered.dtype, gathered.shape)
            pieces = tuple(gathered.pieces.values())
            entry = TensorEntry(spec, gathered.path, pieces, tuple(gathered.replicas), part_of=gathered.part_of)
            self.entries.tensors.append(entry)
        self.entries.objects = list(self._objects.values())
        return self.entries

    def _take_leaf(self, file: RankFile, reader: ShardedReader, path: Path, record: object) -> None:
        where = f"{render_path(path)} in {file.region.where()}"
        try:
            value = read_value(record)
            whole: WrapperValue | Object | None = value if isinstance(value, WrapperValue) else None
            if isinstance(record, Object) and value is None:
                whole = record
            sharded = reader.read(whole) if whole is not None else None
        except MalformedError as e:
            self.entries.findings.append(Finding("bad-pickle", where, "a tensor as torch pickles it", str(e)))
            return
        if sharded is not None:
            self._take_sharded(file, path, sharded, where)
        elif isinstance(value, TensorValue):
            self._take_dense(file, path, value, where)
        elif value is not None:
            self._take_special(file, path, value, where)
        else:
            self._take_object(path, ObjectEntry(render_path(path), path, kind_of(record), record))

    def _take_dense(self, file: RankFile, path: Path, value: TensorValue, where: str, part_of: str = "") -> None:
        extent = locate_tensor(file.torch, file.path, value, where, self._expansion)
        if isinstance(extent, Finding):
            self.entries.findings.append(extent)
            return
        noted = file.torch.note.tensors.get(render_path(path)) if file.torch.note is not None else None
        if noted is not None:
            self._take_noted(file, path, value, noted, where)
            return
        box = Box((0,) * len(value.shape), value.shape)
        self._add(file, path, value.dtype, value.shape, [(box, extent)], where, part_of)

    def _take_noted(self, file: RankFile, path: Path, value: TensorValue, noted: LocalBox, where: str) -> None:
        """The parts that a rank's own tensor is made of, as a note says."""
        if value.shape != noted.local.shape:
            expected, found = f"a local shape of {list(noted.local.shape)}, as the note says", f"{list(value.shape)}"
            self.entries.findings.append(Finding("piece-mismatch", where, expected, found))
            return
        boxes: list[tuple[Box, Extent]] = []
        for part in noted.local.parts:
            place = sum(o * s for o, s in zip(part.local.offsets, value.strides, strict=True))
            view = replace(value, shape=part.local.sizes, storage_offset=value.storage_offset + place)
            extent = locate_tensor(file.torch, file.path, view, where, self._expansion)
            if not isinstance(extent, Finding):  # the whole was found inside its storage
                boxes.append((part.box, extent))
        self._add(file, path, value.dtype, noted.shape, boxes, where)

    def _take_sharded(self, file: RankFile, path: Path, value: ShardedValue, where: str) -> None:
        if value.is_partial:
            self.entries.findings.append(Finding("partial-placement", where, "sharded or replicated values", "partial sums"))
            return
        self.entries.ranks = max(self.entries.ranks, min(value.ranks, _MAX_MESH_RANKS))
        if len(value.mesh.axes) > len(self.entries.mesh.axes):
            self.entries.mesh = value.mesh
        boxes: list[tuple[Box, Extent]] = []
        dtype: DType | None = None
        for shard in value.shards:
            dtype = shard.tensor.dtype
            if shard.tensor.shape != shard.box.sizes:
                expected, found = f"a local shape of {list(shard.box.sizes)} on rank {file.rank}", f"{list(shard.tensor.shape)}"
                self.entries.findings.append(Finding("piece-mismatch", where, expected, found))
                continue
            extent = locate_tensor(file.torch, file.path, shard.tensor, where, self._expansion)
            if isinstance(extent, Finding):
                self.entries.findings.append(extent)
            else:
                boxes.append((shard.box, extent))
        if dtype is not None:
            self._add(file, path, dtype, value.shape, boxes, where)

    def _take_special(self, file: RankFile, path: Path, value: CompositeValue | MetaValue | WrapperValue, where: str) -> None:
        """List a tensor that is no dense array as an object, and the dense tensors in it under `name::part`."""
        if isinstance(value, MetaValue):
            kind = f"meta tensor {value.dtype} {list(value.shape)}"
            parts: Mapping[str, object] = {}
            self.entries.findings.append(Finding("no-data", where, "values", "a tensor on the meta device"))
        elif isinstance(value, WrapperValue):
            kind = f"{value.class_name} {value.dtype} {list(value.shape)}"
            parts = {n: v for n, v in value.state.items() if is_tensor_record(v)}
        else:
            kind, parts = value.kind, value.parts
        self._take_object(path, ObjectEntry(render_path(path), path, kind))
        for name, part in parts.items():
            inner: Path = (*path[:-1], f"{render_path(path[-1:])}::{name}")
            try:
                tensor = part if isinstance(part, TensorValue) else read_value(part)
            except MalformedError as e:
                self.entries.findings.append(Finding("bad-pickle", where, f"a tensor as its `{name}`", str(e)))
                continue
            if isinstance(tensor, TensorValue):
                self._take_dense(file, inner, tensor, where, kind)

    def _take_object(self, path: Path, entry: ObjectEntry) -> None:
        """Objects are taken from the first rank that has them."""
        self._objects.setdefault(_identity(path), entry)

    def _add(
        self,
        file: RankFile,
        path: Path,
        dtype: DType,
        shape: tuple[int, ...],
        boxes: Iterable[tuple[Box, Extent]],
        where: str,
        part_of: str = "",
    ) -> None:
        gathered = self._tensors.setdefault(_identity(path), _Gathered(path, dtype, shape, where, part_of=part_of))
        if (gathered.dtype, gathered.shape) != (dtype, shape):
            expected = f"{gathered.dtype} {list(gathered.shape)} as {gathered.where}"
            self.entries.findings.append(Finding("rank-mismatch", where, expected, f"{dtype} {list(shape)}"))
            return
        for box, extent in boxes:
            piece = Piece(box, extent, file.rank)
            if box in gathered.pieces:
                gathered.replicas.append(piece)
            else:
                gathered.pieces[box] = piece


def _is_sharded(value: object) -> bool:
    """Whether a DTensor or a ShardedTensor lies anywhere in a value."""
    stack, seen = [value], set()
    while stack:
        record = stack.pop()
        if isinstance(record, Global) and record.name in ("DTensor", "ShardedTensor"):
            return True
        if id(record) not in seen and isinstance(record, (dict, list, tuple, Object)):
            seen.add(id(record))
            stack.extend(children(record))
    return False


def _identity(path: Path) -> tuple[object, ...]:
    """A path as a dict key that keeps 0, False and "0" apart."""
    return tuple((type(k), k) for k in path)


def _read_ints(file: RankFile, tensor: TensorValue) -> list[int]:
    """The values of a small dense integer tensor (a device mesh), read at once."""
    extent = locate_tensor(file.torch, file.path, tensor, file.path, Expansion(0))
    if isinstance(extent, Finding) or extent.strides or extent.length > 8 * _MAX_MESH_RANKS:
        raise MalformedError("a device mesh that is no dense tensor of ranks")
    width = tensor.dtype.item_bytes
    data = file.region.read(extent.offset - file.region.offset, extent.length)
    order: Literal["big", "little"] = "big" if "byteswap" in extent.transforms else "little"
    return [int.from_bytes(data[i : i + width], order, signed=True) for i in range(0, len(data), width)]
