"""What one rank of a mesh holds of a tensor: the boxes of it, and where they lie in the rank's own tensor.

A placement is a list of cuts, made one after the other: each cuts what the cuts before it left of a dimension into one
share per coordinate of its axis. Axes that make no cut replicate. So tensor parallelism first and FSDP's rows after it is
what torch calls a strided shard, and a fused row (query, key and value under one name) is a cut with several sections.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from ckpttools.geometry import shard_of
from ckpttools.model import Box, Mesh, Path, TensorSpec

AXES = ("pp", "dp", "fsdp", "ep", "tp")
"""Every mesh axis there is, in the order in which ranks are numbered: the last one varies fastest.

`pp` gives stages of layers, `dp` replicates (HSDP's outer axis), `fsdp` cuts dimension 0 of everything, `ep` experts, `tp`
by rule."""

_OTHER_WORDS = {
    "pp": ("pipe", "pipeline", "stage", "stages", "pipeline_parallel"),
    "dp": ("ddp", "dp_replicate", "replicate", "data", "hsdp", "cp", "sp", "context", "sequence", "data_parallel"),
    "fsdp": ("dp_shard", "shard", "zero", "sharding", "fully_shard"),
    "ep": ("expert", "experts", "expert_parallel"),
    "tp": ("tensor", "model", "mp", "tensor_parallel", "model_parallel"),
}
"""What others call them. Context and sequence parallelism divide no parameter: their ranks hold replicas."""


def canonical_mesh(mesh: Mesh) -> Mesh:
    """The same axes in the order of `AXES`. Raises ValueError for an axis that is not one of them, with what is likely meant."""
    unknown = [name for name, _ in mesh.axes if name not in AXES]
    if unknown:
        named = ", ".join(f"`{name}`" for name in unknown)
        meant = _meant(mesh)
        told = f"; perhaps you mean --mesh {meant}" if meant is not None else ""
        raise ValueError(f"unknown mesh axis {named}; the axes are {', '.join(AXES)}{told}")
    return Mesh(tuple(sorted(mesh.axes, key=lambda axis: AXES.index(axis[0]))))


def _meant(mesh: Mesh) -> Mesh | None:
    """A mesh with the words of others in ours; None where one of its axes has none."""
    sizes: dict[str, int] = {}
    for name, size in mesh.axes:
        axis = name if name in AXES else next((axis for axis, words in _OTHER_WORDS.items() if name.lower() in words), "")
        if not axis:
            return None
        sizes[axis] = sizes.get(axis, 1) * size
    return Mesh(tuple((axis, sizes[axis]) for axis in AXES if axis in sizes))


def coordinate(mesh: Mesh, rank: int) -> dict[str, int]:
    """Axis -> place of a rank along it, ranks being numbered row-major. Pure."""
    found = {}
    for name, size in reversed(mesh.axes):
        found[name] = rank % size
        rank //= size
    return found


@dataclass(frozen=True, slots=True)
class Holders:
    """Ranks that differ in the coordinates of some axes only: all of these, in order."""

    first: int
    steps: Sequence[int]
    """What is added to the first for each; shared, since with axes that replicate there are many."""

    def __iter__(self) -> Iterator[int]:
        return (self.first + step for step in self.steps)


@dataclass(frozen=True, slots=True)
class Cut:
    """What one mesh axis does to a tensor: each coordinate gets a share of a dimension, by the rule of torch.chunk."""

    axis: str
    dim: int
    sections: tuple[int, ...] = ()
    """Elements of each section along `dim`, for fused rows: every section is cut by itself and a rank gets its share of
    each, one after the other. Empty for one section. They add up to the whole dimension, so only the first cut of a
    dimension may have them."""
    copies: tuple[int, ...] = ()
    """Neighbours along the axis that hold the same share, for each section (or the one that there is): heads of keys and values
    that are fewer than ranks. They divide the ranks. Empty where each rank has a share of its own."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a mesh holds a tensor; no cuts and no stages: every rank has all of it."""

    cuts: tuple[Cut, ...] = ()
    """In the order in which they are made."""
    held_at: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(axis, coordinates along it at which the tensor is): pipeline stages, the rank of an expert that has a name of its
    own. An axis that is not named does not exclude a rank."""

    def __str__(self) -> str:
        cuts = [f"{c.axis}: dim {c.dim}{_told(c)}" for c in self.cuts]
        return "; ".join(cuts + [f"{axis}: at {','.join(map(str, places))}" for axis, places in self.held_at])


def _told(cut: Cut) -> str:
    sections = f" in {len(cut.sections)} sections" if len(cut.sections) > 1 else ""
    most = max(cut.copies, default=1)
    return sections + (f", {'some of it ' if len(set(cut.copies)) > 1 else ''}on {most} ranks each" if most > 1 else "")


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and the box of the same sizes that it is in a rank's own tensor."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What a rank holds of a tensor, as a tensor of its own."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    """Tile `shape` in row-major order of their places; one part of no elements where the rank's share is empty."""


@dataclass(frozen=True)
class PlacedTensor:
    """An output tensor and how the mesh holds it."""

    spec: TensorSpec
    """Global, under its output name."""
    path: Path
    """Typed keys under which it is stored."""
    family: str = "model"
    placement: Placement = field(default_factory=Placement)

    def local(self, mesh: Mesh, rank: int) -> LocalTensor | None:
        """What a rank holds of it; None where it is of another stage or another rank's expert."""
        return local_tensor(self.spec.shape, self.placement, mesh, rank)


def ranks_along(mesh: Mesh, axes: Collection[str]) -> list[int]:
    """The ranks whose coordinates along all other axes are 0, in order. Pure."""
    found = [0]
    for name, size in mesh.axes:
        found = [rank * size + at for rank in found for at in (range(size) if name in axes else (0,))]
    return found


def distinct_holders(placement: Placement, mesh: Mesh) -> Iterator[Holders]:
    """The ranks of a mesh in groups that hold the same: those that differ in axes which neither cut nor place. Pure."""
    deciding = {cut.axis for cut in placement.cuts} | {axis for axis, _ in placement.held_at}
    steps = ranks_along(mesh, {name for name, _ in mesh.axes} - deciding)
    return (Holders(first, steps) for first in ranks_along(mesh, deciding))


def local_tensor(shape: Sequence[int], placement: Placement, mesh: Mesh, rank: int) -> LocalTensor | None:
    """What a rank of a mesh holds of a tensor of a shape; None for nothing at all. Pure.

    Raises: ValueError: for a cut of a dimension that is not there, or sections that do not add up to it.
    """
    at, sizes = coordinate(mesh, rank), dict(mesh.axes)
    for axis, places in placement.held_at:
        if at.get(axis, 0) not in places:
            return None
    runs = [[(0, size)] for size in shape]
    for cut in placement.cuts:
        if not 0 <= cut.dim < len(shape):
            raise ValueError(f"no dimension {cut.dim} in {list(shape)}")
        share = _share(runs[cut.dim], cut, sizes.get(cut.axis, 1), at.get(cut.axis, 0))
        # runs that touch are one, but for copies: of one run that is held twice each holder has the same box
        share = share if any(one.copies for one in placement.cuts) else _joined(share)
        # an empty share lies past the end, as torch records it: there no other box can start
        runs[cut.dim] = share or [(shape[cut.dim],) * 2]
    return _assemble(runs)


def _share(runs: list[tuple[int, int]], cut: Cut, parts: int, index: int) -> list[tuple[int, int]]:
    """The runs (start, stop) of a dimension that share `index` of `parts` has; none for an empty share."""
    length = sum(stop - start for start, stop in runs)
    sections = cut.sections or (length,)
    if sum(sections) != length:
        raise ValueError(f"sections of {'+'.join(map(str, sections))} do not make {length}")
    found, before = [], 0
    for section, copies in zip(sections, cut.copies or (1,) * len(sections), strict=True):
        offset, size = shard_of(section, parts // copies, index // copies)
        found += _clip(runs, before + offset, before + offset + size)
        before += section
    return found


def _clip(runs: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """What elements [start, stop) of concatenated runs are, as runs that are not empty."""
    found, before = [], 0
    for run_start, run_stop in runs:
        low, high = max(start - before, 0), min(stop - before, run_stop - run_start)
        if low < high:
            found.append((run_start + low, run_start + high))
        before += run_stop - run_start
    return found


def _joined(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs with neighbours that touch made into one."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and start == found[-1][1]:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _assemble(runs: Sequence[Sequence[tuple[int, int]]]) -> LocalTensor:
    """The product of the runs of each dimension."""
    placed = []
    for dimension in runs:
        position, found = 0, []
        for start, stop in dimension:
            found.append((start, stop - start, position))
            position += stop - start
        placed.append(found)
    shape = tuple(sum(size for _, size, _ in dimension) for dimension in placed)
    parts = []
    for combination in product(*placed):
        sizes = tuple(size for _, size, _ in combination)
        box = Box(tuple(start for start, _, _ in combination), sizes)
        parts.append(Part(box, Box(tuple(position for _, _, position in combination), sizes)))
    return LocalTensor(shape, tuple(parts))


def held_boxes(tensors: Sequence[PlacedTensor], mesh: Mesh) -> Mapping[str, dict[Box, list[int]]]:
    """Per output name: each box that some rank holds, and the ranks that hold it, in order. Pure."""
    found: dict[str, dict[Box, list[int]]] = {}
    for tensor in tensors:
        boxes = found[tensor.spec.name] = {}
        for rank in range(mesh.ranks):
            local = tensor.local(mesh, rank)
            for part in local.parts if local else ():
                boxes.setdefault(part.box, []).append(rank)
    return found
