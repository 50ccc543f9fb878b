"""Which rank writes a box that several ranks hold: the one with the smallest plan so far, as torch's planner has it.

Source: pytorch/pytorch, torch/distributed/checkpoint/_dedup_save_plans.py and planner.py (`WriteItem.tensor_storage_size`,
the bytes of the whole tensor and not of the box), v2.13.0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from heapq import merge
from typing import TypeVar

from ckpttools.model import Box, Mesh
from ckpttools.placement.local import Holders, PlacedTensor, distinct_holders

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
    return _share_out(((item, length_bytes[item], ranks) for item, ranks in holders.items()), len(plans))


def _share_out(items: Iterable[tuple[Key, int, Iterable[int]]], ranks: int) -> dict[Key, int]:
    """The rank that writes each of some items (item, bytes, ranks that hold it in order), taken in their order."""
    totals = [0] * ranks
    owner: dict[Key, int] = {}
    for item, length_bytes, holders in items:
        owner[item] = min(holders, key=totals.__getitem__)
        totals[owner[item]] += length_bytes or 1
    return owner


def owners(tensors: Sequence[PlacedTensor], mesh: Mesh) -> Mapping[str, dict[Box, int]]:
    """Per output name: each box that some rank holds, and the rank that writes it, by `assign`. Pure.

    A box without elements is there, too, as torch records it, but where a box with elements begins at the same place:
    torch tells boxes apart by their offsets alone.
    """
    found: dict[str, dict[Box, int]] = {tensor.spec.name: {} for tensor in tensors}
    length_bytes = {tensor.spec.name: tensor.spec.length_bytes for tensor in tensors}
    held: dict[tuple[str, Box], list[Holders]] = {}
    named: dict[tuple[str, Box], tuple[int, int, int]] = {}
    """By box: (the first rank that names it, the tensor, the part), which is the order in which boxes are named."""
    for number, tensor in enumerate(tensors):
        for holders in distinct_holders(tensor.placement, mesh):
            local = tensor.local(mesh, holders.first)
            for i, part in enumerate(local.parts if local else ()):
                held.setdefault((tensor.spec.name, part.box), []).append(holders)
                named.setdefault((tensor.spec.name, part.box), (holders.first, number, i))
    filled = {(name, box.offsets) for name, box in held if box.volume}
    items = (
        (item, length_bytes[item[0]], merge(*held[item]))
        for item in sorted(held, key=named.__getitem__)
        if item[1].volume or (item[0], item[1].offsets) not in filled
    )
    for (name, box), rank in _share_out(items, mesh.ranks).items():
        found[name][box] = rank
    return found
