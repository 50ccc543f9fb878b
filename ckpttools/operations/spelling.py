"""Spells Megatron's names as a target wants them: layers and experts in stacks (torch_dist), or each under its number (legacy).

Optimizer state goes with its parameters: `optimizer.state.<parameter>.<state>` in the one, `optimizer.state.<state>.<parameter>`
in the other. What has no such name stays as it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from ckpttools.layouts.families import MODEL, OPTIMIZER
from ckpttools.model import ObjectEntry, Path, TensorEntry, render_path
from ckpttools.names.convert import respelled, side_of
from ckpttools.names.maps import built_in
from ckpttools.operations.select import Selection

STACKED, SINGLE = "stacked", "single"
_SIDE, _MAP = "megatron", "mixtral"
"""The map with the most spellings of Megatron's names."""
_BY_STATE = re.compile(r"optimizer\.state\.(?P<state>fp32_param|param|exp_avg|exp_avg_sq|momentum_buffer|step)\.(?P<of>.+)")
_BY_PARAMETER = re.compile(r"optimizer\.state\.(?P<of>.+)\.(?P<state>[^.]+)")
_STACK = re.compile(r"layers\.(?!\d)")
_MASTERS = ("fp32", "fp32_param", "param")


def spell(selection: Selection, spelling: str) -> Selection:
    """The selection as a target spells it; the same where the names are not Megatron's. Pure."""
    names = [n for n, t in selection.tensors.items() if t.family == MODEL]
    if not spelling or side_of(built_in(_MAP), names) != _SIDE:
        return selection
    if spelling == SINGLE and not any(_STACK.search(n) or _BY_STATE.fullmatch(n) for n in selection.tensors):
        return selection  # each under its number already: models before Megatron-core keep the names that they have
    groups: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    spelled: dict[str, TensorEntry] = {}
    for name, entry in selection.tensors.items():
        state = _state(name) if entry.family == OPTIMIZER else ("", name) if entry.family == MODEL else None
        if state is None:
            spelled[name] = entry
        else:
            groups[state[0]][state[1]] = entry
    for kind, entries in groups.items():
        renamed = _respelled(entries, spelling)
        spelled |= {_name(kind, name, spelling) if kind else name: entry for name, entry in renamed.items()}
    if list(spelled) == list(selection.tensors):
        return selection
    tensors = {name: _named(entry, name) for name, entry in spelled.items()}
    aliases = {n: k for n, k in selection.aliases.items() if k in tensors}
    objects = tuple(map(_single_object, selection.objects)) if spelling == SINGLE else selection.objects
    return replace(selection, tensors=tensors, aliases=aliases, objects=objects)


def _single_object(entry: ObjectEntry) -> ObjectEntry:
    """An object of `common.pt` under the keys that it has in a legacy file."""
    if entry.path[:1] != ("common",) or len(entry.path) < 2:
        return entry
    return replace(entry, name=render_path(entry.path[1:]), path=entry.path[1:])


def _respelled(entries: Mapping[str, TensorEntry], spelling: str) -> dict[str, TensorEntry]:
    named = [_named(entry, name) for name, entry in entries.items()]
    return {t.name: t for t in respelled(built_in(_MAP), _SIDE, named, is_stacked=spelling == STACKED)}


def _named(entry: TensorEntry, name: str) -> TensorEntry:
    if entry.name == name:
        return entry
    state = _BY_PARAMETER.fullmatch(name) if entry.family == OPTIMIZER and not _BY_STATE.fullmatch(name) else None
    path: Path = ("optimizer", "state", state["of"], state["state"]) if state else (name,)
    return replace(entry, spec=replace(entry.spec, name=name), path=path)


def _state(name: str) -> tuple[str, str] | None:
    """(state, parameter) of an optimizer's tensor."""
    match = _BY_STATE.fullmatch(name) or _BY_PARAMETER.fullmatch(name)
    return (match["state"], match["of"]) if match else None


def _name(state: str, parameter: str, spelling: str) -> str:
    if spelling == STACKED:
        return f"optimizer.state.{'fp32_param' if state == 'fp32' else state}.{parameter}"
    return f"optimizer.state.{parameter}.{'fp32' if state in _MASTERS else state}"
