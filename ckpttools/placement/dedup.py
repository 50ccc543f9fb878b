"""Which rank writes a box that several ranks hold: the one with the smallest plan so far, as torch's planner has it.

Source: pytorch/pytorch, torch/distributed/checkpoint/_dedup_save_plans.py and planner.py (`WriteItem.tensor_storage_size`,
the bytes of the whole tensor and not of the box), v2.13.0.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from ckpttools.model import Box, Mesh
from ckpttools.placement.local import PlacedTensor

Key = TypeVar("Key", bound=Hashable)


def assign(plans: Sequence[Sequence[tuple[Key, int]]]) -> dict[Key, int]:
    """The rank that writes each item, when each of `plans` (one per rank) names items and their bytes. Pure.

    Items are taken in the order in which the ranks name them, rank 0's first; each goes to the rank that names it and has
    least so far, the lower one of equals.

    Args: plans: (item, bytes) in the order of the state dict; 0 for an item that is no tensor, which counts as 1 byte.
    """
    holders: dict[Key, list[int]] = {}
    length_bytes: dict[Key, int] = {}
    for rank, plan in enumerate(plans):
        for item, count in plan:
            ranks = holders.setdefault(item, [])
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
            length_bytes[item] = count
    totals = [0] * len(plans)
    owner: dict[Key, int] = {}
    for item, ranks in holders.items():
        owner[item] = min(ranks, key=totals.__getitem__)
        totals[owner[item]] += length_bytes[item] or 1
    return owner


def owners(tensors: Sequence[PlacedTensor], mesh: Mesh) -> Mapping[str, dict[Box, int]]:
    """Per output name: each box that some rank holds, and the rank that writes it, by `assign`. Pure.

    A box without elements is there, too, as torch records it, but where a box with elements begins at the same place:
    torch tells boxes apart by their offsets alone.
    """
    found: dict[str, dict[Box, int]] = {tensor.spec.name: {} for tensor in tensors}
    plans: list[list[tuple[tuple[str, Box], int]]] = [
        [
            ((tensor.spec.name, part.box), tensor.spec.length_bytes)
            for tensor in tensors
            if (local := tensor.local(mesh, rank)) is not None
            for part in local.parts
        ]
        for rank in range(mesh.ranks)
    ]
    filled = {(name, box.offsets) for plan in plans for (name, box), _ in plan if box.volume}
    plans = [[item for item in plan if item[0][1].volume or (item[0][0], item[0][1].offsets) not in filled] for plan in plans]
    for (name, box), rank in assign(plans).items():
        found[name][box] = rank
    return found
