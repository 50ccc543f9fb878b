"""The optimizer's part of each data-parallel rank: cut from one vector per group (ZeRO 1, 2), or per parameter (ZeRO 3). Pure.

Experts have fewer parts than there are ranks: each expert-parallel rank has a vector of its own, of experts that are numbered
from 0 on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpttools.layouts.deepspeed.experts import DATA_FIRST, experts_of
from ckpttools.layouts.deepspeed.flat import Member, members_of, part_size, round_robin, share_of, slices_of, sub_groups
from ckpttools.layouts.deepspeed.names import optimizer_name
from ckpttools.layouts.deepspeed.write.given import MASTER, Given, Group
from ckpttools.layouts.deepspeed.write.pickled import Pickled, Placed, flat_boxes, ordered
from ckpttools.layouts.deepspeed.write.settings import numbers, optimizer_settings, param_groups, vector_dtype, vector_keys
from ckpttools.layouts.families import EXTRA_STATE, OPTIMIZER
from ckpttools.model import ArrangedFile
from ckpttools.pickles.records import Global, Object


@dataclass(frozen=True, slots=True)
class Shared:
    """The vector of a group that some data-parallel ranks share, as one of them sees it."""

    names: tuple[str, ...]
    """Of the parameters in it, in order; experts by their global numbers."""
    stored: tuple[str, ...]
    """As the files of the rank have them."""
    parts: int
    """Over how many ranks it is spread."""
    index: int
    """Which of the parts the rank has."""


def optimizer_files(given: Given) -> Iterable[ArrangedFile]:
    """One of each data-parallel rank."""
    values = given.entries.values
    common = {k: values[EXTRA_STATE, k] for k in ("ds_config", "ds_version") if (EXTRA_STATE, k) in values}
    for rank in range(given.dp):
        pickled = Pickled()
        make = _stage3_state if given.stage == 3 else _stage12_state
        value = {"optimizer_state_dict": make(given, pickled, rank), **common}
        yield pickled.file(optimizer_name(given.mp, rank, is_bf16=given.entries.is_bf16), value)


def vector_of(given: Given, group: Group, rank: int) -> Shared:
    """The vector of a group of ZeRO 1 and 2 that a data-parallel rank has a part of; shuffled with round robin."""
    names, parts, index, stored = group.names, given.dp, rank, {}
    if group.is_of_experts:
        ranks = given.entries.grid.ep
        parts = given.dp // ranks
        is_data_first = given.entries.config.get(DATA_FIRST) is True
        ep, index = divmod(rank, parts) if is_data_first else (rank % ranks, rank // ranks)
        stored = experts_of(names, given.entries.experts, ranks, ep)
        names = tuple(n for n in names if n in stored)
    if given.stage == 2 and given.zero_config.get("round_robin_gradients") is True:
        names = tuple(round_robin(names, parts))
    return Shared(names, tuple(stored.get(n, n) for n in names), parts, index)


def flat_groups(given: Given) -> list[tuple[dict[str, tuple[int, ...]], int]]:
    """(stored name -> shape, place of the group) of what is stored as one, as the first data-parallel rank sees it."""
    if given.stage == 3:
        return [(given.shapes(sub), g.place) for g in given.groups for sub in _sub_groups(given, g)]
    found = []
    for group in given.groups:
        shared = vector_of(given, group, 0)
        shapes = {stored: given.shape(name) for name, stored in zip(shared.names, shared.stored, strict=True)}
        found.append((shapes, group.place))
    return found


def _sub_groups(given: Given, group: Group) -> list[list[str]]:
    return sub_groups(given.shapes(group.names), given.sub_group_size, given.dp)


def _stage12_state(given: Given, pickled: Pickled, rank: int) -> dict[str, object]:
    masters: list[object] = []
    paddings: list[int] = []
    counts: list[int] = []
    mappings: list[object] = []
    states: dict[int, object] = {}
    # an elastic checkpoint has states without padding, and no settings beside them
    is_elastic = (OPTIMIZER, "param_groups") not in given.entries.values
    for g, group in enumerate(given.groups):
        shared = vector_of(given, group, rank)
        members = members_of((name, given.shape(name)) for name in shared.names)
        total = members[-1].stop if members else 0
        size = part_size(total, shared.parts)
        low = shared.index * size
        held = max(0, min(total - low, size))
        paddings.append(size - held)
        counts.append(shared.parts)
        masters.append(_vector(given, pickled, members, MASTER, low, held, held))
        length = held if is_elastic else size
        states[g] = {
            key: _vector(given, pickled, members, key, low, held, length) for key in vector_keys(given, shared.names)
        } | numbers(given, pickled, group)
        mappings.append(_slices(members, dict(zip(shared.names, shared.stored, strict=True)), low, size))
    rigid = {} if is_elastic else {"state": states, "param_groups": param_groups(given, [[g] for g in states])}
    return optimizer_settings(given.entries) | {
        "base_optimizer_state": rigid or list(states.values()),
        "single_partition_of_fp32_groups": masters,
        "group_paddings": paddings,
        "partition_count": counts,
        "param_slice_mappings": mappings,
    }


def _vector(given: Given, pickled: Pickled, members: Sequence[Member], key: str, low: int, held: int, length: int) -> Object:
    """The elements [low, low + held) of a group's vector, and zeros after them."""
    boxes: list[Placed] = []
    for member in members:
        start, stop = max(low, member.start), min(low + held, member.stop)
        if start < stop:
            tensor = given.states[member.name][key]
            boxes += flat_boxes(tensor, start - member.start, stop - member.start, start - low)
    return pickled.flat(vector_dtype(given, [m.name for m in members], key), length, boxes)


def _slices(members: Sequence[Member], stored: dict[str, str], low: int, size: int) -> Object:
    """`param_slice_mappings`: where each parameter's elements lie in the part."""
    found = {}
    for name, (start, numel) in slices_of(members, low, size).items():
        address = Object(Global("deepspeed.utils.tensor_fragment", "fragment_address"), (), "newobj")
        address.state = {"numel": numel, "start": start}
        found[stored[name]] = address
    return ordered(found)


def _stage3_state(given: Given, pickled: Pickled, rank: int) -> dict[str, object]:
    masters: list[object] = []
    states: dict[int, object] = {}
    positions: list[list[int]] = []
    for group in given.groups:
        own = []
        for sub_group in _sub_groups(given, group):
            own.append(len(masters))
            vectors: dict[str, object] = {}
            for key in (MASTER, *vector_keys(given, sub_group)):
                boxes: list[Placed] = []
                at = 0
                for name in sub_group:
                    tensor = given.states[name][key]
                    part = share_of(tensor.spec.volume, given.dp)
                    boxes += flat_boxes(tensor, rank * part, (rank + 1) * part, at)
                    at += part
                vectors[key] = pickled.flat(vector_dtype(given, sub_group, key), at, boxes)
            masters.append(vectors.pop(MASTER))
            states[own[-1]] = numbers(given, pickled, group) | vectors
        positions.append(own)
    settings = {k: v for k, v in optimizer_settings(given.entries).items() if k not in ("clip_grad", "ds_version")}
    return settings | {
        "partition_count": given.dp,
        "optimizer_state_dict": {"state": states, "param_groups": param_groups(given, positions)},
        "fp32_flat_groups": masters,
    }
