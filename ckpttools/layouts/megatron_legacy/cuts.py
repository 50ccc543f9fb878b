"""Where a rank's share of a tensor lies in the whole one: a list of (box of the share, box of the whole). Pure.

A tensor of one block is cut into runs of a dimension. A tensor of several blocks (gate and up, query and key and value)
has each block cut by itself, so a rank's share is one box per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttools.model import Box


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank holds of a tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    boxes: tuple[tuple[Box, Box], ...]
    """(box of the share, box of the whole tensor), of equal sizes; they tile the share."""


def share(shape: Sequence[int], dim: int | None, blocks: Sequence[int], rank: int, ranks: int) -> Share:
    """Where the share of `rank` lies, from the shape that each of `ranks` ranks holds.

    Args: blocks: sizes along `dim` of the blocks of the share; they add up to `shape[dim]`.
    """
    whole = tuple(shape)
    if dim is None:
        box = Box((0,) * len(whole), whole)
        return Share(whole, ((box, box),))
    boxes = []
    local = before = 0
    for size in blocks:
        sizes = (*whole[:dim], size, *whole[dim + 1 :])
        boxes.append((Box(_at(whole, dim, local), sizes), Box(_at(whole, dim, before + rank * size), sizes)))
        local += size
        before += ranks * size
    return Share((*whole[:dim], before, *whole[dim + 1 :]), tuple(boxes))


def _at(shape: Sequence[int], dim: int, offset: int) -> tuple[int, ...]:
    return tuple(offset if d == dim else 0 for d in range(len(shape)))
