"""Writes what DeepSpeed's engine resumes from: ZeRO 1, 2 or 3 for any number of data-parallel ranks, and universal checkpoints.

The parameters of each group and their order come from `optimizer.param_names`, as the reader gives it. Values are only moved:
a flat partition is a storage of boxes and zeros. Read `arrange_ranks` first; one story per module: `given` (what is to be
written, sorted), `derived` (what need not be), `model_files`, `partitions`, `universal`, `settings`, `pickled`.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/zero/stage_1_and_2.py, deepspeed/runtime/zero/stage3.py,
deepspeed/runtime/engine.py, v0.19.8.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.write.derived import Derived, find_derived
from ckpttools.layouts.deepspeed.write.given import Given, sort_entries
from ckpttools.layouts.deepspeed.write.model_files import model_files
from ckpttools.layouts.deepspeed.write.partitions import optimizer_files
from ckpttools.layouts.deepspeed.write.universal import parameter_files
from ckpttools.model import Arrangement

__all__ = ["Derived", "Given", "arrange_ranks", "arrange_universal", "find_derived", "sort_entries"]


def arrange_ranks(given: Given) -> Arrangement:
    """Every file of the snapshot, to the byte. Pure.

    Raises: ConversionError: when something that a resumed training needs is not there, or has no place.
    """
    if given.stage not in (1, 2, 3):
        raise ConversionError(f"no ZeRO stage to write: {given.stage}", expected="1, 2 or 3")
    given.groups  # noqa: B018  # refuses what has no groups
    odd = [n for n, s in given.states.items() for t in s.values() if t.spec.shape and t.spec.shape != given.shape(n)]
    if odd:
        raise ConversionError(f"optimizer state that is not one number per element of its parameter: {odd[0]}")
    return Arrangement("deepspeed", (*model_files(given), *optimizer_files(given)))


def arrange_universal(given: Given) -> Arrangement:
    """Every file of a universal checkpoint, to the byte: a folder per parameter, and the model file of one rank. Pure.

    Raises: ConversionError: as `arrange_ranks`.
    """
    files = arrange_ranks(replace(given, dp=1)).files
    model = next(f for f in files if f.path.endswith("_model_states.pt"))
    return Arrangement("deepspeed", (model, *parameter_files(given)))
