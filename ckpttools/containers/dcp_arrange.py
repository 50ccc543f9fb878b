"""Arranges a DCP directory: one torch archive per chunk and per object, back to back, and the `.metadata` that names them.

What torch's planner and file system writer make of a state dict, planned to the byte and without torch. The manifest is the
commit record; a rank that owns nothing has no file.

Source: pytorch/pytorch, torch/distributed/checkpoint/{filesystem,metadata,default_planner,planner_helpers}.py, v2.13.0; the
members that older releases do not know are set as attributes there and ignored (read by torch 2.4 and newer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ckpttools.containers.dcp_metadata import write_metadata
from ckpttools.containers.torch_archive import TensorItem
from ckpttools.dtypes import DType
from ckpttools.model import ArrangedFile, Box, Carry, Literal, Path, Slot, TensorSpec

MANIFEST = ".metadata"
Key = tuple[str, tuple[int, ...] | None]
"""(name, offsets of the chunk); None for an object."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor that a rank writes."""

    spec: TensorSpec
    """Of the whole tensor."""
    box: Box
    rank: int

    @property
    def archive(self) -> TensorItem:
        """The torch archive that holds it."""
        return _tensor_item(self.spec.dtype, self.box.sizes)

    @property
    def length_bytes(self) -> int:
        """Bytes of the archive."""
        return self.archive.length_bytes

    @property
    def key(self) -> Key:
        """By which the manifest finds it."""
        return self.spec.name, self.box.offsets


@dataclass(frozen=True, slots=True)
class ObjectItem:
    """An object that a rank writes: its archive, or the stretch of a source file that is one."""

    name: str
    rank: int = 0
    data: bytes = b""
    source: tuple[str, int, int] | None = None
    """(file, offset, length)."""

    @property
    def length_bytes(self) -> int:
        """Bytes of the archive."""
        return self.source[2] if self.source else len(self.data)

    @property
    def key(self) -> Key:
        """By which the manifest finds it."""
        return self.name, None


def arrange_directory(
    tensors: Sequence[tuple[TensorSpec, Sequence[Chunk]]],
    objects: Sequence[ObjectItem],
    *,
    paths: Mapping[str, Path] | None,
    files_per_rank: int = 1,
) -> tuple[ArrangedFile, ...]:
    """The data files and the manifest.

    Args:
        tensors: each with its chunks, in the order in which the manifest lists them; each box once.
        paths: name -> keys from which torch rebuilds the nesting; None for a state dict that was not flattened.
        files_per_rank: into how many files a rank's chunks are divided, by size.

    Raises: ConversionError: for a dtype that torch has no dense tensor of.
    """
    items: list[ObjectItem | Chunk] = [*objects, *(chunk for _, chunks in tensors for chunk in chunks)]
    places: dict[Key, tuple[str, int, int]] = {}
    files = []
    for path, of_file in _divide(items, files_per_rank):
        file = _File(path)
        for item in of_file:
            places[item.key] = (path, *file.add(item))
        files.append(file.finish())
    rows = [(spec, [(chunk.box, places[chunk.key]) for chunk in chunks]) for spec, chunks in tensors]
    manifest = write_metadata(rows, [(item.name, places[item.key]) for item in objects], paths)
    record = ArrangedFile(MANIFEST, len(manifest), literals=(Literal(0, manifest),), is_commit_record=True)
    return (*files, record)


@lru_cache(maxsize=4096)
def _tensor_item(dtype: DType, sizes: tuple[int, ...]) -> TensorItem:
    return TensorItem.of(dtype, sizes)


def _divide(items: Sequence[ObjectItem | Chunk], files_per_rank: int) -> Iterator[tuple[str, list[ObjectItem | Chunk]]]:
    """(file, what is in it): objects first, as torch writes them; with several files the largest first to the emptiest."""
    by_rank: dict[int, list[ObjectItem | Chunk]] = {}
    for item in items:
        by_rank.setdefault(item.rank, []).append(item)
    for rank in sorted(by_rank):
        bins: list[list[ObjectItem | Chunk]] = [[] for _ in range(files_per_rank)]
        loads = [0] * files_per_rank
        own = by_rank[rank]
        for i, item in enumerate(x for x in own if isinstance(x, ObjectItem)):
            bins[i % files_per_rank].append(item)
            loads[i % files_per_rank] += item.length_bytes
        chunks = [x for x in own if isinstance(x, Chunk)]
        if files_per_rank > 1:
            chunks.sort(key=lambda x: -x.length_bytes)
        for chunk in chunks:
            emptiest = loads.index(min(loads))
            bins[emptiest].append(chunk)
            loads[emptiest] += chunk.length_bytes
        for n, content in enumerate(x for x in bins if x):
            yield f"__{rank}_{n}.distcp", content


@dataclass(slots=True)
class _File:
    """A data file as it grows."""

    path: str
    position: int = 0
    slots: list[Slot] = field(default_factory=list)
    literals: list[Literal] = field(default_factory=list)
    carries: list[Carry] = field(default_factory=list)

    def add(self, item: ObjectItem | Chunk) -> tuple[int, int]:
        """Append an item; (offset, length) of it."""
        base = self.position
        if isinstance(item, Chunk):
            archive = item.archive
            offset = base + archive.data_offset
            self.slots.append(Slot(item.spec.name, item.box, offset, archive.data_length, archive.frame))
        elif item.source is not None:
            file, offset, length = item.source
            self.carries.append(Carry(file, offset, base, length))
        else:
            self.literals.append(Literal(base, item.data))
        self.position += item.length_bytes
        return base, item.length_bytes

    def finish(self) -> ArrangedFile:
        """The file."""
        return ArrangedFile(self.path, self.position, tuple(self.slots), tuple(self.literals), carries=tuple(self.carries))
