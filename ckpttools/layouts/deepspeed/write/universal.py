"""The files of a universal checkpoint: a folder per parameter, a file per state, and the optimizer's settings. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpttools.layouts.deepspeed.names import SETTINGS, state_name
from ckpttools.layouts.deepspeed.states import items, members, table
from ckpttools.layouts.deepspeed.write.derived import vocabulary_patterns
from ckpttools.layouts.deepspeed.write.given import MASTER, Entries
from ckpttools.layouts.deepspeed.write.pickled import Pickled
from ckpttools.layouts.deepspeed.write.settings import optimizer_settings
from ckpttools.layouts.deepspeed.write.ways import INFO, PARTS, Way, rules_of, stated_ways, way_of
from ckpttools.layouts.families import EXTRA_STATE, OPTIMIZER
from ckpttools.model import ArrangedFile, TensorSpec
from ckpttools.pickles.records import Global, Object


def parameter_files(entries: Entries) -> Iterable[ArrangedFile]:
    """`zero/<parameter>/<state>.pt` and the settings."""
    info = stated_ways(entries, entries.values.get((EXTRA_STATE, INFO)))
    words = vocabulary_patterns(info)
    for g, group in enumerate(entries.groups):
        for name in group:
            merged: dict[str, object] = _merged(entries, name, info)
            if any(p.match(name) for p in words):
                merged["vocab_tensor"] = True
            states = {k: t for k, t in entries.states.get(name, {}).items() if k not in entries.numbers[g]}
            master = entries.master(name)
            for key, tensor in ({MASTER: master} | states).items():
                if tensor is not None:
                    pickled = Pickled()
                    yield pickled.file(state_name(name, key), {"param": pickled.whole(tensor.spec), **merged})
            for key, number in entries.numbers[g].items():
                pickled = Pickled()
                yield pickled.file(state_name(name, key), _number(pickled, number))
    pickled = Pickled()
    settings = optimizer_settings(entries) | {"param_groups": entries.values.get((OPTIMIZER, "param_groups"))}
    if entries.stage == 3:
        states_of = {g: {k: _number(pickled, n) for k, n in own.items()} for g, own in enumerate(entries.numbers)}
        settings["optimizer_state_dict"] = {"state": states_of, "param_groups": settings["param_groups"]}
    yield pickled.file(SETTINGS, settings)


def _number(pickled: Pickled, number: object) -> object:
    return pickled.whole(number) if isinstance(number, TensorSpec) else number


def _merged(entries: Entries, name: str, info: object) -> dict[str, object]:
    """How shards were put together, by which a loader takes them apart."""
    way = way_of(name, entries.shape(name), rules_of(info), 2)
    rules = rules_of(info)
    if not rules.is_stated or way is None:
        return {"cat_dim": 0}
    if way.dim is None:
        return {}
    if not way.sections:
        return {"cat_dim": way.dim}
    if any(p.match(name) for p in rules.halves):
        return {"cat_dim": 0, "param_n_sub_params": 2}
    return {"sub_param_shape": _sub_params(entries, name, way, info)}


def _sub_params(entries: Entries, name: str, way: Way, info: object) -> Object:
    """The record of parts that are cut each by itself, with their sizes."""
    texts: list[object] = []
    for entry in items(table(info).get(PARTS)):
        patterns = items(members(entry).get("patterns"))
        if not texts and any(isinstance(t, str) and re.match(t, name) for t in patterns):
            texts = patterns
    shape = entries.shape(name)
    dim = way.dim or 0
    found = Object(Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"), (), "newobj")
    stated = (*shape[:dim], way.sections, *shape[dim + 1 :])
    found.state = {"patterns": texts, "shape": stated, "partition_dim": dim}
    return found
