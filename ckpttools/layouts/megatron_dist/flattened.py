"""Flattened optimizer state of megatron-core up to 0.14, in its true shape. Pure.

A distributed optimizer cuts the row-major elements of a rank's part of a parameter into ranges. They were saved under the
shape (fragments along each dimension..., elements of one fragment): a parameter of (32, 48) cut along its columns into two
is `[1, 2, 768]`, whose bytes in that shape are in another order than the parameter's. The true shape is in `mcore_data`
(0.12), or is that of the parameter itself. An element range of a fragment is at most 2 * rank - 1 boxes.

Source: NVIDIA/Megatron-LM, megatron/core/dist_checkpointing/strategies/torch.py (sharded_tensor_to_torch_sharded_tensor),
core_v0.9.0 and core_v0.12.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from ckpttools.findings import Finding
from ckpttools.geometry import flat_range_to_boxes
from ckpttools.model import Box, ItemPart, Piece, TensorEntry
from ckpttools.pickles.views import mapping_items, sequence_items

_STATE = re.compile(r"(?:.*\.)?optimizer\.state\.[^.]+\.(?P<parameter>.+)")
_SHAPE_KEY = "nd_reformulated_orig_global_shape"


def true_shapes(mcore_data: object) -> dict[str, tuple[int, ...]]:
    """Name -> the shape that megatron-core recorded of a tensor that it stored flattened."""
    shapes = {}
    for name, row in mapping_items(mcore_data) or []:
        stated = dict(mapping_items(row) or []).get(_SHAPE_KEY)
        sizes = sequence_items(stated) if stated is not None else None
        if isinstance(name, str) and sizes and all(type(n) is int and n >= 0 for n in sizes):
            shapes[name] = tuple(n for n in sizes if isinstance(n, int))
    return shapes


def unflatten(tensors: Sequence[TensorEntry], stated: Mapping[str, tuple[int, ...]]) -> tuple[list[TensorEntry], list[Finding]]:
    """The tensors, flattened ones in their true shape.

    Args: stated: what `true_shapes` found. Where it has no shape, that of the parameter with which a state goes is taken,
        if the stored shape is a cut of it.
    """
    shapes = {t.name: t.spec.shape for t in tensors}
    found, findings = [], []
    for entry in tensors:
        state = _STATE.fullmatch(entry.name)
        of_parameter = shapes.get(state["parameter"]) if state is not None else None
        shape = stated.get(entry.name, of_parameter)
        if shape is None or shape == entry.spec.shape:
            found.append(entry)
            continue
        true = _reshaped(entry, shape)
        if entry.name in stated and (true is None or of_parameter not in (None, shape)):
            expected = f"a cut of {list(shape)}, as mcore_data states"
            told = f"a parameter of {list(of_parameter)}" if true and of_parameter else f"shape {list(entry.spec.shape)}"
            findings.append(Finding("piece-mismatch", entry.name, expected, told))
        found.append(true or entry)
    return found, findings


def _reshaped(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry | None:
    """The tensor with its true shape; None when the stored one is not a flattened cut of it."""
    *fragments, flat = entry.spec.shape or (0,)
    if len(fragments) != len(shape) or not all(f and n % f == 0 for n, f in zip(shape, fragments, strict=True)):
        return None
    local = tuple(n // f for n, f in zip(shape, fragments, strict=True))
    if prod(local) != flat:
        return None
    pieces = [_boxes(piece, local) for piece in entry.pieces]
    replicas = [_boxes(piece, local) for piece in entry.replicas]
    if any(p is None for p in (*pieces, *replicas)):
        return None
    return replace(
        entry,
        spec=replace(entry.spec, shape=shape),
        pieces=tuple(p for cut in pieces for p in cut or ()),
        replicas=tuple(p for cut in replicas for p in cut or ()),
    )


def _boxes(piece: Piece, local: tuple[int, ...]) -> list[Piece] | None:
    """The boxes of the true tensor that a run of one fragment holds; None for a piece that is no run."""
    *fragment, start = piece.box.offsets
    *ones, count = piece.box.sizes
    if any(n != 1 for n in ones) or start + count > prod(local):
        return None
    corner = tuple(i * n for i, n in zip(fragment, local, strict=True))
    found, first = [], 0
    for box in flat_range_to_boxes(local, start, start + count):
        part = ItemPart(piece.box.sizes, first)
        moved = Box(tuple(c + o for c, o in zip(corner, box.offsets, strict=True)), box.sizes)
        found.append(replace(piece, box=moved, extent=replace(piece.extent, part=part)))
        first += box.volume
    return found
