"""Buckets of `dp_reshardable` optimizer state: what lies between the parameters was never set, and counts as zeros. Pure.

The distributed optimizer lays the parameters of a model-parallel rank into flat buckets, each starting at a multiple of 64
elements. On saving, each parameter (or the share of it that a data-parallel rank has) is a chunk, and each gap is a chunk of
uninitialised memory: two saves of one state differ there. No manifest says which chunks are gaps. It follows from
this: a chunk that starts at a multiple of 64 is a parameter's; one that starts elsewhere goes on with a parameter only
where the share of another rank begins.

Source: NVIDIA/Megatron-LM, megatron/core/optimizer/distrib_optimizer.py (sharded_param_state_dp_reshardable) and
megatron/core/distributed/param_and_grad_buffer.py, core_v0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckpttools.findings import NOTE, WARNING, Finding
from ckpttools.model import VOID, Piece, TensorEntry

_BUCKET = re.compile(r"(?:.*\.)?optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_\d+\.dtype_.+\.bucket_idx_\d+\.\w+")
_ALIGNMENT = 64
"""Elements; where each parameter of a bucket starts."""
_MAX_NAMED = 8


@dataclass(slots=True)
class _Gaps:
    """What was found of gaps, over all buckets."""

    tensors: int = 0
    gaps: int = 0
    elements: int = 0
    first: str = ""


def mask_gaps(tensors: Sequence[TensorEntry], where: str) -> tuple[list[TensorEntry], list[Finding]]:
    """The tensors, with the gaps of buckets marked as void, and what is to be said about it."""
    found, findings, gaps = [], [], _Gaps()
    for entry in tensors:
        is_bucket = len(entry.spec.shape) == 1 and _BUCKET.fullmatch(entry.name) is not None
        masked, unsure = _masked(entry, gaps) if is_bucket else (entry, [])
        found.append(masked)
        for piece in unsure[:_MAX_NAMED]:
            place = f"elements [{piece.box.offsets[0]}, {piece.box.stops[0]}) of {entry.name}"
            told = "a chunk where one rank's share ends, which may be either; taken as part of a parameter"
            findings.append(Finding("undefined-elements", place, "a parameter or a gap", told, severity=WARNING))
    if gaps.gaps:
        told = f"{gaps.elements} in {gaps.gaps} gaps of {gaps.tensors} tensors, the first in {gaps.first}; they count as zeros"
        findings.append(Finding("undefined-elements", where, "elements that were set before saving", told, severity=NOTE))
    return found, findings


def _masked(entry: TensorEntry, gaps: _Gaps) -> tuple[TensorEntry, list[Piece]]:
    """A bucket with its gaps marked, and the pieces of which it cannot be told."""
    order = sorted(entry.pieces, key=lambda p: p.box.offsets)
    kinds = {id(piece): kind for piece, kind in zip(order, _kinds(order), strict=True)}
    voids = [p for p in order if kinds[id(p)] == "gap"]
    unsure = [p for p in order if kinds[id(p)] == "unsure"]
    if not voids:
        return entry, unsure
    gaps.tensors += 1
    gaps.gaps += len(voids)
    gaps.elements += sum(p.box.volume for p in voids)
    gaps.first = gaps.first or entry.name
    pieces = tuple(_void(p) if kinds[id(p)] == "gap" else p for p in entry.pieces)
    return replace(entry, pieces=pieces), unsure


def _void(piece: Piece) -> Piece:
    return replace(piece, extent=replace(piece.extent, transforms=(*piece.extent.transforms, VOID)))


def _kinds(order: Sequence[Piece]) -> list[str]:
    """Per piece, by offset: `data`, `gap`, or `unsure`."""
    kinds: list[str] = []
    for i, piece in enumerate(order):
        start, stop = piece.box.offsets[0], piece.box.stops[0]
        aligned = -(-start // _ALIGNMENT) * _ALIGNMENT
        before = order[i - 1] if i else None
        is_new_share = before is None or before.rank != piece.rank or piece.rank is None
        if start == aligned or stop > aligned:
            kinds.append("data")
        elif not is_new_share or (kinds and kinds[-1] == "gap"):
            kinds.append("gap")
        elif stop < aligned and (i + 1 == len(order) or order[i + 1].rank == piece.rank):
            kinds.append("data")  # what is behind it in the same share is the gap
        else:
            kinds.append("unsure")
    return kinds
