"""Tensors whose dimensions are counted by several numbers each, and the way from one counting to another. Pure.

Rows in another order are no box of rows; counted by (head, half, place in the half) they are one, whatever the order is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from ckpttools.geometry import factored, indices, is_row_major, row_major_strides, span_elements
from ckpttools.model import Box, Extent, Piece, TensorEntry

Factors = tuple[tuple[int, ...], ...]


def refactored(entry: TensorEntry, factors: Factors) -> TensorEntry:
    """The tensor with its pieces counted by other factors of its dimensions; without any, by the dimensions themselves.

    The latter takes a piece for each run of rows that follow each other where they are stored.
    """
    if entry.factors == factors:
        return entry
    if entry.factors:
        own, item_bytes = entry.factors, entry.spec.dtype.item_bytes
        entry = _recut(entry, (), lambda piece: _uncounted(piece, own, item_bytes))
    item_bytes = entry.spec.dtype.item_bytes
    return _recut(entry, factors, lambda piece: _counted(piece, factors, item_bytes)) if factors else entry


def _recut(entry: TensorEntry, factors: Factors, cut: Callable[[Piece], Iterator[Piece]]) -> TensorEntry:
    pieces, replicas, stale = (
        tuple(part for piece in found for part in cut(piece)) for found in (entry.pieces, entry.replicas, entry.stale_copies)
    )
    return replace(entry, pieces=pieces, replicas=replicas, stale_copies=stale, factors=factors)


def _counted(piece: Piece, factors: Factors, item_bytes: int) -> Iterator[Piece]:
    for part, counted in factored(piece.box, factors):

        def moved(extent: Extent, part: Box = part, counted: Box = counted) -> Extent:
            strides = extent.strides or row_major_strides(piece.box.sizes)
            steps = tuple(s * n for s, own in zip(strides, factors, strict=True) for n in row_major_strides(own))
            return part_of(extent, _distance(part.offsets, piece.box.offsets, strides), counted.sizes, steps, item_bytes)

        yield _with_extents(piece, counted, moved)


def _uncounted(piece: Piece, factors: Factors, item_bytes: int) -> Iterator[Piece]:
    strides = [e.strides or row_major_strides(piece.box.sizes) for e in (piece.extent, *piece.mean_with)]
    runs, last, dim = [], [], 0
    for own in factors:
        runs.append(list(_runs(piece.box, own, dim, strides)))
        dim += len(own)
        last.append(dim - 1)
    for chosen in product(*runs):
        box = Box(tuple(place for place, _, _ in chosen), tuple(size for _, size, _ in chosen))
        index = tuple(n for _, _, begin in chosen for n in begin)

        def moved(extent: Extent, box: Box = box, index: tuple[int, ...] = index) -> Extent:
            own = extent.strides or row_major_strides(piece.box.sizes)
            steps = tuple(own[dim] for dim in last)
            return part_of(extent, _distance(index, piece.box.offsets, own), box.sizes, steps, item_bytes)

        yield _with_extents(piece, box, moved)


def _runs(
    box: Box, own: tuple[int, ...], dim: int, strides: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(place, length, index where it begins) of the runs of one dimension that have one step where they are stored.

    Args: own: factors of the dimension, which are those of the box from `dim` on.
    """
    offsets, sizes = box.offsets[dim : dim + len(own)], box.sizes[dim : dim + len(own)]
    first = len(own) - 1
    while first and sizes[first] == own[first]:
        length, step = prod(own[first:]), dim + len(own) - 1
        if sizes[first - 1] != 1 and any(s[dim + first - 1] != s[step] * length for s in strides):
            break
        first -= 1
    places = row_major_strides(own)
    for outer in indices(Box(offsets[:first], sizes[:first])):
        index = (*outer, *offsets[first:])
        yield sum(i * n for i, n in zip(index, places, strict=True)), prod(sizes[first:]), index


def _with_extents(piece: Piece, box: Box, moved: Callable[[Extent], Extent]) -> Piece:
    return replace(piece, box=box, extent=moved(piece.extent), mean_with=tuple(map(moved, piece.mean_with)))


def _distance(index: Sequence[int], start: Sequence[int], strides: Sequence[int]) -> int:
    return sum((i - o) * s for i, o, s in zip(index, start, strides, strict=True))


def part_of(extent: Extent, start: int, sizes: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> Extent:
    """Where a box lies that begins `start` elements into an extent, with these elements between its neighbours."""
    length = span_elements(sizes, strides) * item_bytes
    dense = is_row_major(sizes, strides)
    return replace(extent, offset=extent.offset + start * item_bytes, length=length, strides=None if dense else strides)
