"""The optimizer's part of each data-parallel rank: cut from one vector per group (ZeRO 1, 2), or per parameter (ZeRO 3). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpttools.layouts.deepspeed.flat import Member, members_of, part_size, round_robin, share_of, slices_of, sub_groups
from ckpttools.layouts.deepspeed.names import optimizer_name
from ckpttools.layouts.deepspeed.write.given import Given
from ckpttools.layouts.deepspeed.write.pickled import Pickled, Placed, flat_boxes, ordered
from ckpttools.layouts.deepspeed.write.settings import numbers, optimizer_settings, param_groups, vector_dtype, vector_keys
from ckpttools.layouts.families import EXTRA_STATE, OPTIMIZER
from ckpttools.model import ArrangedFile
from ckpttools.pickles.records import Global, Object


def optimizer_files(given: Given) -> Iterable[ArrangedFile]:
    """One of each data-parallel rank."""
    common = {k: given.values[EXTRA_STATE, k] for k in ("ds_config", "ds_version") if (EXTRA_STATE, k) in given.values}
    for rank in range(given.dp):
        pickled = Pickled()
        make = _stage3_state if given.stage == 3 else _stage12_state
        value = {"optimizer_state_dict": make(given, pickled, rank), **common}
        yield pickled.file(optimizer_name(0, rank, is_bf16=given.is_bf16), value)


def flat_groups(given: Given) -> list[list[str]]:
    """The groups as they are stored: sub-groups in ZeRO 3, shuffled in ZeRO 2 with round robin."""
    if given.stage == 3:
        return [sub for group in given.groups for sub in _sub_groups(given, group)]
    if given.stage == 2 and given.zero_config.get("round_robin_gradients") is True:
        return [round_robin(group, given.dp) for group in given.groups]
    return given.groups


def _sub_groups(given: Given, group: Sequence[str]) -> list[list[str]]:
    return sub_groups(given.shapes(group), given.sub_group_size, given.dp)


def _stage12_state(given: Given, pickled: Pickled, rank: int) -> dict[str, object]:
    masters: list[object] = []
    paddings: list[int] = []
    mappings: list[object] = []
    states: dict[int, object] = {}
    is_elastic = (OPTIMIZER, "param_groups") not in given.values  # then states have no padding, and no settings beside them
    for g, group in enumerate(flat_groups(given)):
        members = members_of(given.shapes(group).items())
        total = members[-1].stop if members else 0
        size = part_size(total, given.dp)
        low = rank * size
        held = max(0, min(total - low, size))
        paddings.append(size - held)
        masters.append(pickled.flat(vector_dtype(given, group, "fp32"), held, _range(given, members, "fp32", low, held)))
        length = held if is_elastic else size
        states[g] = {
            key: pickled.flat(vector_dtype(given, group, key), length, _range(given, members, key, low, held))
            for key in vector_keys(given, group)
        } | numbers(given, pickled, group)
        mappings.append(_slices(members, low, size))
    rigid = {} if is_elastic else {"state": states, "param_groups": param_groups(given, [[g] for g in states])}
    return optimizer_settings(given) | {
        "base_optimizer_state": rigid or list(states.values()),
        "single_partition_of_fp32_groups": masters,
        "group_paddings": paddings,
        "partition_count": [given.dp] * len(masters),
        "param_slice_mappings": mappings,
    }


def _range(given: Given, members: Sequence[Member], key: str, low: int, numel: int) -> Iterable[Placed]:
    """The elements [low, low + numel) of a group's vector, as boxes at their places in the part."""
    for member in members:
        start, stop = max(low, member.start), min(low + numel, member.stop)
        if start < stop:
            tensor = given.states[member.name][key]
            yield from flat_boxes(tensor, start - member.start, stop - member.start, start - low)


def _slices(members: Sequence[Member], low: int, size: int) -> Object:
    """`param_slice_mappings`: where each parameter's elements lie in the part."""
    found = {}
    for name, (start, numel) in slices_of(members, low, size).items():
        address = Object(Global("deepspeed.utils.tensor_fragment", "fragment_address"), (), "newobj")
        address.state = {"numel": numel, "start": start}
        found[name] = address
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
            for key in ("fp32", *vector_keys(given, sub_group)):
                boxes: list[Placed] = []
                at = 0
                for name in sub_group:
                    tensor = given.states[name][key]
                    part = share_of(tensor.spec.volume, given.dp)
                    boxes += flat_boxes(tensor, rank * part, (rank + 1) * part, at)
                    at += part
                vectors[key] = pickled.flat(vector_dtype(given, sub_group, key), at, boxes)
            masters.append(vectors.pop("fp32"))
            states[own[-1]] = numbers(given, pickled, group) | vectors
        positions.append(own)
    settings = {k: v for k, v in optimizer_settings(given).items() if k not in ("clip_grad", "ds_version")}
    return settings | {
        "partition_count": given.dp,
        "optimizer_state_dict": {"state": states, "param_groups": param_groups(given, positions)},
        "fp32_flat_groups": masters,
    }
