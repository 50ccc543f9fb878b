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

from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.orders import PARAM_NAMES, PIPELINE, TIED
from ckpttools.layouts.deepspeed.states import items
from ckpttools.layouts.deepspeed.write.derived import INFO, Derived, find_derived, vocabulary_patterns
from ckpttools.layouts.deepspeed.write.given import Entries, Given, buffers_in, is_number, sort_entries
from ckpttools.layouts.deepspeed.write.grid import Grid, world_mesh
from ckpttools.layouts.deepspeed.write.model_files import expert_files, layer_files, model_files
from ckpttools.layouts.deepspeed.write.partitions import optimizer_files
from ckpttools.layouts.deepspeed.write.stages import Held, held_at
from ckpttools.layouts.deepspeed.write.universal import parameter_files
from ckpttools.layouts.deepspeed.write.ways import cutting_rules, ways_of
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
    "sort_entries",
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
    _require_writable(entries)
    _require_masters_of_padding(entries)
    return Arrangement("deepspeed", tuple(f for pp, tp in entries.grid.places() for f in _files(entries.of(pp, tp))))


def arrange_universal(entries: Entries) -> Arrangement:
    """Every file of a universal checkpoint: a folder per parameter, and the model files of one data-parallel rank. Pure.

    Raises: ConversionError: as `arrange_ranks`.
    """
    entries = replace(entries, grid=Grid(entries.grid.pp, 1, 1, entries.grid.tp))
    _require_writable(entries)
    if not entries.stage:
        raise ConversionError("no universal checkpoint for an engine without ZeRO", expected="--zero 1, 2 or 3")
    if entries.experts:
        raise ConversionError(
            "native experts in a universal checkpoint: DeepSpeed takes a rank's first expert for the first of all",
            found=f"experts of {next(iter(entries.experts))}",
        )
    ranks = [entries.of(pp, tp) for pp, tp in entries.grid.places()]
    models = [f for given in ranks for f in (*model_files(given), *layer_files(given))]
    return Arrangement("deepspeed", (*models, *parameter_files(entries)))


def _files(given: Given) -> Iterator[ArrangedFile]:
    yield from model_files(given)
    yield from layer_files(given)
    yield from expert_files(given)
    yield from optimizer_files(given) if given.stage else expert_optimizer_files(given)


def _require_masters_of_padding(entries: Entries) -> None:
    """Flat groups have an element of each state for every one of a weight, those of rows that pad a vocabulary included."""
    for name in entries.trained:
        master = entries.master(name)
        if master is not None and master.spec.shape != entries.shape(name):
            raise ConversionError(
                f"rows that pad a vocabulary have weights and no masters: {name}",
                expected=f"masters of {entries.shape(name)[0]} rows, as the weight has",
                found=f"{master.spec.shape[0]} rows, as universal checkpoints have them; DeepSpeed sets the others to zero",
                hints=[
                    "DeepSpeed loads the universal checkpoint itself, for any ranks",
                    "--to deepspeed-universal for another tp",
                ],
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


def _require_writable(entries: Entries) -> None:
    _require_cuttable(entries)
    if entries.stage not in (0, 1, 2, 3):
        raise ConversionError(f"no ZeRO stage to write: {entries.stage}", expected="0, 1, 2 or 3")
    for name in entries.trained:
        shape, master = entries.shape(name), entries.master(name)
        of_master = master.spec.shape if master is not None else shape
        own = {t.spec.shape for k, t in entries.states.get(name, {}).items() if not is_number(k, t.spec.shape, shape)}
        if own - {of_master} or (of_master != shape and of_master[1:] != shape[1:]):
            raise ConversionError(f"optimizer state that is not one number per element of its parameter: {name}")
        words = vocabulary_patterns(entries.values.get((EXTRA_STATE, INFO)))
        if name not in entries.weights and any(p.match(name) for p in words) and entries.stage < 3:
            raise ConversionError(
                f"how many rows pad {name} for the engine is not told: its weight is not stored beside its master"
            )
    if entries.is_pipeline and entries.stage > 1:
        raise ConversionError(f"a pipeline cannot be trained with ZeRO {entries.stage}", expected="--zero 0 or 1")
    if entries.experts and entries.stage == 3:
        raise ConversionError("native experts cannot be trained with ZeRO 3", expected="--zero 0, 1 or 2")
    tied = next((n for n in (*entries.weights, *entries.trained) if n.startswith(TIED)), "")
    if entries.is_pipeline and tied and not any(p.startswith(TIED) for p in entries.layers.values()):
        raise ConversionError(f"the number of the layer that holds {tied} is not stated", expected="`extra_state.pipeline`")
    if entries.experts and entries.is_pipeline:
        raise ConversionError("experts in a pipeline are not written", found=next(iter(entries.experts)))
