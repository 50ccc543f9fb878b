"""What cannot be written, told before anything is: what DeepSpeed has not, and what the source does not say."""

from __future__ import annotations

import re

from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.modules import USUAL_TIE
from ckpttools.layouts.deepspeed.orders import TIED
from ckpttools.layouts.deepspeed.states import items, table
from ckpttools.layouts.deepspeed.write.derived import vocabulary_patterns
from ckpttools.layouts.deepspeed.write.given import Entries, Group, is_number
from ckpttools.layouts.deepspeed.write.ways import INFO
from ckpttools.layouts.families import EXTRA_STATE, OPTIMIZER

_FUSED = ("ds_autoep_layers", "autoep_layers")
_SPREAD = re.compile(r"ep_size_([0-9]{1,9})")


def require_writable(entries: Entries) -> None:
    """Raises ConversionError for what no engine can be given."""
    if entries.stage not in (0, 1, 2, 3):
        raise ConversionError(f"no ZeRO stage to write: {entries.stage}", expected="0, 1, 2 or 3")
    _require_cuttable(entries)
    _require_states(entries)
    _require_experts(entries)
    if not entries.is_pipeline:
        return
    if entries.stage > 1:
        raise ConversionError(f"a pipeline cannot be trained with ZeRO {entries.stage}", expected="--zero 0 or 1")
    tied = next((n for n in (*entries.weights, *entries.trained) if n.startswith(TIED)), "")
    if tied and not any(p.startswith(TIED) for p in entries.layers.values()):
        raise ConversionError(f"the number of the layer that holds {tied} is not stated", expected="`extra_state.pipeline`")


def require_universal(entries: Entries) -> None:
    """Raises ConversionError for what no universal checkpoint can hold."""
    if not entries.stage:
        raise ConversionError("no universal checkpoint for an engine without ZeRO", expected="--zero 1, 2 or 3")
    if entries.experts:
        raise ConversionError(
            "native experts in a universal checkpoint: DeepSpeed takes a rank's first expert for the first of all",
            found=f"experts of {next(iter(entries.experts))}",
        )


def _require_cuttable(entries: Entries) -> None:
    """Refuse state that belongs to a rank and to no parameter: error feedback, the blocks of 8-bit optimizers."""
    known = {*entries.trained, *entries.weights}
    rankwise = [f"{name}.{key}" for name, states in entries.states.items() if name not in known for key in states]
    if rankwise:
        raise ConversionError(
            f"optimizer state that each rank keeps for itself has no place on other ranks: {rankwise[0]}",
            found=f"{len(rankwise)} tensors",
            hints=["resume on as many ranks as saved it", "--exclude 'optimizer.state.*' leaves the optimizer's state behind"],
        )


def require_told_ties(entries: Entries) -> None:
    """Without ZeRO the files name no parameters: a tied module is told by a second stage that has it, and its key is the usual.

    Raises: ConversionError: for one that the files would not tell.
    """
    if entries.stage or not entries.is_pipeline:
        return
    for name, tensor in entries.weights.items():
        is_told = len(dict(tensor.placement.held_at).get("pp", ())) > 1 and name.startswith(f"{TIED}{USUAL_TIE}.")
        if name.startswith(TIED) and not is_told:
            raise ConversionError(
                f"without ZeRO nothing in the files would say that this is tied: {name}",
                expected=f"`{TIED}{USUAL_TIE}` on several pipeline stages",
                hints=["--zero 1", "a mesh with more pipeline stages"],
            )


def require_masters_of_padding(entries: Entries) -> None:
    """Flat groups have an element of each state for every one of a weight, those of rows that pad a vocabulary included.

    Raises: ConversionError: where masters have fewer, and nothing says that these are the words of a vocabulary.
    """
    for name in sorted(entries.trained):
        master = entries.master(name)
        if master is not None and master.spec.shape != entries.shape(name):
            raise ConversionError(
                f"rows that pad a vocabulary have weights and no masters: {name}",
                expected=f"masters of {entries.shape(name)[0]} rows, as the weight has",
                found=f"{master.spec.shape[0]} rows, and `{INFO}` does not say that these are the words",
                hints=["DeepSpeed loads the universal checkpoint itself, for any ranks"],
            )


def _require_states(entries: Entries) -> None:
    info = entries.values.get((EXTRA_STATE, INFO))
    words = vocabulary_patterns(info)
    for name in sorted(entries.trained):
        shape, master = entries.shape(name), entries.master(name)
        of_master = master.spec.shape if master is not None else shape
        own = {t.spec.shape for k, t in entries.states.get(name, {}).items() if not is_number(k, t.spec.shape, shape)}
        if own - {of_master} or (of_master != shape and of_master[1:] != shape[1:]):
            raise ConversionError(f"optimizer state that is not one number per element of its parameter: {name}")
        if name not in entries.weights and any(p.match(name) for p in words) and table(info).get("original_vocab_size") in shape:
            raise ConversionError(f"how many rows pad {name} is not told: its weight is not stored beside its master")


def _require_experts(entries: Entries) -> None:
    """Experts as DeepSpeed itself divides them: in blocks, all alike, and not in what it cannot train."""
    if any(path[:1] == (EXTRA_STATE,) and len(path) > 1 and path[1] in _FUSED for path in entries.values):
        raise ConversionError("experts that AutoEP shards are read and not written", found=f"`extra_state.{_FUSED[0]}`")
    if not entries.experts:
        return
    if entries.stage == 3:
        raise ConversionError("native experts cannot be trained with ZeRO 3", expected="--zero 0, 1 or 2")
    if entries.is_pipeline:
        raise ConversionError("experts in a pipeline are not written", found=next(iter(entries.experts)))
    stated = items(entries.values.get((OPTIMIZER, "param_groups")))
    groups = [table(s) for g, s in enumerate(stated) if g < len(entries.groups) and _is_of_experts(entries.groups[g])]
    spreads = {int(m[1]) for s in groups if isinstance(s.get("name"), str) and (m := _SPREAD.fullmatch(str(s["name"])))}
    if len(spreads) > 1:
        raise ConversionError("experts of several expert-parallel sizes in one model are not written", found=f"{sorted(spreads)}")
    settings = [{k: repr(v) for k, v in s.items() if k != "params"} for s in groups]
    if spreads - {entries.grid.ep} and any(s in settings[:i] for i, s in enumerate(settings)):
        raise ConversionError(
            "groups of experts were divided by their size, which another number of expert-parallel ranks changes",
            expected=f"ep={next(iter(spreads))}",
            found=f"ep={entries.grid.ep}",
        )


def _is_of_experts(names: list[str]) -> bool:
    return Group(0, tuple(names)).is_of_experts
