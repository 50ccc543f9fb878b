"""Writes what DeepSpeed's engine resumes from: ZeRO 1, 2 or 3 for any number of data-parallel ranks, and universal checkpoints.

The parameters of each group and their order come from `optimizer.param_names`, as the reader gives it. Values are only moved:
a flat partition is a storage of boxes and zeros. Read `arrange_ranks` first.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/zero/stage_1_and_2.py, deepspeed/runtime/zero/stage3.py,
deepspeed/runtime/engine.py, v0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ckpttools.containers.torch_archive import FlatStorage, Storage, arrange_archive, nest, tensor_record
from ckpttools.dtypes import DType, parse_dtype
from ckpttools.errors import ConversionError
from ckpttools.geometry import flat_range_to_boxes
from ckpttools.layouts.deepspeed.settings import DEFAULT_SUB_GROUP
from ckpttools.layouts.deepspeed.states import count, items, members, table
from ckpttools.layouts.families import EXTRA_STATE, MODEL, OPTIMIZER, SCHEDULER
from ckpttools.model import ArrangedFile, Arrangement, Box, ObjectEntry, Path, TensorEntry, TensorSpec, render_path
from ckpttools.pickles.records import Global, Object
from ckpttools.placement.held import HeldTensor
from ckpttools.placement.local import LocalTensor, Part, PlacedTensor

_ALIGNMENT_PER_RANK = 2
"""Elements: a group is padded to a multiple of twice the number of ranks."""
_VERSION = "0.19.8"
"""What is written where the source states no version: the engine refuses a snapshot without one."""
_PER_RANK = ("zero_pp_rank_", "mp_rank_")
_OURS = frozenset({"param_names", "param_groups", "state"})
"""Entries of the optimizer that are written in a place of their own."""


@dataclass(frozen=True)
class Given:
    """What is to be written, sorted by what it is."""

    weights: Mapping[str, TensorSpec]
    states: Mapping[str, Mapping[str, TensorSpec]]
    """Parameter -> key -> tensor: `fp32`, `exp_avg`, ...; of no dimensions for what a group has once, such as `step`."""
    client: Mapping[Path, TensorSpec]
    values: Mapping[Path, object]
    aliases: Mapping[str, str]
    sequences: Mapping[Path, str]
    dp: int
    stage: int

    @property
    def groups(self) -> list[list[str]]:
        """The parameters of each group. Raises ConversionError where nothing states them."""
        stated = [[n for n in items(g) if isinstance(n, str)] for g in items(self.values.get((OPTIMIZER, "param_names")))]
        missing = [n for g in stated for n in g if "fp32" not in self.states.get(n, {})]
        if not stated or missing:
            raise ConversionError(
                "the parameter groups of the optimizer are not stated, or masters are missing",
                expected="`optimizer.param_names`, as a DeepSpeed source has it, and an fp32 master of each parameter in it",
                found=f"{missing[0]} without a master" if missing else "no `optimizer.param_names`",
            )
        return stated

    @property
    def trained(self) -> list[str]:
        """The parameters of all groups."""
        return [name for group in self.groups for name in group]

    @property
    def stems(self) -> list[str]:
        """What the names of the model files begin with."""
        return [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(self.dp)] if self.stage == 3 else ["mp_rank_00"]

    @property
    def config(self) -> dict[str, object]:
        """The configuration that was saved."""
        return dict(members(self.values.get((EXTRA_STATE, "ds_config"))))

    @property
    def is_bf16(self) -> bool:
        """Whether it has bf16 switched on."""
        return (table(self.config.get("bf16")) or table(self.config.get("bfloat16"))).get("enabled") is True

    @property
    def dtype(self) -> DType:
        """Of the weights while training."""
        is_fp16 = table(self.config.get("fp16")).get("enabled") is True
        return parse_dtype("bfloat16" if self.is_bf16 else "float16" if is_fp16 else "float32")

    @property
    def buffers(self) -> list[str]:
        """Names of the model's buffers."""
        return [n for n in items(self.values.get((EXTRA_STATE, "buffer_names"))) if isinstance(n, str)]

    @property
    def frozen(self) -> dict[str, TensorSpec]:
        """Parameters that are not trained."""
        others = {*self.buffers, *self.trained}
        return {n: s for n, s in self.weights.items() if n not in others}


@dataclass(slots=True)
class Pickled:
    """A value for a torch file and the storages of its tensors, as they are added."""

    storages: dict[str, Storage] = field(default_factory=dict)

    def whole(self, spec: TensorSpec) -> Object:
        """A tensor as it is."""
        return self._add(spec, spec)

    def empty(self, name: str, dtype: DType) -> Object:
        """The placeholder of a parameter in ZeRO 3."""
        return self._add(TensorSpec(name, dtype, (0,)), b"")

    def flat(self, dtype: DType, numel: int, boxes: Iterable[tuple[int, str, Box]]) -> Object:
        """A vector of boxes, each at a place (in elements) of its own."""
        spec = TensorSpec("", dtype, (numel,))
        return self._add(spec, FlatStorage(spec, tuple((at, _share(name, dtype, box)) for at, name, box in boxes)))

    def file(self, path: str, value: object) -> ArrangedFile:
        """The archive."""
        return arrange_archive(path, value, self.storages)

    def _add(self, spec: TensorSpec, storage: Storage) -> Object:
        key = str(len(self.storages))
        self.storages[key] = storage
        return tensor_record(spec, key)


def _share(name: str, dtype: DType, box: Box) -> HeldTensor:
    """A box as a tensor of its own."""
    local = LocalTensor(box.sizes, (Part(box, Box((0,) * len(box.sizes), box.sizes)),))
    return HeldTensor(PlacedTensor(TensorSpec(name, dtype, box.sizes), ()), local)


def sort_entries(
    tensors: Sequence[tuple[TensorSpec, Path, str]],
    objects: Sequence[ObjectEntry],
    *,
    aliases: Mapping[str, str],
    sequences: Mapping[Path, str],
    dp: int,
    stage: int,
) -> Given:
    """What is to be written, sorted. Pure.

    Args: tensors: (spec under its output name, typed keys, family). aliases: further name -> the name that is written.
    """
    weights: dict[str, TensorSpec] = {}
    states: dict[str, dict[str, TensorSpec]] = {}
    client: dict[Path, TensorSpec] = {}
    for spec, path, family in tensors:
        if family == MODEL:
            weights[spec.name] = spec
        elif len(path) == 4 and path[:2] == (OPTIMIZER, "state"):
            states.setdefault(str(path[2]), {})[str(path[3])] = spec
        else:
            client[path] = spec
    tied = {alias: kept for alias, kept in aliases.items() if kept in weights or kept in states}
    return Given(weights, states, client, {o.path: o.record for o in objects}, tied, sequences, dp, stage)


@dataclass(frozen=True)
class Derived:
    """What need not be written, because it follows from the rest."""

    aliases: Mapping[str, str]
    """Further name of a tied weight -> the name that is written."""
    left: frozenset[str]
    """Tensors that the files have no place for, and that the engine makes again: weights in ZeRO 3."""
    equal: Mapping[str, str]
    """Number that is written once for a group -> the one that is written; the two must be equal."""


def find_derived(
    tensors: Mapping[str, TensorEntry], objects: Sequence[ObjectEntry], *, stage: int, dp: int, is_universal: bool = False
) -> Derived:
    """What of some tensors (by output name) need not be written. Pure."""
    named = next((o.record for o in objects if o.path == (OPTIMIZER, "param_names")), None)
    group_of = {name: g for g, group in enumerate(items(named)) for name in items(group)}
    trained = set(group_of)
    aliases: dict[str, str] = {}
    left: set[str] = set()
    kept: dict[object, str] = {}
    weights = [(n, t) for n, t in tensors.items() if t.family == MODEL and t.spec.volume]
    for name, entry in sorted(weights, key=lambda item: item[0] not in trained):
        first = kept.setdefault((entry.spec.dtype, entry.spec.shape, entry.pieces), name)
        if first != name:
            aliases[name] = first
        elif stage == 3 and name in trained:
            left.add(name)
    # a universal checkpoint has masters of parameters that are not trained, made from their weights
    left |= {
        n for n, t in tensors.items() if t.path[:2] == (OPTIMIZER, "state") and t.path[2] not in trained and t.path[2] in tensors
    }
    equal: dict[str, str] = {}
    once: dict[object, str] = {}
    for name, entry in tensors.items():
        path = entry.path
        if path[:2] == (OPTIMIZER, "state") and len(path) == 4 and entry.spec.shape == () and path[3] != "fp32":
            first = once.setdefault((group_of.get(path[2]), path[3]), name)
            if first != name and path[2] in group_of:
                equal[name] = first
    return Derived(aliases | _rank_copies(tensors, dp if stage == 3 and not is_universal else 1), frozenset(left), equal)


def _rank_copies(tensors: Mapping[str, TensorEntry], ranks: int) -> dict[str, str]:
    """Names under which further ranks' files hold the client's tensors, where a rank had none of its own."""
    shared = {n: t for n, t in tensors.items() if t.path[:1] == (EXTRA_STATE,) and not str(t.path[1]).startswith(_PER_RANK)}
    own = {t.path for t in tensors.values()}
    found: dict[str, str] = {}
    for rank in range(1, ranks):
        stem = f"zero_pp_rank_{rank}_mp_rank_00"
        for name, entry in shared.items():
            path = (EXTRA_STATE, stem, *entry.path[1:])
            if path not in own:
                found[render_path(path)] = name
    return found


def arrange_ranks(given: Given) -> Arrangement:
    """Every file of the snapshot, to the byte.

    Raises: ConversionError: when something that a resumed training needs is not there, or has no place.
    """
    if given.stage not in (1, 2, 3):
        raise ConversionError(f"no ZeRO stage to write: {given.stage}", expected="1, 2 or 3")
    given.groups  # noqa: B018  # refuses what has no groups
    odd = [n for n, s in given.states.items() for k, t in s.items() if t.shape and t.shape != given.states[n]["fp32"].shape]
    if odd:
        raise ConversionError(f"optimizer state that is not one number per element of its parameter: {odd[0]}")
    return Arrangement("deepspeed", (*_model_files(given), *_optimizer_files(given)))


def arrange_universal(given: Given) -> Arrangement:
    """Every file of a universal checkpoint, to the byte: a folder per parameter, and the model file of one rank.

    Raises: ConversionError: as `arrange_ranks`.
    """
    files = arrange_ranks(replace(given, dp=1)).files
    model = next(f for f in files if f.path.endswith("_model_states.pt"))
    return Arrangement("deepspeed", (model, *_parameter_files(given)))


def _parameter_files(given: Given) -> Iterable[ArrangedFile]:
    """`zero/<parameter>/<state>.pt` and the settings."""
    for group in given.groups:
        for name in group:
            for key in ("fp32", *_vector_keys(given, group)):
                pickled = Pickled()
                value = {"param": pickled.whole(given.states[name][key]), "cat_dim": 0}
                yield pickled.file(f"zero/{name}/{key}.pt", value)
            pickled = Pickled()
            for key, number in _numbers(given, pickled, group).items():
                yield pickled.file(f"zero/{name}/{key}.pt", number)
    pickled = Pickled()
    settings: dict[str, object] = _settings(given) | {"param_groups": given.values.get((OPTIMIZER, "param_groups"))}
    if given.stage == 3:
        states = {g: _numbers(given, pickled, group) for g, group in enumerate(given.groups)}
        settings["optimizer_state_dict"] = {"state": states, "param_groups": settings["param_groups"]}
    yield pickled.file("zero/optimizer_state.pt", settings)


def _model_files(given: Given) -> Iterable[ArrangedFile]:
    for rank, stem in enumerate(given.stems):
        pickled = Pickled()
        top: dict[str, object] = {"module": _module(given, pickled), "buffer_names": given.buffers, "optimizer": None}
        shapes = [{n: _size(given.states[n]["fp32"].shape) for n in group} for group in _flat_groups(given)]
        top["param_shapes"] = [_ordered(group) for group in shapes]
        frozen = {n: _size(s.shape) for n, s in given.frozen.items()} if given.stage > 1 else None
        top["frozen_param_shapes"] = None if frozen is None else _ordered(frozen)
        top["shared_params"] = dict(given.aliases) if rank == 0 else {}
        top["frozen_param_fragments"] = None if frozen is None else _ordered(_fragments(given, pickled, rank))
        top |= {"lr_scheduler": None, "data_sampler": None, "random_ltd": None}
        top |= _client_state(given, pickled, stem, is_first=rank == 0)
        yield pickled.file(f"{stem}_model_states.pt", top)


def _module(given: Given, pickled: Pickled) -> Object:
    """The state dict: whole in ZeRO 1 and 2, placeholders and buffers in ZeRO 3; tied names share a storage."""
    found: dict[str, object] = {}
    buffers = set(given.buffers)
    frozen = given.frozen
    for name in dict.fromkeys((*given.weights, *given.trained)):
        if given.stage == 3 and name not in buffers:
            found[name] = pickled.empty(name, frozen[name].dtype if name in frozen else given.dtype)
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
    return _ordered(found)


def _fragments(given: Given, pickled: Pickled, rank: int) -> dict[str, object]:
    """Frozen parameters: whole in ZeRO 2, the rank's padded part in ZeRO 3."""
    if given.stage == 2:
        return {name: pickled.whole(spec) for name, spec in given.frozen.items()}
    found: dict[str, object] = {}
    for name, spec in given.frozen.items():
        part = -(-spec.volume // given.dp)
        boxes = _boxes(spec, rank * part, (rank + 1) * part, 0)
        found[name] = pickled.flat(spec.dtype, part, boxes)
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
    top.pop("buffer_names", None)
    top |= {"dp_world_size": given.dp, "mp_world_size": 1}
    for name, default in (("global_steps", 0), ("skipped_steps", 0), ("global_samples", 0), ("ds_version", _VERSION)):
        top.setdefault(name, default)
    return top


def _is_of(given: Given, path: Path, stem: str, *, is_first: bool) -> bool:
    """Whether an entry goes into a rank's file: common ones into all, those of a rank that is gone into the first."""
    head = str(path[1])
    if path[0] == SCHEDULER or not head.startswith(_PER_RANK):
        return True
    return head == stem or (is_first and head not in given.stems)


def _optimizer_files(given: Given) -> Iterable[ArrangedFile]:
    prefix = "bf16_" if given.is_bf16 else ""
    common = {k: given.values[EXTRA_STATE, k] for k in ("ds_config", "ds_version") if (EXTRA_STATE, k) in given.values}
    for rank in range(given.dp):
        pickled = Pickled()
        make = _stage3_state if given.stage == 3 else _stage12_state
        value = {"optimizer_state_dict": make(given, pickled, rank), **common}
        yield pickled.file(f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", value)


def _settings(given: Given) -> dict[str, object]:
    """What the optimizer keeps beside its tensors, with what DeepSpeed cannot do without."""
    scaler = Object(Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler"), (), "newobj")
    scaler.state = {"cur_scale": 1.0, "dynamic": False}
    found: dict[str, object] = {"loss_scaler": scaler, "dynamic_loss_scale": False, "overflow": False, "clip_grad": 0.0}
    found["ds_version"] = given.values.get((EXTRA_STATE, "ds_version"), _VERSION)
    for path, record in given.values.items():
        if path[:1] == (OPTIMIZER,) and len(path) == 2 and path[1] not in _OURS:
            found[str(path[1])] = record
    found["zero_stage"] = Object(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (given.stage,))
    return found


def _param_groups(given: Given, positions: Sequence[Sequence[int]]) -> list[object]:
    """The hyperparameters of each group, with the positions of its flat vectors."""
    stated = items(given.values.get((OPTIMIZER, "param_groups")))
    if len(stated) != len(positions):
        expected = f"`optimizer.param_groups` of {len(positions)} groups"
        raise ConversionError("the settings of the parameter groups are not stated", expected=expected, found=str(len(stated)))
    return [{**table(group), "params": list(p)} for group, p in zip(stated, positions, strict=True)]


def _stage12_state(given: Given, pickled: Pickled, rank: int) -> dict[str, object]:
    masters: list[object] = []
    paddings: list[int] = []
    mappings: list[object] = []
    states: dict[int, object] = {}
    is_elastic = (OPTIMIZER, "param_groups") not in given.values  # then states have no padding, and no settings beside them
    for g, group in enumerate(_flat_groups(given)):
        total = sum(given.states[n]["fp32"].volume for n in group)
        step = _ALIGNMENT_PER_RANK * given.dp
        size = -(-total // step) * step // given.dp
        held = max(0, min(total - rank * size, size))
        paddings.append(size - held)
        masters.append(pickled.flat(_dtype(given, group, "fp32"), held, _range(given, group, "fp32", rank * size, held)))
        states[g] = {
            key: pickled.flat(
                _dtype(given, group, key), held if is_elastic else size, _range(given, group, key, rank * size, held)
            )
            for key in _vector_keys(given, group)
        } | _numbers(given, pickled, group)
        mappings.append(_slices(given, group, rank * size, size))
    rigid = {} if is_elastic else {"state": states, "param_groups": _param_groups(given, [[g] for g in states])}
    return _settings(given) | {
        "base_optimizer_state": rigid or list(states.values()),
        "single_partition_of_fp32_groups": masters,
        "group_paddings": paddings,
        "partition_count": [given.dp] * len(masters),
        "param_slice_mappings": mappings,
    }


def _stage3_state(given: Given, pickled: Pickled, rank: int) -> dict[str, object]:
    masters: list[object] = []
    states: dict[int, object] = {}
    positions: list[list[int]] = []
    for group in given.groups:
        own = []
        for sub_group in sub_groups(given, group):
            own.append(len(masters))
            vectors: dict[str, object] = {}
            for key in ("fp32", *_vector_keys(given, sub_group)):
                boxes, at = [], 0
                for name in sub_group:
                    spec = given.states[name][key]
                    part = -(-spec.volume // given.dp)
                    boxes += _boxes(spec, rank * part, (rank + 1) * part, at)
                    at += part
                vectors[key] = pickled.flat(_dtype(given, sub_group, key), at, boxes)
            masters.append(vectors.pop("fp32"))
            states[own[-1]] = _numbers(given, pickled, group) | vectors
        positions.append(own)
    settings = {k: v for k, v in _settings(given).items() if k not in ("clip_grad", "ds_version")}
    return settings | {
        "partition_count": given.dp,
        "optimizer_state_dict": {"state": states, "param_groups": _param_groups(given, positions)},
        "fp32_flat_groups": masters,
    }


def _flat_groups(given: Given) -> list[list[str]]:
    """The groups as they are stored: sub-groups in ZeRO 3, shuffled in ZeRO 2 with round robin."""
    if given.stage == 3:
        return [sub for group in given.groups for sub in sub_groups(given, group)]
    is_shuffled = table(given.config.get("zero_optimization")).get("round_robin_gradients") is True and given.stage == 2
    groups = given.groups
    if is_shuffled:
        groups = [[n for first in range(given.dp) for n in group[first :: given.dp]] for group in groups]
    return groups


def sub_groups(given: Given, group: Sequence[str]) -> list[list[str]]:
    """A group of ZeRO 3 in its sub-groups: each ends with the parameter that makes it as large as configured. Pure."""
    most = table(given.config.get("zero_optimization")).get("sub_group_size")
    limit = (count(int(most)) if isinstance(most, (int, float)) else None) or DEFAULT_SUB_GROUP
    found: list[list[str]] = [[]]
    held = 0
    for name in group:
        found[-1].append(name)
        held += -(-prod(given.states[name]["fp32"].shape) // given.dp)
        if held >= limit:
            found.append([])
            held = 0
    return [g for g in found if g]


def _range(given: Given, group: Sequence[str], key: str, low: int, numel: int) -> Iterable[tuple[int, str, Box]]:
    """The elements [low, low + numel) of a group's flat vector, as boxes at their places in the part."""
    start = 0
    for name in group:
        spec = given.states[name][key]
        first, stop = max(low, start), min(low + numel, start + spec.volume)
        if first < stop:
            yield from _boxes(spec, first - start, stop - start, first - low)
        start += spec.volume


def _boxes(spec: TensorSpec, start: int, stop: int, at: int) -> list[tuple[int, str, Box]]:
    """The elements [start, stop) of a tensor, as far as it has them, from place `at` on."""
    found = []
    first = min(start, spec.volume)
    for box in flat_range_to_boxes(spec.shape, first, max(first, min(stop, spec.volume))):
        found.append((at, spec.name, box))
        at += box.volume
    return found


def _slices(given: Given, group: Sequence[str], low: int, size: int) -> Object:
    """`param_slice_mappings`: where each parameter's elements lie in the part."""
    found, start = {}, 0
    for name in group:
        stop = start + given.states[name]["fp32"].volume
        first, last = max(start, low), min(stop, low + size)
        if first < last:
            address = Object(Global("deepspeed.utils.tensor_fragment", "fragment_address"), (), "newobj")
            address.state = {"numel": last - first, "start": first - low}
            found[name] = address
        start = stop
    return _ordered(found)


def _vector_keys(given: Given, group: Sequence[str]) -> list[str]:
    """What the inner optimizer keeps per element. Raises ConversionError when parameters of a group differ in it."""
    keys = [{k for k, s in given.states[n].items() if s.shape or not given.states[n]["fp32"].shape} - {"fp32"} for n in group]
    if any(k != keys[0] for k in keys):
        raise ConversionError(f"parameters of one group have other optimizer state than its first: {group[0]}")
    return [k for k in given.states[group[0]] if k in keys[0]]


def _numbers(given: Given, pickled: Pickled, group: Sequence[str]) -> dict[str, object]:
    """What the inner optimizer keeps once, of the group's first parameter that has it."""
    found: dict[str, object] = {}
    for name in group:
        for key, spec in given.states[name].items():
            if spec.shape == () and key != "fp32" and key not in found:
                found[key] = pickled.whole(spec)
        for path, record in given.values.items():
            if path[:3] == (OPTIMIZER, "state", name) and len(path) == 4:
                found.setdefault(str(path[3]), record)
    return found


def _dtype(given: Given, group: Sequence[str], key: str) -> DType:
    dtypes = {given.states[n][key].dtype for n in group}
    if len(dtypes) > 1:
        raise ConversionError(f"`{key}` of one group in several dtypes: {', '.join(sorted(d.name for d in dtypes))}")
    return dtypes.pop()


def _size(shape: tuple[int, ...]) -> Object:
    return Object(Global("torch", "Size"), (shape,))


def _ordered(pairs: Mapping[str, object]) -> Object:
    found = Object(Global("collections", "OrderedDict"), ())
    found.pairs = list(pairs.items())
    return found
