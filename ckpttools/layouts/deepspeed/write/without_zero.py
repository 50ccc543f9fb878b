"""The optimizer where ZeRO is off: torch's own state by position, in the model's file or one per expert-parallel rank. Pure.

A file does not name its parameters; where their shapes and their order leave more than one name to a position, the settings of
the groups get `param_names`, which torch itself writes for an optimizer that was given names.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/fp16/unfused_optimizer.py (`state_dict`), v0.19.8; pytorch/pytorch,
torch/optim/optimizer.py (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpttools.layouts.deepspeed.experts import experts_of, is_expert
from ckpttools.layouts.deepspeed.names import expert_optimizer_name
from ckpttools.layouts.deepspeed.states import table
from ckpttools.layouts.deepspeed.unflattened import only_names
from ckpttools.layouts.deepspeed.write.given import MASTER, Given, Group
from ckpttools.layouts.deepspeed.write.pickled import Pickled
from ckpttools.layouts.deepspeed.write.settings import loss_scale, numbers, param_groups, vector_keys
from ckpttools.model import ArrangedFile


def optimizer_record(given: Given, pickled: Pickled, ep: int = 0) -> dict[str, object]:
    """What the optimizer of a rank keeps."""
    positions: list[list[int]] = []
    masters: list[object] = []
    states: dict[int, object] = {}
    orders: list[list[str]] = []
    for group in given.groups:
        names = _names_on(given, group, ep)
        start = len(states)
        for name, position in zip(names, range(start, start + len(names)), strict=False):
            vectors = {key: pickled.whole(given.states[name][key]) for key in vector_keys(given, [name])}
            states[position] = numbers(given, pickled, group) | vectors
        positions.append(list(range(start, len(states))))
        orders.append(names)
        masters.append([pickled.whole(given.states[name][MASTER]) for name in names])
    groups = param_groups(given, positions)
    if not _is_told(given, positions, orders):
        groups = [table(settings) | {"param_names": names} for settings, names in zip(groups, orders, strict=True)]
    inner: dict[str, object] = {"state": states, "param_groups": groups}
    if not given.entries.is_half:
        return inner
    return loss_scale(given.entries) | {"optimizer_state_dict": inner, "fp32_groups": masters}


def expert_files(given: Given) -> Iterable[ArrangedFile]:
    """One of each expert-parallel rank: the optimizer of its experts, and of all the rest."""
    if given.entries.experts:
        for ep in range(given.entries.grid.ep):
            pickled = Pickled()
            yield pickled.file(expert_optimizer_name(ep, given.mp), {"optimizer": optimizer_record(given, pickled, ep)})


def _is_told(given: Given, positions: Sequence[Sequence[int]], orders: Sequence[Sequence[str]]) -> bool:
    """Whether the weights in their order, by shapes alone, leave one name to each position."""
    names = {p: n for own, order in zip(positions, orders, strict=True) for p, n in zip(own, order, strict=True)}
    shapes = {p: given.shape(n) for p, n in names.items()}
    others = given.entries.buffers | {n for n in given.weights if is_expert(n)} - set(names.values())
    model = [(n, t.spec.shape) for n, t in given.weights.items() if n not in others]
    if given.entries.is_pipeline:  # they are in files of their own, in this order
        prefixes = tuple(given.entries.layers.values())
        model.sort(key=lambda own: next((i for i, prefix in enumerate(prefixes) if own[0].startswith(prefix)), len(prefixes)))
        if len(model) != len(names):  # frozen ones leave open where a stage ends
            return False
    return only_names(positions, model, lambda position, i: shapes[position] == model[i][1]) == names


def _names_on(given: Given, group: Group, ep: int) -> list[str]:
    own = experts_of(group.names, given.entries.experts, given.entries.grid.ep, ep)
    return [name for name in group.names if not is_expert(name) or name in own]
