"""The files of the model: weights, the shapes of flat groups, and what the client saved. Pure. Read `model_files` first."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.experts import is_expert, split_expert
from ckpttools.layouts.deepspeed.flat import share_of
from ckpttools.layouts.deepspeed.names import expert_name, layer_name, model_name
from ckpttools.layouts.deepspeed.write.client import client_state
from ckpttools.layouts.deepspeed.write.given import Given
from ckpttools.layouts.deepspeed.write.partitions import flat_groups
from ckpttools.layouts.deepspeed.write.pickled import Pickled, flat_boxes, ordered, size_record
from ckpttools.layouts.deepspeed.write.without_zero import optimizer_record
from ckpttools.model import ArrangedFile
from ckpttools.pickles.records import Object


def model_files(given: Given) -> Iterable[ArrangedFile]:
    """One file; in ZeRO 3 one of each data-parallel rank."""
    for rank in range(given.dp) if given.stage == 3 else (None,):
        name, is_first = model_name(given.mp, rank), not rank
        pickled = Pickled()
        module = None if given.entries.is_pipeline else _module(given, pickled)
        top: dict[str, object] = {"module": module, "buffer_names": given.buffers, "optimizer": None, "param_shapes": None}
        top |= {"frozen_param_shapes": None, "shared_params": None, "frozen_param_fragments": None}
        if given.stage == 0:
            top["optimizer"] = optimizer_record(given, pickled)
        else:
            top["param_shapes"] = [ordered({n: size_record(s) for n, s in g.items()}) for g, _ in flat_groups(given)]
            top["shared_params"] = _shared(given) if is_first else {}
        if given.stage > 1:
            top["frozen_param_shapes"] = ordered({n: size_record(t.spec.shape) for n, t in given.frozen.items()})
            top["frozen_param_fragments"] = ordered(_fragments(given, pickled, rank or 0))
        top |= {"lr_scheduler": None, "data_sampler": None, "random_ltd": None}
        top |= client_state(given, pickled, name, is_first=is_first and given.mp == 0)
        yield pickled.file(name, top)


def layer_files(given: Given) -> Iterable[ArrangedFile]:
    """Those of a pipeline's layers on the stage, a layer without parameters included.

    Raises: ConversionError: for a tensor of no layer.
    """
    if not given.entries.is_pipeline:
        return
    left = dict.fromkeys(given.weights)
    for number, prefix in given.entries.layers.items():
        own = {n: t for n, t in given.weights.items() if n.startswith(prefix)}
        for name in own:
            left.pop(name, None)
        if given.entries.layer_stages[number] == given.pp:
            pickled = Pickled()
            value = {n.removeprefix(prefix): pickled.whole(t) for n, t in own.items()}
            yield pickled.file(layer_name(number, given.tp), ordered(value))
    if left:
        raise ConversionError("a tensor of no layer of the pipeline", found=next(iter(left)))


def expert_files(given: Given) -> Iterable[ArrangedFile]:
    """The weights of each expert, by its global number."""
    for layer, (prefix, number) in enumerate(given.entries.experts.items()):
        for expert in range(number):
            pickled = Pickled()
            value = {n: pickled.whole(t) for n, t in given.weights.items() if split_expert(n)[:2] == (prefix, expert)}
            yield pickled.file(expert_name(layer, expert, given.mp), ordered(value))


def _module(given: Given, pickled: Pickled) -> Object:
    """The state dict: whole in ZeRO 0 to 2, placeholders and buffers in ZeRO 3; tied names share a storage."""
    found: dict[str, object] = {}
    buffers, frozen = given.entries.buffers, given.frozen
    for name in dict.fromkeys((*given.weights, *(n for group in given.groups for n in group.names))):
        if is_expert(name):
            continue
        if given.stage == 3 and name not in buffers:
            found[name] = pickled.empty(name, frozen[name].spec.dtype if name in frozen else given.dtype)
        elif name in given.weights:
            found[name] = pickled.whole(given.weights[name])
        else:
            raise ConversionError(f"no weight of a parameter that is trained: {name}")
    for alias, kept in given.entries.aliases.items():
        if kept in found:
            found[alias] = found[kept]
    for path, record in given.entries.values.items():
        if len(path) == 1 and path[0] not in found:  # `_extra_state` of a module
            found[str(path[0])] = record
    return ordered(found)


def _shared(given: Given) -> dict[str, str]:
    """Further names of tied parameters."""
    return {alias: kept for alias, kept in given.entries.aliases.items() if kept in given.weights or kept in given.states}


def _fragments(given: Given, pickled: Pickled, rank: int) -> dict[str, object]:
    """Frozen parameters: whole in ZeRO 2, the rank's padded part in ZeRO 3."""
    if given.stage == 2:
        return {name: pickled.whole(tensor) for name, tensor in given.frozen.items()}
    found: dict[str, object] = {}
    for name, tensor in given.frozen.items():
        part = share_of(tensor.spec.volume, given.dp)
        found[name] = pickled.flat(tensor.spec.dtype, part, flat_boxes(tensor, rank * part, (rank + 1) * part, 0))
    return found
