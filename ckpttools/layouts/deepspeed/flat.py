"""How parameters lie in flat vectors: what the reader expects and the writer makes. Pure.

ZeRO 1 and 2 put the parameters of a group one after the other and cut the whole in equal parts, one per rank; ZeRO 3 cuts every
parameter by itself, and makes sub-groups of a group. Read `part_size` and `share_of` first.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/zero/stage_1_and_2.py (`_round_robin_reorder`, `get_data_parallel_partitions`),
deepspeed/runtime/zero/stage3.py (`_create_fp16_sub_groups`), v0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

DEFAULT_SUB_GROUP = 10**9
"""Elements of a rank's parts in one sub-group of ZeRO 3, where the configuration does not say."""
_ALIGNMENT_PER_RANK = 2
"""Elements: a group of ZeRO 1 and 2 is padded to a multiple of twice the number of ranks."""


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter in a group's flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def members_of(shapes: Iterable[tuple[str, tuple[int, ...]]], paddings: Sequence[int] = ()) -> list[Member]:
    """The parameters of a group where they lie in its vector.

    Args: paddings: elements after each parameter; none after those that are not listed.
    """
    found, start = [], 0
    for i, (name, shape) in enumerate(shapes):
        stop = start + prod(shape)
        found.append(Member(name, shape, start, stop))
        start = stop + (paddings[i] if i < len(paddings) else 0)
    return found


def part_size(total: int, ranks: int) -> int:
    """Elements in each of the equal parts of a group of ZeRO 1 and 2, padding included."""
    step = _ALIGNMENT_PER_RANK * ranks
    return -(-total // step) * step // ranks


def slices_of(members: Iterable[Member], low: int, size: int) -> dict[str, tuple[int, int]]:
    """(first element in the part, number of elements) of each parameter in the part [low, low + size) of a vector."""
    found = {}
    for member in members:
        start, stop = max(member.start, low), min(member.stop, low + size)
        if start < stop:
            found[member.name] = (start - low, stop - start)
    return found


def share_of(numel: int, ranks: int) -> int:
    """Elements in each of the equal parts of a parameter of ZeRO 3, padding included."""
    return -(-numel // ranks)


def sub_groups(shapes: Mapping[str, tuple[int, ...]], most: int, ranks: int) -> list[list[str]]:
    """A group of ZeRO 3 in its sub-groups: each ends with the parameter that makes a rank's parts in it as large as `most`."""
    found: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        found[-1].append(name)
        held += share_of(prod(shape), ranks)
        if held >= most:
            found.append([])
            held = 0
    return [g for g in found if g]


def join_sub_groups(groups: Iterable[Mapping[str, tuple[int, ...]]], most: int, ranks: int) -> list[list[str]]:
    """The groups that sub-groups are of: one ends where a sub-group is smaller than it could be."""
    found: list[list[str]] = [[]]
    for shapes in groups:
        found[-1] += shapes
        if sum(share_of(prod(s), ranks) for s in shapes.values()) < most:
            found.append([])
    return [g for g in found if g]


def round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """The order in which every `ranks`-th is put together: [0, n, 2n, ..., 1, n + 1, ...]."""
    return [n for first in range(ranks) for n in names[first::ranks]]


def undo_round_robin(names: Sequence[str], ranks: int) -> list[str]:
    """The order before it."""
    order = [i for first in range(ranks) for i in range(first, len(names), ranks)]
    found = [""] * len(names)
    for place, name in zip(order, names, strict=True):
        found[place] = name
    return found
