"""Boxes of one tensor that become boxes of another: what every conversion of names comes down to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools.errors import ConversionError
from ckpttools.geometry import intersect, row_major_strides
from ckpttools.model import Box, Extent, Piece, TensorEntry, TensorSpec
from ckpttools.names.factors import Factors, part_of, refactored


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a source tensor and where it goes."""

    source: str
    """Name of the source tensor."""
    box: Box
    """Of the source tensor."""
    offsets: tuple[int, ...]
    """Where the box begins in the target."""
    axes: tuple[int | None, ...]
    """Per dimension of the target's box the dimension of the source that it is; None for one that the source has not, of size 1.
    Dimensions of the source that are not named have size 1 in the box."""
    factors: Factors = ()
    """Of the source's dimensions, where the box counts in them."""

    @property
    def target(self) -> Box:
        """The box that it fills in the target."""
        return Box(self.offsets, tuple(1 if axis is None else self.box.sizes[axis] for axis in self.axes))


@dataclass(frozen=True, slots=True)
class Made:
    """A target tensor, made of moves that tile it."""

    name: str
    shape: tuple[int, ...]
    moves: tuple[Move, ...]
    factors: Factors = ()
    """Of the target's dimensions, where the moves count in them."""

    @property
    def counted(self) -> tuple[int, ...]:
        """The shape in which the moves count."""
        return tuple(n for own in self.factors for n in own) if self.factors else self.shape


def assemble(made: Made, sources: Mapping[str, TensorEntry]) -> TensorEntry:
    """The target tensor, its pieces being those of its sources in other places.

    Raises: ConversionError: when its sources have different dtypes, or elements of less than a byte that would be cut.
    """
    entries = [sources[name] for name in dict.fromkeys(move.source for move in made.moves)]
    dtypes = {entry.spec.dtype for entry in entries}
    if len(dtypes) != 1:
        listed = ", ".join(f"{entry.name} is {entry.spec.dtype}" for entry in entries[:4])
        raise ConversionError(f"tensors of different dtypes cannot become one: {made.name}", found=listed)
    (dtype,) = dtypes
    spec = TensorSpec(made.name, dtype, made.shape)
    whole = (
        len(made.moves) == 1
        and not made.factors
        and entries[0].spec.shape == made.shape
        and made.moves[0].axes == tuple(range(len(made.shape)))
    )
    if whole:
        return replace(entries[0], spec=spec, path=(made.name,))
    if dtype.is_sub_byte:
        raise ConversionError(f"a {dtype} tensor cannot be cut: {entries[0].name}")
    taken = [(move, refactored(sources[move.source], move.factors)) for move in made.moves]
    pieces = [p for move, source in taken for p in _moved(source.pieces, move, dtype.item_bytes)]
    replicas = [p for move, source in taken for p in _moved(source.replicas, move, dtype.item_bytes)]
    stale = [p for move, source in taken for p in _moved(source.stale_copies, move, dtype.item_bytes)]
    return TensorEntry(
        spec,
        (made.name,),
        tuple(pieces),
        tuple(replicas),
        shape_is_declared=all(entry.shape_is_declared for entry in entries),
        family=entries[0].family,
        replicas_may_differ=bool(replicas) and all(entry.replicas_may_differ for entry in entries if entry.replicas),
        stale_copies=tuple(stale),
        factors=made.factors,
    )


def _moved(pieces: Sequence[Piece], move: Move, item_bytes: int) -> list[Piece]:
    """The parts of some pieces that a move takes, in their new places."""
    found = []
    for piece in pieces:
        shared = intersect(piece.box, move.box)
        if shared is None or (shared.volume == 0 and move.box.volume):
            continue
        offsets = tuple(
            start if axis is None else start + shared.offsets[axis] - move.box.offsets[axis]
            for start, axis in zip(move.offsets, move.axes, strict=True)
        )
        sizes = tuple(1 if axis is None else shared.sizes[axis] for axis in move.axes)
        extent, *others = (_extent(e, piece.box, shared, move.axes, sizes, item_bytes) for e in (piece.extent, *piece.mean_with))
        found.append(Piece(Box(offsets, sizes), extent, piece.rank, tuple(others)))
    return found


def _extent(
    extent: Extent, box: Box, shared: Box, axes: tuple[int | None, ...], sizes: tuple[int, ...], item_bytes: int
) -> Extent:
    """Where a part of a stored box lies, with its dimensions in another order."""
    strides = extent.strides or row_major_strides(box.sizes)
    start = sum((o - p) * s for o, p, s in zip(shared.offsets, box.offsets, strides, strict=True))
    return part_of(extent, start, sizes, tuple(1 if axis is None else strides[axis] for axis in axes), item_bytes)
