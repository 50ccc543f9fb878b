"""What the client saved beside the model, and what DeepSpeed says of the ranks. Pure. Read `client_state` first."""

from __future__ import annotations

from dataclasses import replace

from ckpttools.containers.torch_archive import nest
from ckpttools.layouts.deepspeed.names import stem_of
from ckpttools.layouts.deepspeed.orders import PIPELINE
from ckpttools.layouts.deepspeed.states import members
from ckpttools.layouts.deepspeed.write.derived import PER_RANK
from ckpttools.layouts.deepspeed.write.given import BUFFER_NAMES, Given
from ckpttools.layouts.deepspeed.write.pickled import Pickled
from ckpttools.layouts.deepspeed.write.settings import VERSION
from ckpttools.layouts.deepspeed.write.ways import INFO, stated_ways
from ckpttools.layouts.families import EXTRA_STATE, SCHEDULER
from ckpttools.model import Path, TensorSpec
from ckpttools.pickles.records import Object

_DIMENSIONS = "checkpoint_parallel_dimensions"
_OF_RANKS = frozenset({BUFFER_NAMES, "shared_params", "dp_world_size", "mp_world_size", _DIMENSIONS, PIPELINE[1]})
"""Entries that say something of the ranks, or of what is on one, and are made for those that are written."""
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
"""What Megatron's arguments say of the ranks, and compare when training resumes."""


def client_state(given: Given, pickled: Pickled, name: str, *, is_first: bool) -> dict[str, object]:
    """Top-level entries of a model file: those of all ranks, and a rank's own ones where its file had its own."""
    kept = _entries(given, pickled, stem_of(name), is_first=is_first)
    sequences = {p[1:]: kind for p, kind in given.entries.sequences.items() if p[:1] == (EXTRA_STATE,)}
    nested = nest(list(kept.items()), sequences) if kept else {}
    top = {k: v for k, v in nested.items() if k not in _OF_RANKS} if isinstance(nested, dict) else {}
    grid = given.entries.grid
    top |= {"dp_world_size": grid.dp, "mp_world_size": grid.mp}
    if grid.mp > 1 or (EXTRA_STATE, _DIMENSIONS) in given.entries.values:
        top[_DIMENSIONS] = {"pp_degree": grid.pp, "tp_degree": grid.tp}
    if "args" in top:
        top["args"] = _resized(top["args"], dict(zip(_SIZES, (grid.tp, grid.pp), strict=True)))
    info = stated_ways(given.entries, top.get(INFO))
    if info is not None:
        top[INFO] = info
    for key, default in (("global_steps", 0), ("skipped_steps", 0), ("global_samples", 0), ("ds_version", VERSION)):
        top.setdefault(key, default)
    return top


def _entries(given: Given, pickled: Pickled, stem: str, *, is_first: bool) -> dict[Path, object]:
    stems = given.entries.grid.stems(given.stage)
    shared: dict[Path, object] = {}
    own: dict[Path, object] = {}
    for path, record in (*given.entries.values.items(), *given.entries.client.items()):
        if path[:1] not in ((SCHEDULER,), (EXTRA_STATE,)) or len(path) < 2:
            continue
        value = pickled.whole(record) if isinstance(record, TensorSpec) and _is_of(path, stem, stems, is_first) else record
        if path[0] == SCHEDULER:
            below: Path = ("lr_scheduler", *path[1:])
            shared[below] = value
        elif not str(path[1]).startswith(PER_RANK):
            shared[path[1:]] = value
        elif path[1] == stem:
            own[path[2:]] = value
        elif is_first and path[1] not in stems and path[2] not in _OF_RANKS:  # of a rank that is gone
            shared[path[1:]] = value
    # where one is a branch and the other a leaf, the rank's own counts
    starts = {p[:i] for p in own for i in range(1, len(p) + 1)}
    return {p: r for p, r in shared.items() if p not in starts and not any(p[:i] in own for i in range(1, len(p)))} | own


def _is_of(path: Path, stem: str, stems: list[str], is_first: bool) -> bool:
    """Whether an entry goes into a rank's file."""
    head = str(path[1])
    return path[0] == SCHEDULER or not head.startswith(PER_RANK) or head == stem or (is_first and head not in stems)


def _resized(record: object, sizes: dict[str, int]) -> object:
    """Arguments with the new numbers of ranks, where they say them."""
    known = members(record)
    changed = {key: size for key, size in sizes.items() if key in known}
    if not changed or not isinstance(record, Object) or not isinstance(record.state, dict):
        return record
    return replace(record, state={**record.state, **changed})
