"""What the optimizer keeps beside its vectors: settings, hyperparameters, and numbers that a group has once. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.dtypes import DType
from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.states import items, table
from ckpttools.layouts.deepspeed.write.given import Given
from ckpttools.layouts.deepspeed.write.pickled import Pickled
from ckpttools.layouts.families import EXTRA_STATE, OPTIMIZER
from ckpttools.pickles.records import Global, Object

VERSION = "0.19.8"
"""What is written where the source states no version: the engine refuses a snapshot without one."""
_OURS = frozenset({"param_names", "param_groups", "state"})
"""Entries of the optimizer that are written in a place of their own."""


def optimizer_settings(given: Given) -> dict[str, object]:
    """What the optimizer keeps beside its tensors, with what DeepSpeed cannot do without.

    The clipping of gradients is written where the source states it alone, as ZeRO 3 does not: what an engine finds in the
    files goes before its configuration.
    """
    scaler = Object(Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"), (), "newobj")
    scaler.state = {"cur_scale": 1.0, "dynamic": False}
    found: dict[str, object] = {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False}
    found["ds_version"] = given.values.get((EXTRA_STATE, "ds_version"), VERSION)
    for path, record in given.values.items():
        if path[:1] == (OPTIMIZER,) and len(path) == 2 and path[1] not in _OURS:
            found[str(path[1])] = record
    found["zero_stage"] = Object(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (given.stage,))
    return found


def param_groups(given: Given, positions: Sequence[Sequence[int]]) -> list[object]:
    """The hyperparameters of each group, with the positions of its flat vectors."""
    stated = items(given.values.get((OPTIMIZER, "param_groups")))
    if len(stated) != len(positions):
        expected = f"`optimizer.param_groups` of {len(positions)} groups"
        raise ConversionError("the settings of the parameter groups are not stated", expected=expected, found=str(len(stated)))
    return [{**table(group), "params": list(p)} for group, p in zip(stated, positions, strict=True)]


def vector_keys(given: Given, group: Sequence[str]) -> list[str]:
    """What the inner optimizer keeps per element. Raises ConversionError when parameters of a group differ in it."""
    keys = [{k for k, s in given.states[n].items() if s.spec.shape or not given.shape(n)} - {"fp32"} for n in group]
    if any(k != keys[0] for k in keys):
        raise ConversionError(f"parameters of one group have other optimizer state than its first: {group[0]}")
    return [k for k in given.states[group[0]] if k in keys[0]]


def vector_dtype(given: Given, group: Sequence[str], key: str) -> DType:
    """Of what a group keeps per element. Raises ConversionError when there are several."""
    dtypes = {given.states[n][key].spec.dtype for n in group}
    if len(dtypes) > 1:
        raise ConversionError(f"`{key}` of one group in several dtypes: {', '.join(sorted(d.name for d in dtypes))}")
    return dtypes.pop()


def numbers(given: Given, pickled: Pickled, group: Sequence[str]) -> dict[str, object]:
    """What the inner optimizer keeps once, of the group's first parameter that has it."""
    found: dict[str, object] = {}
    for name in group:
        for key, tensor in given.states[name].items():
            if tensor.spec.shape == () and key != "fp32" and key not in found:
                found[key] = pickled.whole(tensor)
        for path, record in given.values.items():
            if path[:3] == (OPTIMIZER, "state", name) and len(path) == 4:
                found.setdefault(str(path[3]), record)
    return found
