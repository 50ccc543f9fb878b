"""Writes what DeepSpeed's engine resumes from: ZeRO 0 to 3 for any number of ranks along each axis, and universal checkpoints.

The parameters of each group and their order come from `optimizer.param_names`, as the reader gives it. Values are only moved:
a flat partition is a storage of boxes and zeros. Read `arrange_ranks` first; one story per module: `grid` (the ranks), `given`
(what is to be written, sorted, and what a rank has of it), `derived` (what need not be), `ways` (how tensor parallelism cuts),
`stages` (where layers and experts are), `model_files`, `client`, `partitions` (ZeRO 1 to 3), `without_zero`, `universal`,
`settings`, `pickled`.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/zero/stage_1_and_2.py, deepspeed/runtime/zero/stage3.py,
deepspeed/runtime/engine.py, deepspeed/runtime/pipe/module.py, v0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from ckpttools.layouts.deepspeed.orders import PARAM_NAMES, PIPELINE
from ckpttools.layouts.deepspeed.states import items
from ckpttools.layouts.deepspeed.write.derived import Derived, find_derived
from ckpttools.layouts.deepspeed.write.given import Entries, Given, buffers_in, sort_entries
from ckpttools.layouts.deepspeed.write.grid import Grid, rank_at, stated_mesh, world_mesh
from ckpttools.layouts.deepspeed.write.model_files import expert_files, layer_files, model_files
from ckpttools.layouts.deepspeed.write.partitions import optimizer_files
from ckpttools.layouts.deepspeed.write.refusals import (
    require_masters_of_padding,
    require_told_ties,
    require_universal,
    require_writable,
)
from ckpttools.layouts.deepspeed.write.settings import require_alike
from ckpttools.layouts.deepspeed.write.stages import Held, held_at
from ckpttools.layouts.deepspeed.write.universal import parameter_files
from ckpttools.layouts.deepspeed.write.ways import INFO, cutting_rules, ways_of
from ckpttools.layouts.deepspeed.write.without_zero import expert_files as expert_optimizer_files
from ckpttools.layouts.families import EXTRA_STATE, MODEL
from ckpttools.model import ArrangedFile, Arrangement, Mesh, ObjectEntry, TensorEntry
from ckpttools.placement.rules import RuleSet

__all__ = [
    "Derived",
    "Entries",
    "Given",
    "Grid",
    "arrange_ranks",
    "arrange_universal",
    "find_derived",
    "own_places",
    "rank_at",
    "sort_entries",
    "stated_mesh",
    "world_mesh",
]


def own_places(
    tensors: Mapping[str, TensorEntry], objects: Sequence[ObjectEntry], mesh: Mesh, layers: Sequence[int]
) -> tuple[RuleSet | None, dict[str, Held]]:
    """How a checkpoint itself says that it is cut, and where its layers and experts go. Pure.

    Args: tensors: by output name. layers: numbers of layers on each pipeline stage that a user gave.
    Returns: the rules, None where nothing says so; what is not on every rank, with the places at which it is.
    Raises: ConversionError: when the division of the layers cannot be told.
    """
    grid, values = Grid.of(mesh), {o.path: o.record for o in objects}
    shapes = {n: t.spec.shape for n, t in tensors.items() if t.family == MODEL}
    trained = [n for group in items(values.get(PARAM_NAMES)) for n in items(group) if isinstance(n, str)]
    masters = {n: t.spec.shape for n in trained if (t := tensors.get(f"optimizer.state.{n}.fp32")) is not None}
    shapes = masters | shapes
    ways = ways_of(shapes, values.get((EXTRA_STATE, INFO)), buffers_in(values)) if grid.tp > 1 else None
    is_cut = {n for n, way in (ways or {}).items() if way.dim is not None}
    sizes = {n: prod(s) // (grid.tp if n in is_cut else 1) for n, s in shapes.items()}
    held = held_at(sizes, values.get(PIPELINE), trained, grid, layers)
    return cutting_rules(ways) if ways else None, held | {f"optimizer.state.{n}": places for n, places in held.items()}


def arrange_ranks(entries: Entries) -> Arrangement:
    """Every file of the snapshot, to the byte. Pure.

    Raises: ConversionError: when something that a resumed training needs is not there, or has no place.
    """
    require_writable(entries)
    require_masters_of_padding(entries)
    require_told_ties(entries)
    return Arrangement("deepspeed", tuple(f for pp, tp in entries.grid.places() for f in _files(entries.of(pp, tp))))


def arrange_universal(entries: Entries) -> Arrangement:
    """Every file of a universal checkpoint: a folder per parameter, and the model files of one data-parallel rank. Pure.

    Raises: ConversionError: as `arrange_ranks`.
    """
    entries = replace(entries, grid=Grid(entries.grid.pp, 1, 1, entries.grid.tp))
    require_writable(entries)
    require_universal(entries)
    for group in entries.groups:
        require_alike(entries, group)
    ranks = [entries.of(pp, tp) for pp, tp in entries.grid.places()]
    models = [f for given in ranks for f in (*model_files(given), *layer_files(given))]
    return Arrangement("deepspeed", (*models, *parameter_files(entries)))


def _files(given: Given) -> Iterator[ArrangedFile]:
    yield from model_files(given)
    yield from layer_files(given)
    yield from expert_files(given)
    yield from optimizer_files(given) if given.stage else expert_optimizer_files(given)
