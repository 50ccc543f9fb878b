"""The device mesh of a tensor as torch would have made it, and how it cuts the tensor. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from ckpttools.containers.dtensor_records import RankMesh
from ckpttools.model import Mesh
from ckpttools.placement.local import (
    Cut,
    Holders,
    PlacedTensor,
    Placement,
    coordinate,
    distinct_holders,
    local_tensor,
    ranks_along,
)

_STAGES = "pp"
"""Each stage of a pipeline has a mesh of its own."""


def mesh_cuts(tensor: PlacedTensor, mesh: Mesh) -> dict[int, list[str]] | None:
    """Dimension -> the axes that cut it, in the order in which they do; {} for a tensor that nothing cuts.

    None where no DTensor is cut so: twice by one axis, by the stages of a pipeline, or in sections that are apart.
    """
    axes = dict(mesh.axes)
    cuts = [c for c in tensor.placement.cuts if c.axis in axes]
    found: dict[int, list[str]] = {}
    for cut in cuts:
        found.setdefault(cut.dim, []).append(cut.axis)
    used = [axis for by in found.values() for axis in by]
    fixed = {_STAGES, *(axis for axis, _ in tensor.placement.held_at)}
    if len(set(used)) != len(used) or fixed.intersection(used):
        return None
    if any(c.sections for c in cuts):
        plain = Placement(tuple(Cut(c.axis, c.dim) for c in cuts), tensor.placement.held_at)
        for holders in distinct_holders(tensor.placement, mesh):
            if tensor.local(mesh, holders.first) != local_tensor(tensor.spec.shape, plain, mesh, holders.first):
                return None
    return found


def mesh_of_rank(mesh: Mesh, rank: int, left_out: Sequence[str], device_type: str, axis_names: Mapping[str, str]) -> RankMesh:
    """The mesh of the axes that are neither stages nor `left_out`, around a rank, with the groups of a fresh job."""
    kept = [axis for axis in mesh.axes if axis[0] not in (_STAGES, *left_out)]
    ranks = _group(mesh, rank, frozenset(name for name, _ in kept))
    groups = [(_group_name(mesh, rank, name), _group(mesh, rank, frozenset((name,)))) for name, _ in kept]
    shape = tuple(size for _, size in kept)
    return RankMesh(tuple(axis_names.get(n, n) for n, _ in kept), shape, ranks, rank, device_type, tuple(groups))


def _group(mesh: Mesh, rank: int, axes: frozenset[str]) -> tuple[int, ...]:
    """The ranks that differ from a rank in some axes only."""
    first, at = 0, coordinate(mesh, rank)
    for name, size in mesh.axes:
        first = first * size + (0 if name in axes else at[name])
    return _ranks_from(mesh, axes, first)


@lru_cache(maxsize=1024)
def _ranks_from(mesh: Mesh, axes: frozenset[str], first: int) -> tuple[int, ...]:
    """One tuple for all ranks of a group: each has it in its file."""
    return tuple(Holders(first, ranks_along(mesh, axes)))


def _group_name(mesh: Mesh, rank: int, axis: str) -> str:
    """What the process group is called in a job whose first act is to make this mesh.

    Groups are counted from 1 over the axes in order, all of an axis before those of the next, and a mesh of one axis is
    the group of all ranks, 0.
    """
    if len(mesh.axes) == 1:
        return "0"
    names = [name for name, _ in mesh.axes]
    sizes, at = dict(mesh.axes), coordinate(mesh, rank)
    # torch puts the last axis in the place of the one that a group goes along, and counts row-major
    others = [names[-1] if name == axis else name for name in names[:-1]]
    number = 0
    for name in others:
        number = number * sizes[name] + at[name]
    before = sum(mesh.ranks // sizes[name] for name in names[: names.index(axis)])
    return str(1 + before + number)
