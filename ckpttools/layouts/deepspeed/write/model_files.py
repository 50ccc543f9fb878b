"""The files of the model: weights, the shapes of flat groups, and what the client saved. Pure. Read `model_files` first."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttools.containers.torch_archive import nest
from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.flat import share_of
from ckpttools.layouts.deepspeed.names import model_name, stem_of
from ckpttools.layouts.deepspeed.write.derived import PER_RANK
from ckpttools.layouts.deepspeed.write.given import Given
from ckpttools.layouts.deepspeed.write.partitions import flat_groups
from ckpttools.layouts.deepspeed.write.pickled import Pickled, flat_boxes, ordered, size_record
from ckpttools.layouts.deepspeed.write.settings import VERSION
from ckpttools.layouts.families import EXTRA_STATE, SCHEDULER
from ckpttools.model import ArrangedFile, Path, TensorSpec
from ckpttools.pickles.records import Object


def model_files(given: Given) -> Iterable[ArrangedFile]:
    """One file; in ZeRO 3 one of each data-parallel rank."""
    names = file_names(given)
    for rank, name in enumerate(names):
        pickled = Pickled()
        top: dict[str, object] = {"module": _module(given, pickled), "buffer_names": given.buffers, "optimizer": None}
        shapes = [{n: size_record(s) for n, s in given.shapes(group).items()} for group in flat_groups(given)]
        top["param_shapes"] = [ordered(group) for group in shapes]
        frozen = {n: size_record(t.spec.shape) for n, t in given.frozen.items()} if given.stage > 1 else None
        top["frozen_param_shapes"] = None if frozen is None else ordered(frozen)
        top["shared_params"] = dict(given.aliases) if rank == 0 else {}
        top["frozen_param_fragments"] = None if frozen is None else ordered(_fragments(given, pickled, rank))
        top |= {"lr_scheduler": None, "data_sampler": None, "random_ltd": None}
        top |= _client_state(given, pickled, stem_of(name), is_first=rank == 0)
        yield pickled.file(name, top)


def file_names(given: Given) -> list[str]:
    """Of the model files, by data-parallel rank where each has its own."""
    return [model_name(0, rank) for rank in range(given.dp)] if given.stage == 3 else [model_name(0)]


def _module(given: Given, pickled: Pickled) -> Object:
    """The state dict: whole in ZeRO 1 and 2, placeholders and buffers in ZeRO 3; tied names share a storage."""
    found: dict[str, object] = {}
    buffers = set(given.buffers)
    frozen = given.frozen
    for name in dict.fromkeys((*given.weights, *given.trained)):
        if given.stage == 3 and name not in buffers:
            found[name] = pickled.empty(name, frozen[name].spec.dtype if name in frozen else given.dtype)
        elif name in given.weights:
            found[name] = pickled.whole(given.weights[name])
        else:
            raise ConversionError(f"no weight of a parameter that is trained: {name}")
    for alias, kept in given.aliases.items():
        if kept in found:
            found[alias] = found[kept]
    for path, record in given.values.items():
        if len(path) == 1 and path[0] not in found:  # `_extra_state` of a module
            found[str(path[0])] = record
    return ordered(found)


def _fragments(given: Given, pickled: Pickled, rank: int) -> dict[str, object]:
    """Frozen parameters: whole in ZeRO 2, the rank's padded part in ZeRO 3."""
    if given.stage == 2:
        return {name: pickled.whole(tensor) for name, tensor in given.frozen.items()}
    found: dict[str, object] = {}
    for name, tensor in given.frozen.items():
        part = share_of(tensor.spec.volume, given.dp)
        found[name] = pickled.flat(tensor.spec.dtype, part, flat_boxes(tensor, rank * part, (rank + 1) * part, 0))
    return found


def _client_state(given: Given, pickled: Pickled, stem: str, *, is_first: bool) -> dict[str, object]:
    """Top-level entries: what the client saved, DeepSpeed's counters; a rank's own ones where its file had its own."""
    entries: dict[Path, object] = {}
    own: dict[Path, object] = {}
    for path, record in (*given.values.items(), *given.client.items()):
        if path[:1] not in ((SCHEDULER,), (EXTRA_STATE,)) or len(path) < 2 or not _is_of(given, path, stem, is_first=is_first):
            continue
        value = pickled.whole(record) if isinstance(record, TensorSpec) else record
        if path[0] == SCHEDULER:
            below: Path = ("lr_scheduler", *path[1:])
            entries[below] = value
        elif path[1] == stem:
            own[path[2:]] = value
        else:
            entries[path[1:]] = value
    heads = {p[0] for p in own}
    kept = {p: r for p, r in entries.items() if p[0] not in heads} | own
    sequences = {p[1:]: kind for p, kind in given.sequences.items() if p[:1] == (EXTRA_STATE,)}
    nested = nest(list(kept.items()), sequences) if kept else {}
    top = dict(nested) if isinstance(nested, dict) else {}
    top.pop("buffer_names", None)  # these two are written by what the model has
    top.pop("shared_params", None)
    top |= {"dp_world_size": given.dp, "mp_world_size": 1}
    for name, default in (("global_steps", 0), ("skipped_steps", 0), ("global_samples", 0), ("ds_version", VERSION)):
        top.setdefault(name, default)
    return top


def _is_of(given: Given, path: Path, stem: str, *, is_first: bool) -> bool:
    """Whether an entry goes into a rank's file: common ones into all, those of a rank that is gone into the first."""
    head = str(path[1])
    if path[0] == SCHEDULER or not head.startswith(PER_RANK):
        return True
    return head == stem or (is_first and head not in map(stem_of, file_names(given)))
