"""Names the state of an optimizer that stores it by position: groups of parameters in the order of the model.

A group is a subsequence of the model's parameters: those with weight decay, those without, experts, embeddings. Which
parameters a group has is found by the shapes of its state; where that leaves a choice, the state stays unnamed.

Source: NVIDIA/Megatron-LM, megatron/core/optimizer/__init__.py (_get_param_groups) and optimizer.py
(Float16OptimizerWithFloat16Params, FP32Optimizer, ChainedOptimizer), core_v0.16; megatron/optimizer, 23.08.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ckpttools.containers.parts import StoredTensor
from ckpttools.findings import Finding
from ckpttools.layouts.megatron_legacy.assembly import Assembly
from ckpttools.layouts.megatron_legacy.buffers import add_buffers
from ckpttools.layouts.megatron_legacy.grouping import Group, assign
from ckpttools.layouts.megatron_legacy.model import Parameter, PlacedChunk
from ckpttools.layouts.megatron_legacy.names import BUFFER_FILE, Parallel, is_shard
from ckpttools.layouts.megatron_legacy.shards import Shard, TensorReader
from ckpttools.model import Path
from ckpttools.pickles.views import mapping_items, sequence_items

MASTER = "fp32"
"""What the master copy of a parameter is called below `optimizer.state.<parameter>`."""
_MASTER_LISTS = ("fp32_from_fp16_params", "fp32_from_float16_params")


@dataclass(frozen=True, slots=True)
class _State:
    """What one optimizer of one rank stores, by position."""

    state: Mapping[object, Mapping[object, object]]
    groups: tuple[Mapping[object, object], ...]
    masters: tuple[tuple[object, ...], ...]

    def ids(self, group: int) -> list[object]:
        """The positions of a group's parameters."""
        return sequence_items(self.groups[group].get("params")) or []


def add_optimizer(
    shards: Sequence[Shard], placed: Mapping[int, list[PlacedChunk]], mesh: Parallel, assembly: Assembly, reader: TensorReader
) -> None:
    """Add the optimizer's state of every rank, under the names of the parameters where they can be told."""
    for shard in shards:
        rank = shard.place.rank(mesh)
        if is_shard(shard.path):
            _add_unnamed(shard, shard.file.torch.value, shard.path.numbers[-1], assembly, reader)
        elif shard.path.file_name == BUFFER_FILE:
            model = next((s for s in shards if s.place == shard.place and s.chunks), None)
            arguments = model.arguments if model else shard.arguments
            add_buffers(shard, arguments, _expert_flags(model), placed.get(rank, []), mesh, assembly, reader)
        elif "optimizer" in shard.top:
            _Positions(shard, placed.get(rank, []), rank, mesh, assembly, reader).add()


def _optimizers(record: object) -> list[object]:
    """One optimizer, or each of a chain of them."""
    items = sequence_items(record)
    return [record] if items is None else items


def _expert_flags(shard: Shard | None) -> list[bool]:
    """For each optimizer of a chain, whether it has the experts' parameters alone."""
    flags = []
    for record in _optimizers(shard.top.get("optimizer")) if shard is not None else []:
        groups = _read_state(record).groups
        flags.append(bool(groups) and all(g.get("is_expert_parallel") is True for g in groups))
    return flags


def _read_state(record: object) -> _State:
    outer = dict(mapping_items(record) or [])
    inner = dict(mapping_items(outer.get("optimizer", record)) or [])
    state = {key: dict(mapping_items(value) or []) for key, value in mapping_items(inner.get("state")) or []}
    groups = tuple(dict(mapping_items(g) or []) for g in sequence_items(inner.get("param_groups")) or [])
    masters = next((outer[name] for name in _MASTER_LISTS if name in outer), ())
    return _State(state, groups, tuple(tuple(sequence_items(m) or ()) for m in sequence_items(masters) or ()))


class _Positions:
    """Adds the optimizers of one rank's model file."""

    def __init__(
        self,
        shard: Shard,
        chunks: Sequence[PlacedChunk],
        rank: int,
        mesh: Parallel,
        assembly: Assembly,
        reader: TensorReader,
    ) -> None:
        self._shard = shard
        self._parameters = [p for chunk in chunks for p in chunk.tensors if p.is_parameter]
        self._rank = rank
        self._has_expert_ranks = mesh.ep > 1
        self._assembly = assembly
        self._reader = reader

    def add(self) -> None:
        """Named where every optimizer's parameters can be told, else each tensor under this rank's directory."""
        records = _optimizers(self._shard.top["optimizer"])
        states = [_read_state(r) for r in records]
        is_chain = sequence_items(self._shard.top["optimizer"]) is not None
        names = [self._assign(state) for state in states]
        if any(assigned is None for assigned in names):
            expected = f"groups of the {len(self._parameters)} parameters of this rank"
            found = f"groups of {[len(s.ids(i)) for s in states for i in range(len(s.groups))]}"
            self._assembly.findings.append(Finding("optimizer-unnamed", self._shard.path.path, expected, found))
            _add_unnamed(self._shard, self._shard.top["optimizer"], self._rank, self._assembly, self._reader)
            return
        for i, (record, state, assigned) in enumerate(zip(records, states, names, strict=True)):
            for key, path, value in self._named(state, assigned or []):
                self._add_value(key, path, value)
            self._add_rest(record, ("optimizer", i) if is_chain else ("optimizer",))

    def _assign(self, state: _State) -> list[list[Parameter]] | None:
        """The parameters of each group; None where they cannot be told."""
        if not state.state and not state.masters:
            return [[] for _ in state.groups]
        groups = [
            Group(tuple(self._shapes(state, i)), _flag(settings, "is_expert_parallel"), _has_no_decay(settings))
            for i, settings in enumerate(state.groups)
        ]
        return assign(groups, self._parameters, has_expert_ranks=self._has_expert_ranks)

    def _shapes(self, state: _State, group: int) -> Iterator[tuple[int, ...] | None]:
        """The shape of each parameter of a group, as its state tells; None where it has none."""
        masters = list(state.masters[group]) if group < len(state.masters) else []
        ids = state.ids(group)
        for i, key in enumerate(ids):
            values = list(state.state.get(key, {}).values())
            values += [masters[i]] if len(masters) == len(ids) else []
            shapes = [t.shape for v in values if (t := self._tensor(("optimizer", "state", str(key)), v)) is not None]
            yield max(shapes, key=len, default=None)

    def _named(self, state: _State, assigned: list[list[Parameter]]) -> Iterator[tuple[str, Parameter, object]]:
        """(what it is, parameter, value) of every state of every parameter."""
        for i, parameters in enumerate(assigned):
            if parameters and i < len(state.masters):
                short = [p for p in parameters if p.stored.dtype.name != "float32"]
                for parameter, value in zip(short, state.masters[i], strict=False):
                    yield MASTER, parameter, value
            for parameter, key in zip(parameters, state.ids(i), strict=False):
                for what, value in state.state.get(key, {}).items():
                    yield str(what), parameter, value

    def _add_value(self, what: str, parameter: Parameter, value: object) -> None:
        stored = self._tensor(("optimizer", "state", parameter.name, what), value)
        if stored is None:
            for target in parameter.targets:
                self._assembly.add_object(("optimizer", "state", target.name, what), value)
            return
        add_state(self._assembly, parameter, what, stored, self._rank, self._shard.path.directory)

    def _add_rest(self, record: object, prefix: Path) -> None:
        """Settings, loss scale: what has no parameter. Positions are left out, since they are this rank's."""
        is_state = {"state", *_MASTER_LISTS}

        def is_kept(path: Path) -> bool:
            return not is_state.intersection(path[len(prefix) : len(prefix) + 2]) and path[-1] != "params"

        self._reader.read_tree(
            self._shard.file,
            prefix,
            record,
            lambda path, stored: self._assembly.add_whole(path, stored, self._rank) if is_kept(path) else None,
            lambda path, value: self._assembly.add_object(path, value) if is_kept(path) else None,
        )

    def _tensor(self, path: Path, record: object) -> StoredTensor | None:
        return self._reader.read(self._shard.file, path, record)


def add_state(assembly: Assembly, parameter: Parameter, what: str, stored: StoredTensor, rank: int, directory: str) -> None:
    """Add one state of a parameter: cut like the parameter where it has its shape, whole where it is one number."""
    for target in parameter.targets:
        path: Path = ("optimizer", "state", target.name, what)
        if stored.shape == parameter.stored.shape:
            rule = target.rule.describe(len(target.share.boxes) > 1)
            assembly.add(path, target.of(stored), target.share, rank, rule)
        elif stored.shape in ((), (1,)):
            assembly.add_whole(path, stored, rank, "replicated")
        else:
            assembly.add_whole((*path, directory), stored, rank)


def _add_unnamed(shard: Shard, value: object, rank: int, assembly: Assembly, reader: TensorReader) -> None:
    reader.read_tree(
        shard.file,
        ("optimizer", shard.path.directory),
        value,
        partial(assembly.add_whole, rank=rank),
        assembly.add_object,
    )


def _flag(settings: Mapping[object, object], name: str) -> bool | None:
    value = settings.get(name)
    return value if isinstance(value, bool) else None


def _has_no_decay(settings: Mapping[object, object]) -> bool:
    return settings.get("wd_mult") == 0.0
