"""What the tensors of a rank's file are parts of, as a note of ours in it: for layouts that store a rank's own tensors and say
nothing of the others.

The note is JSON, in the metadata of a safetensors file or in a member of a torch archive; the tools whose layouts these are
do not look at it. It is as untrusted as all else in a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpttools.containers.jsons import JsonError, parse_json
from ckpttools.geometry import contains, flat_offset, is_row_major, is_tiled, row_major_strides, span_elements
from ckpttools.model import Box, Extent, Mesh, Piece, TensorSpec
from ckpttools.placement.held import HeldTensor
from ckpttools.placement.local import LocalTensor, Part

METADATA_KEY = "ckpttools.local_boxes"
"""Where it stands in the metadata of a safetensors file."""
NOTE_NAME = ".ckpttools/local_boxes.json"
"""The member of a torch archive that it is."""
_MAX_COUNT = 2**63 - 1
_MAX_RANKS = 1 << 22


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A rank's tensor as a part of a global one."""

    shape: tuple[int, ...]
    """Of the global tensor."""
    local: LocalTensor


@dataclass(frozen=True)
class LocalBoxes:
    """The note of one file."""

    rank: int
    mesh: Mesh
    tensors: Mapping[str, LocalBox] = field(default_factory=dict)
    """By the name in the file."""


def render_local_boxes(held: Iterable[tuple[str, HeldTensor]], mesh: Mesh, rank: int) -> bytes:
    """The note for a file with these tensors, by their names in it. Pure."""
    tensors = {
        name: {
            "shape": one.tensor.spec.shape,
            "parts": [(p.box.offsets, p.box.sizes, p.local.offsets) for p in one.local.parts],
        }
        for name, one in held
    }
    document = {"rank": rank, "mesh": [list(axis) for axis in mesh.axes], "tensors": tensors}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def parse_local_boxes(data: bytes) -> LocalBoxes:
    """The note of a file. Raises ValueError, saying what is wrong with it."""
    try:
        document = parse_json(data)
    except JsonError as e:
        raise ValueError(e.message) from e
    if not isinstance(document, dict) or document.keys() != {"rank", "mesh", "tensors"}:
        raise ValueError("no object of rank, mesh and tensors")
    tensors = document["tensors"] if isinstance(document["tensors"], dict) else {"": None}
    mesh = _mesh(document["mesh"])
    rank = document["rank"]
    if type(rank) is not int or not 0 <= rank < mesh.ranks:
        raise ValueError(f"no rank of {mesh.ranks}")
    return LocalBoxes(rank, mesh, {str(name): _local_box(str(name), stated) for name, stated in tensors.items()})


def pieces_of(local: LocalTensor, spec: TensorSpec, file: str, offset: int, rank: int) -> list[Piece]:
    """The pieces that a rank's row-major tensor of `local.shape`, stored from byte `offset` of a file on, gives. Pure.

    Args: spec: of the rank's tensor or the global one; only the dtype counts.
    """
    strides, pieces = row_major_strides(local.shape), []
    for part in local.parts:
        place = flat_offset(part.local.offsets, local.shape) if part.box.volume else 0
        length = spec.dtype.length_bytes(span_elements(part.box.sizes, strides))
        dense = is_row_major(part.box.sizes, strides)
        extent = Extent(file, offset + spec.dtype.length_bytes(place), length, None if dense else strides)
        pieces.append(Piece(part.box, extent, rank))
    return pieces


def _mesh(stated: object) -> Mesh:
    axes = []
    for axis in stated if isinstance(stated, list) else []:
        if not (isinstance(axis, list) and len(axis) == 2 and isinstance(axis[0], str) and type(axis[1]) is int and axis[1] > 0):
            raise ValueError("a mesh with an axis that is none")
        axes.append((axis[0], axis[1]))
    mesh = Mesh(tuple(axes))
    if mesh.ranks > _MAX_RANKS:
        raise ValueError(f"a mesh of {mesh.ranks} ranks")
    return mesh


def _local_box(name: str, stated: object) -> LocalBox:
    """The parts lie inside the global tensor and tile the rank's, or it is a ValueError."""
    where = f"`{name[:80]}`"
    if not isinstance(stated, dict) or not isinstance(stated.get("parts"), list) or not stated["parts"]:
        raise ValueError(f"{where} without parts")
    shape = _counts(stated.get("shape"), where)
    whole = Box((0,) * len(shape), shape)
    parts = []
    for part in stated["parts"]:
        if not isinstance(part, list) or len(part) != 3:
            raise ValueError(f"{where} with a part that is none")
        offsets, sizes, places = (_counts(numbers, where) for numbers in part)
        if not len(offsets) == len(sizes) == len(places) == len(shape):
            raise ValueError(f"{where} with parts of other dimensions than {len(shape)}")
        box = Box(offsets, sizes)
        if not contains(whole, box):
            raise ValueError(f"{where} with a part outside {list(shape)}")
        parts.append(Part(box, Box(places, sizes)))
    local = tuple(max(stops) for stops in zip(*(p.local.stops for p in parts), strict=True))
    if not is_tiled(Box((0,) * len(local), local), [p.local for p in parts]):
        raise ValueError(f"{where} with parts that do not tile {list(local)}")
    return LocalBox(shape, LocalTensor(local, tuple(parts)))


def _counts(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n <= _MAX_COUNT for n in value):
        raise ValueError(f"{where} with something in the place of counts")
    return tuple(value)
