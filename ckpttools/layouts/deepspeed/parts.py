"""Pieces: flat ranges of row-major tensors, and boxes of tensor-parallel shards in the whole tensor. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ckpttools.dtypes import DType
from ckpttools.geometry import flat_range_to_boxes, intersect, is_row_major, row_major_strides, span_elements
from ckpttools.model import Box, Extent, Piece

Key = tuple[str, ...]
"""What is kept of a parameter: () its weight, ("fp32",) its master, ("exp_avg",), ..."""


@dataclass(slots=True)
class Local:
    """What one tensor-parallel rank holds of a tensor, or all of it where there is one such rank."""

    dtype: DType
    shape: tuple[int, ...]
    where: str
    """The file that says so, for messages."""
    pieces: list[Piece] = field(default_factory=list)
    stale: list[Piece] = field(default_factory=list)
    """Copies on further pipeline stages or ranks, which nothing reads when training resumes."""
    replicas: list[Piece] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cut:
    """A stretch of one dimension of a shard, and where in the whole tensor it goes."""

    local_offset: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the shards of a tensor lie in it."""

    shape: tuple[int, ...]
    dim: int = 0
    cuts: tuple[tuple[Cut, ...], ...] = ()
    """Per tensor-parallel rank; none where every rank holds the whole tensor."""
    may_differ: bool = False
    """Whether copies may drift apart, so that a difference is no damage (they are averaged when merged)."""
    is_guessed: bool = False
    """Whether nothing says so."""
    copies: tuple[tuple[Cut, ...], ...] = ()
    """Per rank the cuts that a lower rank holds, too."""
    apart: str = ""
    """Why the shards stay apart, each a tensor of its own: the writer says that they cannot be put together."""


def flat_pieces(
    shape: Sequence[int], start: int, stop: int, extent: Extent, dtype: DType, rank: int, *, skipped: int = 0
) -> list[Piece]:
    """The elements [start, stop) of a row-major tensor, which lie one after the other in `extent`. Pure.

    Args: skipped: elements between the begin of the extent and the first of them.
    """
    found, offset = [], extent.offset + skipped * dtype.item_bytes
    for box, volume in _flat_boxes(tuple(shape), start, stop):
        length = volume * dtype.item_bytes
        found.append(Piece(box, Extent(extent.file, offset, length, None, extent.transforms, extent.encoding), rank))
        offset += length
    return found


@lru_cache(maxsize=1024)
def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[tuple[Box, int], ...]:
    """The boxes of a flat range and their volumes: the same for a master and each state beside it, so made once. Pure."""
    return tuple((box, box.volume) for box in flat_range_to_boxes(shape, start, stop))


def whole_piece(shape: tuple[int, ...], extent: Extent, rank: int) -> Piece:
    """A tensor in one piece. Pure."""
    return Piece(Box((0,) * len(shape), shape), extent, rank)


def place(piece: Piece, dim: int, cuts: Sequence[Cut], dtype: DType) -> list[Piece]:
    """The parts of a shard's piece in the whole tensor, one per cut of dimension `dim` that it shares elements with. Pure."""
    found = []
    for cut in cuts:
        slab = Box(
            (*piece.box.offsets[:dim], cut.local_offset, *piece.box.offsets[dim + 1 :]),
            (*piece.box.sizes[:dim], cut.size, *piece.box.sizes[dim + 1 :]),
        )
        shared = intersect(piece.box, slab)
        if shared is None or (shared.volume == 0 and piece.box.volume):
            continue
        moved = list(shared.offsets)
        moved[dim] += cut.offset - cut.local_offset
        extent = piece.extent if shared == piece.box else _sub_extent(piece, shared, dtype)
        found.append(Piece(Box(tuple(moved), shared.sizes), extent, piece.rank))
    return found


def _sub_extent(piece: Piece, box: Box, dtype: DType) -> Extent:
    """Where a box inside a piece lies."""
    strides = piece.extent.strides or row_major_strides(piece.box.sizes)
    start = sum((o - p) * s for o, p, s in zip(box.offsets, piece.box.offsets, strides, strict=True))
    return replace(
        piece.extent,
        offset=piece.extent.offset + start * dtype.item_bytes,
        length=span_elements(box.sizes, strides) * dtype.item_bytes,
        strides=None if is_row_major(box.sizes, strides) else strides,
    )
