"""DTensors as torch pickles them, written without torch: the rebuild call, the placements, and the mesh as one rank sees it.

What a mesh is made of changed three times, and no form can be loaded by all releases: until 2.9 it holds a tensor of ranks,
from 2.10 a layout class that older releases lack, whose members 2.13 changed again. So the release that shall load a file
must be told. Each form was compared with what its releases write, and loaded by them.

Source: pytorch/pytorch, torch/distributed/device_mesh.py, torch/distributed/_mesh_layout.py,
torch/distributed/tensor/_dtensor_spec.py and placement_types.py (in 2.4 torch/distributed/_tensor/), v2.4.1 to v2.13.0.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ckpttools.containers.torch_archive import tensor_record
from ckpttools.dtypes import parse_dtype
from ckpttools.geometry import row_major_strides
from ckpttools.model import TensorSpec
from ckpttools.pickles.records import Global, Object

Release = tuple[int, int]
OLDEST: Release = (2, 4)
NEWEST: Release = (2, 13)
"""The last release whose form is known; three times a later one had another."""
STRIDED_SINCE: Release = (2, 5)
"""The first release that can say that a mesh dimension cuts what later ones have cut before it."""
_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
_LAYOUT_MODULE = "torch.distributed._mesh_layout"


@dataclass(frozen=True, slots=True)
class RankMesh:
    """A device mesh as one of its ranks sees it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """At each coordinate, row-major."""
    rank: int
    device_type: str
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    """Per axis the process group of this rank: its name, and its ranks."""

    @property
    def coordinate(self) -> tuple[int, ...]:
        """Where in the mesh the rank is."""
        rest, found = self.ranks.index(self.rank), []
        for size in reversed(self.shape):
            found.append(rest % size)
            rest //= size
        return tuple(reversed(found))

    @property
    def rank_bytes(self) -> bytes:
        """The values of the storage that `mesh_record` refers to: the ranks as int32."""
        return _packed(self.ranks)


@lru_cache(maxsize=64)
def _packed(ranks: tuple[int, ...]) -> bytes:
    """One stretch of bytes for the files of all ranks of a mesh."""
    return struct.pack(f"<{len(ranks)}i", *ranks)


def parse_release(text: str) -> Release:
    """The release that `2.9` or `2.9.1` names. Raises ValueError when it is none, or one whose form is not known."""
    numbers = text.split(".")
    if len(numbers) < 2 or not all(n.isascii() and n.isdigit() for n in numbers[:2]):
        raise ValueError(f"not a release of torch: `{text}` (write it like 2.13)")
    release = (int(numbers[0]), int(numbers[1]))
    if not OLDEST <= release <= NEWEST:
        known = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        raise ValueError(f"DTensors are written for torch {known}, whose forms are known, not for {text}")
    return release


def mesh_record(mesh: RankMesh, release: Release, key: str) -> Object:
    """The mesh; its ranks lie in storage `key` (`RankMesh.rank_bytes`). Pure."""
    if release < (2, 10):
        return Object(_MESH, (), how="newobj", state=_tensor_members(mesh, key))
    ranks = tensor_record(TensorSpec("", parse_dtype("int32"), (len(mesh.ranks),)), key)
    members: dict[object, object] = {
        "_device_type": mesh.device_type,
        "_layout": _layout_record(mesh.shape, release),
        "_rank_map": ranks,
        "_mesh_dim_names": mesh.names,
        "_root_mesh": None,
        "_flatten_rank_map": mesh.ranks,
        "_thread_id": None,
        "_flatten_mapping": {},
        "_dim_group_names": [name for name, _ in mesh.groups],
        "_rank": mesh.rank,
        "_coordinate_on_dim": mesh.coordinate if release >= (2, 11) else list(mesh.coordinate),
        "_hash": None,
    }
    return Object(_MESH, (), how="newobj", state=members)


def _tensor_members(mesh: RankMesh, key: str) -> dict[object, object]:
    """Of a mesh until 2.9; groups are named in one way until 2.7 and in another after it, and both may be there."""
    return {
        "device_type": mesh.device_type,
        "mesh": tensor_record(TensorSpec("", parse_dtype("int32"), mesh.shape), key),
        "mesh_dim_names": mesh.names,
        "_flatten_mesh_list": mesh.ranks,
        "_parent_mesh": None,
        "_thread_id": None,
        "_dim_group_infos": [(f"ptd:{name}", list(ranks), name) for name, ranks in mesh.groups],
        "_dim_group_names": [name for name, _ in mesh.groups],
        "_coordinate_on_dim": list(mesh.coordinate),
    }


def _layout_record(shape: Sequence[int], release: Release) -> Object:
    """Sizes and strides of a mesh that is dense in its own ranks."""
    strides = row_major_strides(shape)
    layout = Global(_LAYOUT_MODULE, "_MeshLayout")
    if release < (2, 13):
        return Object(layout, (), how="newobj", state={"shape": tuple(shape), "stride": strides})
    flat = Global(_LAYOUT_MODULE, "_FlatLayout")
    axes = [((n,), (s,)) if n != 1 else ((), ()) for n, s in zip(shape, strides, strict=True)]
    records = tuple(Object(flat, (), how="newobj", state={"shape": sizes, "stride": steps}) for sizes, steps in axes)
    return Object(layout, (), how="newobj", state={"axes": records})


def dtensor_record(
    spec: TensorSpec,
    local: Object,
    mesh: Object,
    mesh_shape: Sequence[int],
    cuts: Mapping[int, Sequence[int]],
    *,
    release: Release,
    device_type: str,
) -> Object:
    """The rebuild call of a DTensor. Pure.

    Args:
        spec: the global tensor.
        local: the record of the rank's own tensor.
        cuts: tensor dimension -> the mesh dimensions that cut it, in the order in which they do; the others replicate.
    """
    cls = (
        Global("torch.distributed.tensor", "DTensor") if release >= (2, 5) else Global("torch.distributed._tensor.api", "DTensor")
    )
    strides, dtype = row_major_strides(spec.shape), Global("torch", spec.dtype.name)
    layout = Object(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    device = Object(Global("torch", "device"), (device_type,))
    arguments = (cls, dtype, spec.shape, strides, 0, layout, device, False)
    state = {"_local_tensor": local, "_spec": _spec_record(spec, mesh, mesh_shape, cuts, release)}
    rebuild = Global("torch._utils", "_rebuild_wrapper_subclass")
    return Object(Global("torch._tensor", "_rebuild_from_type_v2"), (rebuild, cls, arguments, (None, state)))


def _spec_record(
    spec: TensorSpec, mesh: Object, mesh_shape: Sequence[int], cuts: Mapping[int, Sequence[int]], release: Release
) -> Object:
    module = "torch.distributed.tensor._dtensor_spec" if release >= (2, 5) else "torch.distributed._tensor.placement_types"
    size = Object(Global("torch", "Size"), (spec.shape,))
    meta = (size, row_major_strides(spec.shape), Global("torch", spec.dtype.name))
    placements, is_strided = _placement_records(mesh_shape, cuts, release)
    members: dict[object, object] = {
        "mesh": mesh,
        "placements": placements,
        "tensor_meta": Object(Global(module, "TensorMeta"), meta, how="newobj"),
    }
    if release >= (2, 10):
        entry = Global(module, "ShardOrderEntry")
        order = tuple(Object(entry, (dim, tuple(cuts[dim])), how="newobj") for dim in sorted(cuts))
        members["shard_order"] = None if is_strided and release >= (2, 11) else order
        members["use_strided_shard_as_shard_order"] = is_strided
    return Object(Global(module, "DTensorSpec"), (), how="newobj", state={**members, "_hash": None})


def _placement_records(
    mesh_shape: Sequence[int], cuts: Mapping[int, Sequence[int]], release: Release
) -> tuple[tuple[Object, ...], bool]:
    """A placement per mesh dimension, and whether one of them is strided.

    A mesh dimension that cuts what later ones have cut before it is a strided shard, with their sizes as its factor.
    """
    module = "torch.distributed.tensor.placement_types" if release >= (2, 5) else "torch.distributed._tensor.placement_types"
    found = [Object(Global(module, "Replicate"), (), how="newobj", state={}) for _ in mesh_shape]
    is_strided = False
    for dim, mesh_dims in cuts.items():
        for place, mesh_dim in enumerate(mesh_dims):
            factor = prod(mesh_shape[d] for d in mesh_dims[:place] if d > mesh_dim)
            name, members = "Shard", {"dim": dim}
            if factor > 1:
                name, members, is_strided = "_StridedShard", {"dim": dim, "split_factor": factor}, True
            found[mesh_dim] = Object(Global(module, name), (), how="newobj", state=members)
    return tuple(found), is_strided
