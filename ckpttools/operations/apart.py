"""Takes layers and experts that are stacked in one tensor apart: one tensor for each, as boxes of the stored one.

Megatron's sharded checkpoints stack the layers of a model along a first dimension, and experts along a second; the
files of a rank name each by its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby, product

from ckpttools.containers.parts import StoredTensor
from ckpttools.geometry import intersect
from ckpttools.layouts.families import MODEL
from ckpttools.model import VOID, Box, Piece, TensorEntry, TensorSpec

_STACK = re.compile(r"(?P<before>(?:.*\.)?(?:encoder|decoder)\.layers)\.(?P<rest>(?!\d+\.).+)")
_EXPERTS = "mlp.experts.experts."


def layers_apart(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors by name, with one for each layer and expert in the place of each stack. Pure."""
    found: dict[str, TensorEntry] = {}
    for stack, group in groupby(tensors.items(), key=_stack_of):
        if not stack:
            found |= dict(group)
            continue
        members = [entry for _, entry in group]
        for layer in range(stack[1]):
            for entry in members:
                found |= {part.name: part for part in _parts(entry, layer)}
    return found


def _stack_of(item: tuple[str, TensorEntry]) -> tuple[str, int] | None:
    """(list of layers, how many) of a stacked tensor; None for one that is not."""
    name, entry = item
    match = _STACK.fullmatch(name)
    axes = 2 if match and _EXPERTS in match["rest"] else 1
    is_stack = match is not None and entry.family == MODEL and len(entry.spec.shape) > axes - 1
    return (match["before"], entry.spec.shape[0]) if match is not None and is_stack and not entry.spec.dtype.is_sub_byte else None


def _parts(entry: TensorEntry, layer: int) -> Iterator[TensorEntry]:
    """One layer of a stacked tensor, or each expert of it."""
    match = _STACK.fullmatch(entry.name)
    if match is None:
        return
    rest = match["rest"]
    counts = (entry.spec.shape[1],) if _EXPERTS in rest and len(entry.spec.shape) > 1 else ()
    for index in product((layer,), *map(range, counts)):
        inner = rest.replace(_EXPERTS, f"mlp.experts.local_experts.{index[-1]}.") if counts else rest
        name = f"{match['before']}.{layer}.{inner}"
        spec = TensorSpec(name, entry.spec.dtype, entry.spec.shape[len(index) :])
        pieces = tuple(p for piece in entry.pieces if (p := _slice(entry, piece, index)) is not None)
        replicas = tuple(p for piece in entry.replicas if (p := _slice(entry, piece, index)) is not None)
        yield replace(entry, spec=spec, path=(name,), pieces=pieces, replicas=replicas)


def _slice(entry: TensorEntry, piece: Piece, index: tuple[int, ...]) -> Piece | None:
    """What a piece holds of one index of the leading dimensions."""
    axes = len(index)
    inside = [i - offset for i, offset in zip(index, piece.box.offsets, strict=False)]
    if any(not 0 <= i < size for i, size in zip(inside, piece.box.sizes, strict=False)):
        return None
    sizes = piece.box.sizes[axes:]
    whole = StoredTensor(entry.spec.dtype, piece.box.sizes, piece.extent)
    extent = whole.part(Box((*inside, *(0 for _ in sizes)), (*(1 for _ in inside), *sizes)))
    strides = None if extent.strides is None else extent.strides[axes:]
    return Piece(Box(piece.box.offsets[axes:], sizes), replace(extent, strides=strides), piece.rank)


def with_rows(entry: TensorEntry, rows: int) -> TensorEntry:
    """A tensor with so many rows, under the same name: without its last ones, or with zeros for further ones. Pure."""
    whole = Box((0,) * len(entry.spec.shape), (rows, *entry.spec.shape[1:]))

    def within(piece: Piece) -> Piece | None:
        shared = intersect(piece.box, whole)
        if shared is None or not shared.volume:
            return None
        inside = tuple(o - p for o, p in zip(shared.offsets, piece.box.offsets, strict=True))
        stored = StoredTensor(entry.spec.dtype, piece.box.sizes, piece.extent)
        return Piece(shared, stored.part(Box(inside, shared.sizes)), piece.rank)

    pieces = tuple(p for piece in entry.pieces if (p := within(piece)) is not None)
    replicas = tuple(p for piece in entry.replicas if (p := within(piece)) is not None)
    more = rows - entry.spec.shape[0]
    if more > 0 and pieces:
        others = entry.spec.shape[1:]
        box = Box((entry.spec.shape[0], *(0 for _ in others)), (more, *others))
        extent = replace(
            pieces[0].extent, length=entry.spec.dtype.item_bytes, strides=(0, *(0 for _ in others)), transforms=(VOID,)
        )
        pieces += (Piece(box, extent, pieces[0].rank),)
    return replace(entry, spec=replace(entry.spec, shape=whole.sizes), pieces=pieces, replicas=replicas, stale_copies=())
