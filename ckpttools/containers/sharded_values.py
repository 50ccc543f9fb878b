"""DTensor and ShardedTensor as pickled by each rank: which box of which global tensor a rank's local tensor is.

The boxes follow from the mesh, the placements and the rank of the file; the coordinate stored in a mesh is a cache of
the process that wrote it. Module paths moved between releases, so classes are known by name.

Source: pytorch/pytorch, torch/distributed/tensor/_utils.py (compute_local_shape_and_global_offset),
placement_types.py, device_mesh.py, _shard/sharded_tensor/api.py, v2.13.0 and older.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import cast

from ckpttools.containers.torch_values import MalformedError, TensorValue, WrapperValue, read_tensor
from ckpttools.geometry import shard_of
from ckpttools.model import Box, Mesh
from ckpttools.pickles.records import Global, Object
from ckpttools.pickles.views import attributes, outline, sequence_items

ReadInts = Callable[[TensorValue], list[int]]
"""The values of a small integer tensor of the same file."""
_Axis = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One stored box of a global tensor."""

    box: Box
    tensor: TensorValue


@dataclass(frozen=True, slots=True)
class ShardedValue:
    """What one rank holds of a global tensor, and what it says of the others."""

    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    mesh: Mesh
    ranks: int
    """How many ranks the tensor is spread over, as this rank states it."""
    declared: tuple[Box, ...] = ()
    """The boxes of all ranks, where the value lists them."""
    is_partial: bool = False
    """Whether ranks hold unreduced partial sums."""


class ShardedReader:
    """Reads the sharded tensors of one file, which share a few meshes of as many ranks as the job had."""

    def __init__(self, rank: int, read_ints: ReadInts) -> None:
        self._rank = rank
        self._read_ints = read_ints
        self._meshes: dict[int, tuple[object, _DeviceMesh]] = {}
        """By identity of the record, which is kept so that no other takes its place."""

    def read(self, value: WrapperValue | Object) -> ShardedValue | None:
        """The shards of a DTensor or ShardedTensor as the rank of this file pickled it; None for other wrappers.

        Raises: MalformedError: when the record does not have what torch gives it.
        """
        try:
            if isinstance(value, WrapperValue) and value.class_name == "DTensor":
                return self._dtensor(value)
            if isinstance(value, WrapperValue) and value.class_name == "ShardedTensor":
                return _sharded_tensor(value.shape, value.state[""])
            if isinstance(value, Object) and _class_name(value) == "ShardedTensor":
                return _sharded_tensor(None, value.state)
        except (IndexError, TypeError, ValueError, KeyError, AttributeError) as e:
            raise MalformedError(f"a sharded tensor with unexpected members: {e}") from e
        return None

    def _dtensor(self, value: WrapperValue) -> ShardedValue:
        spec = attributes(value.state["_spec"]) or {}
        mesh = self._mesh(spec["mesh"])
        placements = sequence_items(spec["placements"]) or []
        if len(placements) != len(mesh.shape):
            raise ValueError(f"{len(placements)} placements on a mesh of {len(mesh.shape)} dimensions")
        local = read_tensor(value.state["_local_tensor"])
        box = local_box(value.shape, mesh.shape, mesh.coordinate, shard_order(placements, mesh.shape, spec))
        is_partial = any("Partial" in _class_name(p) for p in placements)
        axes = Mesh(tuple(zip(mesh.names, mesh.shape, strict=True)))
        return ShardedValue(value.shape, (Shard(box, local),), axes, mesh.job_ranks, is_partial=is_partial)

    def _mesh(self, record: object) -> _DeviceMesh:
        known = self._meshes.get(id(record))
        if known is None:
            known = self._meshes[id(record)] = record, _device_mesh(attributes(record) or {}, self._rank, self._read_ints)
        return known[1]


def _class_name(record: object) -> str:
    return record.callable.name if isinstance(record, Object) and isinstance(record.callable, Global) else ""


def _ints(value: object) -> tuple[int, ...]:
    items = [value] if isinstance(value, int) else sequence_items(value)
    if items is None or set(map(type, items)) - {int}:
        raise TypeError(f"no integers but {outline(value)}")
    found = cast("tuple[int, ...]", tuple(items))
    if min(found, default=0) < 0:
        raise TypeError(f"no integers but {outline(value)}")
    return found


@dataclass(frozen=True, slots=True)
class _DeviceMesh:
    names: tuple[str, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    """Where in the mesh the rank of the file is."""
    job_ranks: int
    """How many ranks there are at least: a mesh of one stage of a pipeline has a part of them."""


def _device_mesh(members: dict[str, object], rank: int, read_ints: ReadInts) -> _DeviceMesh:
    """A mesh of any release: a tensor of ranks (to 2.8), or a layout of strides over a map of ranks (from 2.9)."""
    names = members.get("mesh_dim_names", members.get("_mesh_dim_names"))
    if "mesh" in members:
        ranks = read_tensor(members["mesh"])
        shape, flat = ranks.shape, tuple(read_ints(ranks))
        rank_map = flat
    else:
        axes = _layout_axes(attributes(members["_layout"]) or {})
        rank_map = _ints(members.get("_flatten_rank_map") or read_ints(read_tensor(members["_rank_map"])))
        shape = tuple(prod(n for n, _ in axis) for axis in axes)
        flat = _ranks_of_layout(axes, rank_map, 0)
        if rank not in flat and rank in rank_map:  # a slice of a larger mesh: the one of its copies that has the rank
            place = rank_map.index(rank)
            flat = _ranks_of_layout(axes, rank_map, place - sum(place // s % n * s for axis in axes for n, s in axis))
    labels = sequence_items(names) if names is not None else None
    named = tuple(map(str, labels or (f"dim_{i}" for i in range(len(shape)))))
    return _DeviceMesh(named, shape, _coordinate(shape, flat, rank), max(rank_map) + 1)


@lru_cache(maxsize=8)
def _ranks_of_layout(axes: tuple[_Axis, ...], rank_map: tuple[int, ...], start: int) -> tuple[int, ...]:
    """Rank at each coordinate, row-major, the first being at place `start` of the map; most files state the same. Pure."""
    places = [[sum(i * s for i, (_, s) in zip(c, axis, strict=True)) for c in _coordinates(axis)] for axis in axes]
    return tuple(rank_map[start + sum(offsets)] for offsets in product(*places))


def _coordinate(shape: Sequence[int], ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """Where a rank is in a mesh of the given ranks, row-major. Pure."""
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in its own mesh of {len(ranks)} ranks")
    rest, found = ranks.index(rank), []
    for size in reversed(shape):
        found.append(rest % size)
        rest //= size
    return tuple(reversed(found))


def _layout_axes(members: dict[str, object]) -> tuple[_Axis, ...]:
    """Per mesh dimension its (size, stride) pairs; a flattened dimension has several."""
    if "axes" in members:
        flat = [attributes(a) or {} for a in sequence_items(members["axes"]) or []]
        return tuple(tuple(zip(_ints(a["shape"]), _ints(a["stride"]), strict=True)) for a in flat)
    sizes, strides = sequence_items(members["shape"]) or [], sequence_items(members["stride"]) or []
    return tuple(tuple(zip(_ints(n), _ints(s), strict=True)) for n, s in zip(sizes, strides, strict=True))


def _coordinates(axis: _Axis) -> product[tuple[int, ...]]:
    return product(*(range(n) for n, _ in axis))


def shard_order(placements: Sequence[object], mesh_shape: Sequence[int], spec: dict[str, object]) -> dict[int, tuple[int, ...]]:
    """Per tensor dimension the mesh dimensions that cut it, in the order in which they cut.

    Left to right, but for `_StridedShard(split_factor=n)`: it cuts what later mesh dimensions of total size n have cut
    before it (FSDP over tensor parallelism), and for an explicit `shard_order`.
    """
    order: dict[int, list[int]] = {}
    is_strided = False
    for mesh_dim in range(len(placements) - 1, -1, -1):
        members = attributes(placements[mesh_dim]) or {}
        if "Shard" not in _class_name(placements[mesh_dim]):
            continue
        cutting = order.setdefault(_ints(members["dim"])[0], [])
        place = 0
        if "split_factor" in members:
            is_strided = True
            (factor,) = _ints(members["split_factor"])
            while place < len(cutting) and prod(mesh_shape[d] for d in cutting[:place]) < factor:
                place += 1
        cutting.insert(place, mesh_dim)
    if not is_strided:
        for entry in sequence_items(spec.get("shard_order")) or []:
            dim, mesh_dims = _order_entry(entry)
            if sorted(mesh_dims) == sorted(order.get(dim, [])):
                order[dim] = list(mesh_dims)
    return {dim: tuple(dims) for dim, dims in order.items()}


def _order_entry(entry: object) -> tuple[int, tuple[int, ...]]:
    """A ShardOrderEntry(tensor_dim, mesh_dims), which is a named tuple."""
    members = attributes(entry) or {}
    if "tensor_dim" in members:
        return _ints(members["tensor_dim"])[0], _ints(members["mesh_dims"])
    values = entry.args if isinstance(entry, Object) else tuple(sequence_items(entry) or ())
    return _ints(values[0])[0], _ints(values[1])


def local_box(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], order: dict[int, tuple[int, ...]]
) -> Box:
    """The box of a tensor that the rank at `coordinate` holds. Pure."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, mesh_dims in order.items():
        for mesh_dim in mesh_dims:
            offset, size = shard_of(sizes[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
            offsets[dim] += offset
            sizes[dim] = size
    return Box(tuple(offsets), tuple(sizes))


def _sharded_tensor(shape: tuple[int, ...] | None, state: object) -> ShardedValue:
    """The pickled state: (local shards, metadata, process group state, sharding spec, init_rrefs)."""
    local_shards, metadata, *rest = sequence_items(state) or []
    stated = attributes(metadata) or {}
    shape = _ints(stated["size"]) if shape is None else shape
    group = attributes(rest[0]) or {}
    declared = tuple(_shard_box(s) for s in sequence_items(stated["shards_metadata"]) or [])
    shards = []
    for record in sequence_items(local_shards) or []:
        members = attributes(record) or {}
        shards.append(Shard(_shard_box(members["metadata"]), read_tensor(members["tensor"])))
    ranks = _ints(group.get("global_world_size", len(declared)))[0]
    return ShardedValue(shape, tuple(shards), Mesh(), ranks, declared)


def _shard_box(metadata: object) -> Box:
    members = attributes(metadata) or {}
    return Box(_ints(members["shard_offsets"]), _ints(members["shard_sizes"]))
