"""The files of a universal checkpoint: a folder per parameter, a file per state, and the optimizer's settings. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.layouts.deepspeed.names import SETTINGS, state_name
from ckpttools.layouts.deepspeed.write.given import Given
from ckpttools.layouts.deepspeed.write.pickled import Pickled
from ckpttools.layouts.deepspeed.write.settings import numbers, optimizer_settings, vector_keys
from ckpttools.layouts.families import OPTIMIZER
from ckpttools.model import ArrangedFile


def parameter_files(given: Given) -> Iterable[ArrangedFile]:
    """`zero/<parameter>/<state>.pt` and the settings."""
    for group in given.groups:
        for name in group:
            for key in ("fp32", *vector_keys(given, group)):
                pickled = Pickled()
                value = {"param": pickled.whole(given.states[name][key]), "cat_dim": 0}
                yield pickled.file(state_name(name, key), value)
            pickled = Pickled()
            for key, number in numbers(given, pickled, group).items():
                yield pickled.file(state_name(name, key), number)
    pickled = Pickled()
    settings: dict[str, object] = optimizer_settings(given) | {"param_groups": given.values.get((OPTIMIZER, "param_groups"))}
    if given.stage == 3:
        states = {g: numbers(given, pickled, group) for g, group in enumerate(given.groups)}
        settings["optimizer_state_dict"] = {"state": states, "param_groups": settings["param_groups"]}
    yield pickled.file(SETTINGS, settings)
