"""The files of all ranks, opened: which ranks there are, which are missing, and which are left over from another save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from ckpttools.containers.torch_entries import RankFile
from ckpttools.findings import Finding
from ckpttools.layouts.deepspeed.fused_experts import Fused, read_fused
from ckpttools.layouts.deepspeed.names import Names, model_name, model_sibling, optimizer_name, rank_sibling
from ckpttools.layouts.deepspeed.states import (
    Files,
    Shapes,
    count,
    counts,
    enum_value,
    items,
    members,
    shape_tables,
    table,
)

_MAX_NAMED = 64
_MAX_RANKS = 1 << 24


@dataclass(slots=True)
class ModelFile:
    """`*_model_states.pt` of one rank."""

    path: str
    dp: int
    mp: int
    file: RankFile
    top: dict[str, object]
    module: dict[str, object]
    """State dict by name; empty in a pipeline, whose layers have files of their own."""
    shapes: list[Shapes] | None
    """Per parameter group the shapes in the order of the flat buffer; None when ZeRO is off."""
    frozen_shapes: Shapes
    fragments: dict[str, object]
    """Of frozen parameters: whole tensors, or the padded part of this rank in ZeRO 3."""
    buffers: frozenset[str]
    shared: dict[str, str]
    """Further name of a tied parameter -> the name under which it is kept."""

    @property
    def autoep_layers(self) -> object:
        """What AutoEP says of its layers, under either of its names."""
        stated = self.top.get("ds_autoep_layers")
        return self.top.get("autoep_layers") if stated is None else stated

    @property
    def step(self) -> int | None:
        """Training steps done."""
        return count(self.top.get("global_steps"))


@dataclass(slots=True)
class OptimizerFile:
    """`*_optim_states.pt` of one rank."""

    path: str
    dp: int
    mp: int
    file: RankFile
    top: dict[str, object]
    """What the optimizer keeps, by DeepSpeed's names."""
    order: tuple[int, ...] = ()
    """Per group of the model file the place that it has in this file, where ranks order their groups differently."""

    def place(self, g: int) -> int:
        """Where in this file the group stands that the model file has at `g`."""
        return self.order[g] if g < len(self.order) else g

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None of the bf16 optimizer, which does not state it."""
        return enum_value(self.top.get("zero_stage"))

    @property
    def config(self) -> dict[str, object]:
        """The configuration that was saved with it."""
        return dict(members(table(self.file.torch.value).get("ds_config")))

    @property
    def slices(self) -> list[dict[str, object]]:
        """Per group the parameters that the rank has a part of, and where."""
        return [table(group) for group in items(self.top.get("param_slice_mappings"))]

    @property
    def partitions(self) -> list[int]:
        """Over how many ranks each group is spread; one number for all in ZeRO 3."""
        stated = self.top.get("partition_count")
        one = count(stated)
        return [one] if one is not None else counts(stated)


@dataclass(slots=True)
class Ranks:
    """All ranks of a snapshot."""

    models: dict[tuple[int, int], ModelFile] = field(default_factory=dict)
    optimizers: dict[tuple[int, int], OptimizerFile] = field(default_factory=dict)
    dp: int = 1
    tp: int = 1
    pp: int = 1
    stage: int = 0
    fused: dict[str, Fused] = field(default_factory=dict)
    """Parameters that are all experts of a layer in one (AutoEP)."""
    is_bf16: bool = False

    @property
    def first(self) -> ModelFile | None:
        """The model file that speaks for all."""
        return self.models[min(self.models, key=lambda k: (k[1], k[0]))] if self.models else None

    @property
    def trained(self) -> set[str]:
        """Every parameter in a flat buffer, by the names that the model files state, or else the optimizer files."""
        stated = {name for model in self.models.values() for group in model.shapes or [] for name in group}
        return stated or {name for file in self.optimizers.values() for group in file.slices for name in group}

    def order_groups(self) -> None:
        """Tell the order of each file's groups by the parameters that they are said to hold.

        Groups of experts of several sizes are in the order of a set of names, which is another one in every process.
        """
        for (_, mp), file in self.optimizers.items():
            model = self.model_of(mp)
            file.order = _order_of(model.shapes or [], file) if model is not None else ()

    def name_groups(self, shape_of: Callable[[str], tuple[int, ...] | None]) -> None:
        """Make up for model files that do not state their groups: the optimizer files say which parameters each rank has.

        So it is in a pipeline with the bf16 optimizer and ZeRO off.
        """
        for (_, mp), model in self.models.items():
            if model.shapes is None:
                model.shapes = _groups_of(list(self.optimizers_of(mp).values()), shape_of)

    def model_of(self, mp: int) -> ModelFile | None:
        """The model file of a model-parallel rank; in ZeRO 3 the one of its first data-parallel rank that is there."""
        return next((self.models[k] for k in sorted(self.models) if k[1] == mp), None)

    def optimizers_of(self, mp: int) -> dict[int, OptimizerFile]:
        """The optimizer files of a model-parallel rank by data-parallel rank."""
        return {dp: f for (dp, m), f in sorted(self.optimizers.items()) if m == mp}


def _groups_of(ranks: list[OptimizerFile], shape_of: Callable[[str], tuple[int, ...] | None]) -> list[Shapes] | None:
    """Per group the parameters in the order of the flat vector, by the slices of all ranks."""
    found: list[Shapes] = []
    for g in range(max((len(f.slices) for f in ranks), default=0)):
        numels: dict[str, int] = {}
        for file in ranks:
            for name, record in file.slices[g].items() if g < len(file.slices) else ():
                numels[name] = numels.get(name, 0) + (count(members(record).get("numel")) or 0)
        found.append({name: shape_of(name) or (numel,) for name, numel in numels.items()})
    return found or None


def _order_of(groups: list[Shapes], file: OptimizerFile) -> tuple[int, ...]:
    """Per group its place in a file; empty where that is the usual one, or cannot be told."""
    places: dict[int, int] = {}
    for place, names in enumerate(file.slices):
        found = [g for g, shapes in enumerate(groups) if names and names.keys() <= shapes.keys()]
        if len(found) == 1:
            places.setdefault(found[0], place)
    rest = iter([p for p in range(len(groups)) if p not in places.values()])
    order = tuple(places[g] if g in places else next(rest, g) for g in range(len(groups)))
    return order if order != tuple(range(len(groups))) and sorted(order) == list(range(len(groups))) else ()


def open_models(files: Files, names: Names) -> dict[tuple[int, int], ModelFile]:
    """Every model file that can be understood."""
    found = {}
    known: dict[int, ModelFile] = {}  # most ranks say the same, in one and the same object
    for (dp, mp), path in sorted(names.model.items()):
        file = files.open(path, mp if not names.is_sharded else dp)
        if file is not None:
            like = known.get(id(file.torch.value))
            if like is None:
                like = known[id(file.torch.value)] = _model_file(files, path, dp, mp, file)
            found[dp, mp] = replace(like, path=path, dp=dp, mp=mp, file=file)
    return found


def _model_file(files: Files, path: str, dp: int, mp: int, file: RankFile) -> ModelFile:
    top = table(file.torch.value)
    if not top:
        files.findings.append(Finding("bad-container", path, "a mapping, as DeepSpeed writes it", "something else"))
    frozen = shape_tables(top.get("frozen_param_shapes"), files.findings, path) or [{}]
    return ModelFile(
        path,
        dp,
        mp,
        file,
        top,
        table(top.get("module")),
        shape_tables(top.get("param_shapes"), files.findings, path),
        frozen[0],
        table(top.get("frozen_param_fragments")),
        frozenset(n for n in items(top.get("buffer_names")) if isinstance(n, str)),
        {k: v for k, v in table(top.get("shared_params")).items() if isinstance(v, str)},
    )


def open_optimizers(files: Files, names: Names) -> dict[tuple[int, int], OptimizerFile]:
    """Every optimizer file that can be understood."""
    found = {}
    for (dp, mp), path in sorted(names.optimizer.items()):
        file = files.open(path, dp)
        if file is None:
            continue
        top = table(table(file.torch.value).get("optimizer_state_dict"))
        if not top:
            files.findings.append(Finding("bad-container", path, "`optimizer_state_dict`, as DeepSpeed writes it", "none"))
            continue
        found[dp, mp] = OptimizerFile(path, dp, mp, file, top)
    return found


def bf16_of(models: Iterable[ModelFile]) -> bool | None:
    """Whether bf16 is on in the configuration that was saved; None when there is none."""
    for model in models:
        config = members(model.top.get("ds_config"))
        if config:
            section = table(config.get("bf16")) or table(config.get("bfloat16"))
            return section.get("enabled") is True
    return None


def find_ranks(files: Files, names: Names) -> Ranks:
    """Open all files and tell how many ranks there must be; what is missing or foreign becomes findings."""
    ranks = Ranks(open_models(files, names), open_optimizers(files, names))
    ranks.fused = next((f for m in ranks.models.values() if (f := read_fused(m.autoep_layers))), {})
    ranks.is_bf16 = bf16_of(ranks.models.values()) is True
    stages = [f.stage for f in ranks.optimizers.values() if f.stage is not None]
    ranks.stage = 3 if names.is_sharded else (stages[0] if stages else int(bool(ranks.optimizers)))
    ranks.dp = _data_parallel_size(ranks, names)
    ranks.pp, ranks.tp = _grid(ranks, names)
    _drop_foreign(files, ranks)
    files.findings += _missing(ranks, names)
    for kept, other in names.doubled:
        files.findings.append(Finding("rank-mismatch", other, "one file of each rank", f"`{kept}` of the same rank"))
    return ranks


def _data_parallel_size(ranks: Ranks, names: Names) -> int:
    """Over how many ranks the optimizer is spread: as the model file says, if an optimizer file says the same."""
    stated = {k: max(f.partitions, default=0) for k, f in ranks.optimizers.items()}
    first = ranks.first
    told = count(first.top.get("dp_world_size")) if first else None
    if told and (not stated or told in stated.values()):
        return min(told, _MAX_RANKS)
    if stated:
        found = stated.get((0, 0)) or Counter(stated.values()).most_common(1)[0][0]
        return min(found, _MAX_RANKS) or 1
    return max((dp for dp, _ in (*names.model, *names.optimizer)), default=0) + 1


def _grid(ranks: Ranks, names: Names) -> tuple[int, int]:
    """(pipeline stages, tensor-parallel ranks)."""
    there = max((mp for _, mp in (*names.model, *names.optimizer)), default=0) + 1
    first = ranks.first
    stated = table(first.top.get("checkpoint_parallel_dimensions")) if first else {}
    pp, tp = count(stated.get("pp_degree")), count(stated.get("tp_degree"))
    if pp and tp and pp * tp <= _MAX_RANKS:
        return pp, tp
    if names.layers:
        tp = max(t for _, t in names.layers) + 1
        return max(1, -(-there // tp)), tp
    return 1, there


def _drop_foreign(files: Files, ranks: Ranks) -> None:
    """Take out files of ranks that there are not, and those that say that they are of another number of ranks."""
    for key, file in list(ranks.optimizers.items()):
        size = max(file.partitions, default=ranks.dp)
        if key[0] >= ranks.dp or size not in (ranks.dp, 0):
            found = f"rank {key[0]} of {size}"
            files.findings.append(Finding("foreign-rank", file.path, f"a file of one of {ranks.dp} ranks", found))
            del ranks.optimizers[key]
    is_sharded = any(dp for dp, _ in ranks.models)
    for key, model in list(ranks.models.items()):
        size = count(model.top.get("dp_world_size")) or ranks.dp
        if (is_sharded and key[0] >= ranks.dp) or key[1] >= ranks.pp * ranks.tp:
            expected = f"a file of one of {ranks.dp} data-parallel and {ranks.pp * ranks.tp} model-parallel ranks"
            found = f"data-parallel rank {key[0]} of {size}, model-parallel rank {key[1]}"
            files.findings.append(Finding("foreign-rank", model.path, expected, found))
            del ranks.models[key]


def _missing(ranks: Ranks, names: Names) -> Iterator[Finding]:
    """A finding per absent file, under the name that it would have (the first few when many are absent)."""
    mp, found = ranks.pp * ranks.tp, []
    others = [*names.optimizer.values(), *names.layers.values(), *names.experts.values(), *names.expert_optimizer.values()]
    if names.model or (others and not names.is_universal):
        is_sharded = names.is_sharded or (not names.model and ranks.stage == 3)
        directory, slash, _ = next(iter(others), "").rpartition("/")
        sample = next(iter(names.model.values()), directory + slash + model_name(0, 0 if is_sharded else None))
        found.append((names.model, sample, (ranks.dp if is_sharded else 1, mp)))
    uses_zero = any(m.shapes is not None for m in ranks.models.values())
    if names.optimizer or (uses_zero and not names.is_universal):
        sample = next(iter(names.optimizer.values()), "")
        if not sample:
            directory, slash, _ = next(iter(names.model.values()), "").rpartition("/")
            sample = directory + slash + optimizer_name(0, 0, is_bf16=ranks.is_bf16)
        found.append((names.optimizer, sample, (ranks.dp, mp)))
    for there, sample, (dp_size, mp_size) in found:
        total = dp_size * mp_size
        absent = ((d, m) for m in range(mp_size) for d in range(dp_size) if (d, m) not in there)
        for d, m in islice(absent, _MAX_NAMED):
            present = sum(1 for k in there if k[0] < dp_size and k[1] < mp_size)
            name = rank_sibling(model_sibling(sample, m), d)
            yield Finding("missing-rank", name, f"one file for each of {total} ranks", f"{present} of {total} files")
