"""What the optimizer keeps beside its vectors: settings, hyperparameters, and numbers that a group has once. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckpttools.dtypes import DType
from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.states import items, members, table
from ckpttools.layouts.deepspeed.write.given import MASTER, Entries, Given, Group, is_number
from ckpttools.layouts.deepspeed.write.pickled import Pickled
from ckpttools.layouts.families import EXTRA_STATE, OPTIMIZER
from ckpttools.model import TensorSpec
from ckpttools.pickles.records import Global, Object

VERSION = "0.19.8"
"""What is written where the source states no version: the engine refuses a snapshot without one."""
_OURS = frozenset({"param_names", "param_groups", "state"})
"""Entries of the optimizer that are written in a place of their own."""
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
"""What the optimizer of ZeRO 0 says of the loss scale; the others have an object that knows it."""
_EXPERT_GROUP = re.compile(r"ep_size_\d+")


def optimizer_settings(entries: Entries) -> dict[str, object]:
    """What the optimizer keeps beside its tensors, with what DeepSpeed cannot do without.

    The clipping of gradients is written where the source states it alone, as ZeRO 3 does not: what an engine finds in the
    files goes before its configuration.
    """
    own = _own(entries)
    scaler = Object(Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"), (), "newobj")
    scaler.state = {"cur_scale": own.get("cur_scale", 1.0), "dynamic": False}
    is_dynamic = own.get("dynamic_loss_scale") is True
    if is_dynamic and "loss_scaler" not in own:
        scaler = Object(Global("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"), (), "newobj")
        scaler.state = {key: own[key] for key in _SCALE if key in own} | _DYNAMIC
    found: dict[str, object] = {"loss_scaler": scaler, "dynamic_loss_scale": is_dynamic, "overflow": False}
    found["ds_version"] = entries.values.get((EXTRA_STATE, "ds_version"), VERSION)
    found |= {key: record for key, record in own.items() if key not in _SCALE}
    found["zero_stage"] = Object(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (entries.stage,))
    return found


_DYNAMIC: dict[str, object] = {
    "min_scale": 1,
    "delayed_shift": 1,
    "cur_hysteresis": 1,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dynamic": True,
    "dtype": Global("torch", "float16"),
}
"""What a loss scaler has beside it, as the engine sets it unless configured."""


def loss_scale(entries: Entries) -> dict[str, object]:
    """The loss scale as the optimizer of ZeRO 0 keeps it."""
    own = _own(entries)
    known = dict(members(own.get("loss_scaler"))) | own
    is_dynamic = known.get("dynamic_loss_scale") is True
    steps = entries.values.get((EXTRA_STATE, "global_steps"), 0)
    found = {"dynamic_loss_scale": is_dynamic, "cur_scale": known.get("cur_scale", 1.0), "cur_iter": known.get("cur_iter", steps)}
    usual: dict[str, object] = {"last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000}
    return found | ({key: known.get(key, value) for key, value in usual.items()} if is_dynamic else {})


def _own(entries: Entries) -> dict[str, object]:
    return {
        str(path[1]): record
        for path, record in entries.values.items()
        if path[:1] == (OPTIMIZER,) and len(path) == 2 and path[1] not in _OURS
    }


def param_groups(given: Given, positions: Sequence[Sequence[int]]) -> list[object]:
    """The hyperparameters of the rank's groups, with the positions of what each has."""
    stated = items(given.entries.values.get((OPTIMIZER, "param_groups")))
    if len(stated) != len(given.entries.groups):
        expected = f"`optimizer.param_groups` of {len(given.entries.groups)} groups"
        raise ConversionError("the settings of the parameter groups are not stated", expected=expected, found=str(len(stated)))
    found: list[object] = []
    for group, own in zip(given.groups, positions, strict=True):
        settings = {k: v for k, v in table(stated[group.place]).items() if k != "param_names"}
        name = settings.get("name")
        if group.is_of_experts and isinstance(name, str) and _EXPERT_GROUP.fullmatch(name):
            settings["name"] = f"ep_size_{given.entries.grid.ep}"
        found.append(settings | {"params": list(own)})
    return found


def require_alike(entries: Entries, names: Sequence[str]) -> None:
    """Raise ConversionError where the inner optimizer keeps something of some parameters of a group and not of others."""
    keys: dict[str, set[str]] = {}
    for name in names:
        shape = entries.shape(name)
        states = entries.states.get(name, {}).items()
        keys[name] = {k for k, t in states if k != MASTER and not is_number(k, t.spec.shape, shape)}
    for name in names:
        lacking = keys[names[0]] ^ keys[name]
        if lacking:
            key = min(lacking)
            raise ConversionError(
                f"parameters of one group have other optimizer state than its first: {name}",
                expected=f"`{key}` of all or of none",
                found=f"of {sum(key in own for own in keys.values())} of {len(keys)}",
                hints=[f"--exclude 'optimizer.state.*.{key}' leaves it out of all"],
            )


def vector_keys(given: Given, names: Iterable[str]) -> list[str]:
    """What the inner optimizer keeps per element. Raises ConversionError when parameters of a group differ in it."""
    names = list(names)
    keys = [given.states[n].keys() - {MASTER} for n in names]
    if any(k != keys[0] for k in keys):
        raise ConversionError(f"parameters of one group have other optimizer state than its first: {names[0]}")
    return [k for k in given.states[names[0]] if k in keys[0]] if names else []


def vector_dtype(given: Given, names: Sequence[str], key: str) -> DType:
    """Of what a group keeps per element. Raises ConversionError when there are several."""
    dtypes = {given.states[n][key].spec.dtype for n in names}
    if len(dtypes) > 1:
        raise ConversionError(f"`{key}` of one group in several dtypes: {', '.join(sorted(d.name for d in dtypes))}")
    return dtypes.pop()


def numbers(given: Given, pickled: Pickled, group: Group) -> dict[str, object]:
    """What the inner optimizer keeps of a group once."""
    stated = given.entries.numbers[group.place]
    return {key: pickled.whole(value) if isinstance(value, TensorSpec) else value for key, value in stated.items()}
