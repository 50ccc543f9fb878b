"""Affine maps: which blocks of the whole parameter make up the shard of each tensor-parallel rank, stated by offsets and strides.

Every map that DeepSpeed makes cuts one dimension into slabs, in any order, some of them on several ranks. A map of another
kind, or one whose blocks are scaled, is not put together.

Source: deepspeedai/DeepSpeed, deepspeed/checkpoint/affine.py (`ParamAffineMap`), v0.19.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttools.geometry import row_major_strides
from ckpttools.layouts.deepspeed.parts import Cut, Placement
from ckpttools.layouts.deepspeed.states import count, counts, items, numbered, shape_of, table

VERSION = 1
_MAX_PIECES = 1 << 16

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """A slab of the shard, and where in the whole parameter it goes."""

    cut: Cut
    is_copy: bool


def read_affine_map(entry: object, shapes: Sequence[Shape]) -> Placement | str:
    """Where shards of these shapes lie, as the map says; a text when it says it of other shards, or in another way. Pure."""
    told, ranks = table(entry), numbered(table(entry).get("ranks"))
    whole = shape_of(told.get("logical_shape"))
    if whole is None or set(ranks) != set(range(len(shapes))):
        return f"an affine map of {len(ranks)} ranks for {len(shapes)}"
    stated = [shape_of(table(ranks[t]).get("shard_shape")) for t in range(len(shapes))]
    if list(stated) != list(shapes):
        return f"shards of {[list(s) for s in shapes[:8]]}, and an affine map for {[list(s or ()) for s in stated[:8]]}"
    if all(s == whole for s in shapes):
        return Placement(whole)
    dim = next((d for s in shapes for d, (a, b) in enumerate(zip(s, whole, strict=False)) if a != b), 0)
    if any(len(s) != len(whole) or (*s[:dim], *s[dim + 1 :]) != (*whole[:dim], *whole[dim + 1 :]) for s in shapes):
        return f"shards of {[list(s) for s in shapes[:8]]} of {list(whole)}"
    cuts, copies = [], []
    for t, shape in enumerate(shapes):
        blocks = _blocks(items(table(ranks[t]).get("pieces")), whole, shape, dim, t)
        if isinstance(blocks, str):
            return blocks
        cuts.append(tuple(b.cut for b in blocks if not b.is_copy))
        copies.append(tuple(b.cut for b in blocks if b.is_copy))
    return Placement(whole, dim, tuple(cuts), copies=tuple(copies) if any(copies) else ())


def _blocks(pieces: Sequence[object], whole: Shape, shard: Shape, dim: int, rank: int) -> list[_Block] | str:
    """The slabs of one rank, which must be all of its shard."""
    found = []
    for piece in pieces[:_MAX_PIECES]:
        told = table(piece)
        shape = shape_of(told.get("shape"))
        if shape is None or len(shape) != len(whole):
            return "an affine map of blocks with other dimensions"
        if told.get("scale", 1.0) != 1.0:
            return "an affine map of scaled blocks"
        if 0 in shape:
            continue
        source, local = _start(told.get("source"), shape, whole, dim), _start(told.get("dest"), shape, shard, dim)
        if source is None or local is None:
            return f"an affine map whose blocks are no slabs along dimension {dim}"
        holders = counts(told.get("locations"))
        found.append(_Block(Cut(local, source, shape[dim]), is_copy=bool(holders) and min(holders) != rank))
    found.sort(key=lambda b: b.cut.local_offset)
    ends = [0, *(b.cut.local_offset + b.cut.size for b in found)]
    if (ends[-1] != shard[dim] and 0 not in shard) or any(b.cut.local_offset != e for b, e in zip(found, ends, strict=False)):
        return f"an affine map whose blocks are not all of the shard of rank {rank}"
    return found


def _start(record: object, shape: Shape, outer: Shape, dim: int) -> int | None:
    """Where along `dim` a slab of this shape begins in a row-major tensor; None when it is no such slab."""
    told = items(record)
    offset, strides = (count(told[0]), counts(told[1])) if len(told) == 2 else (None, [])
    expected = row_major_strides(outer)
    sides = (*shape[:dim], *shape[dim + 1 :]) == (*outer[:dim], *outer[dim + 1 :])
    if offset is None or not sides or len(strides) != len(shape) or 0 in outer:
        return None
    if any(size > 1 and a != b for size, a, b in zip(shape, strides, expected, strict=True)) or offset % expected[dim]:
        return None
    start = offset // expected[dim]
    return start if start + shape[dim] <= outer[dim] else None
