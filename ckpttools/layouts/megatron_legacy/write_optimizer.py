"""Writes an optimizer's state back by position, or as flat buffers, for the parameters that one rank holds.

Which of the two the arguments tell (`use_distributed_optimizer`). The groups and their settings are those of the source;
a parameter goes to the group for its kind: with or without weight decay, experts' or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.containers.torch_archive import FlatStorage, Storage, tensor_record
from ckpttools.errors import ConversionError
from ckpttools.layouts.megatron_legacy.arguments import Arguments
from ckpttools.layouts.megatron_legacy.buffers import DEFAULT_BUCKET, lay_out
from ckpttools.layouts.megatron_legacy.experts import Held, together_by_state
from ckpttools.layouts.megatron_legacy.names import Parallel
from ckpttools.layouts.megatron_legacy.rules import EMBEDDING, find_rule
from ckpttools.layouts.megatron_legacy.spelling import ChunkNames
from ckpttools.model import Mesh, ObjectEntry, Path, TensorSpec
from ckpttools.pickles.records import Global
from ckpttools.placement.held import HeldTensor
from ckpttools.placement.local import PlacedTensor

_MASTER = "fp32"
_ALIGNMENT = 64
_VERSION = 3.0


@dataclass
class Records:
    """The tensors of one file: a storage for each, numbered."""

    storages: dict[str, Storage] = field(default_factory=dict)

    def add(self, held: Held) -> object:
        """The record of a rank's tensor."""
        key = str(len(self.storages))
        self.storages[key] = held
        return tensor_record(held.spec, key)

    def add_flat(self, flat: FlatStorage) -> object:
        """The record of a flat buffer."""
        key = str(len(self.storages))
        self.storages[key] = flat
        return tensor_record(flat.spec, key)


@dataclass(frozen=True)
class WrittenOptimizer:
    """What a rank's files have of the optimizer."""

    value: object = None
    """Under `optimizer` in the model's file; None for nothing."""
    buffers: object = None
    """All of the file of flat buffers; None for no such file."""
    buffer_storages: Mapping[str, Storage] = field(default_factory=dict)


class OptimizerWriter:
    """Writes the optimizer of every rank of one mesh."""

    def __init__(
        self, tensors: Sequence[PlacedTensor], objects: Sequence[ObjectEntry], arguments: Arguments, mesh: Parallel
    ) -> None:
        self._is_grouped = arguments.has_experts_in_one
        self._has_expert_ranks = mesh.ep > 1
        self._has_stages = mesh.pp > 1
        self._arguments = arguments
        self._state: dict[str, dict[str, PlacedTensor]] = {}
        for tensor in tensors:
            path = tensor.path
            if len(path) == 4 and path[:2] == ("optimizer", "state"):
                self._state.setdefault(str(path[2]), {})[str(path[3])] = tensor
            elif tensor.family == "optimizer" and path[-1:] and "grad_scaler" not in path:
                raise ConversionError(f"state of no parameter: {tensor.spec.name}", hints=[f"--exclude '{tensor.spec.name}'"])
        self._objects = [o for o in objects if o.path[:1] == ("optimizer",)]
        self._scaler = [t for t in tensors if "grad_scaler" in t.path]
        self._is_flat = arguments.flag("use_distributed_optimizer") is True
        self._settings = self._read_settings()

    def _read_settings(self) -> list[dict[object, object]]:
        """The settings of each group of the source, over all optimizers of a chain."""
        groups: dict[Path, dict[object, object]] = {}
        for entry in self._objects:
            if "param_groups" in entry.path:
                at = entry.path.index("param_groups") + 2
                if len(entry.path) == at + 1 and entry.path[at] != "params":
                    groups.setdefault(entry.path[:at], {})[entry.path[at]] = entry.record
        return list(groups.values())

    def write(
        self,
        held: Mapping[str, Held],
        chunks: Sequence[ChunkNames],
        mesh: Mesh,
        rank: int,
        records: Records,
        *,
        is_first: bool,
    ) -> WrittenOptimizer:
        """The optimizer of one rank.

        Args: is_first: whether it is of the first stage, which alone cuts its buffers into buckets.
        """
        if not self._state:
            return WrittenOptimizer()
        shares = self._shares(mesh, rank)
        parameters = [[n for n, _ in chunk.names if self._is_trained(n)] for chunk in chunks]
        kinds = [False, True] if self._has_expert_ranks and any(map(_is_expert, held)) else [False]
        values, flats = [], []
        buffers = Records()
        for is_expert in kinds:
            mine = [[n for n in names if len(kinds) == 1 or _is_expert(n) == is_expert] for names in parameters]
            rest = self._rest(records, mesh, rank)
            if self._is_flat:
                groups = [dict(s) for s in self._settings_of(is_expert)]
                values.append({"optimizer": {"param_groups": groups}, **rest})
                flats.append(self._flat(mine, held, shares, buffers, is_first=is_first))
            else:
                values.append(
                    {**self._by_position([n for names in mine for n in names], held, shares, records, is_expert), **rest}
                )
        value = values[0] if len(kinds) == 1 else values
        if not self._is_flat:
            return WrittenOptimizer(value)
        return WrittenOptimizer(value, flats[0] if len(kinds) == 1 else flats, buffers.storages)

    def _shares(self, mesh: Mesh, rank: int) -> dict[str, dict[str, Held]]:
        found: dict[str, dict[str, Held]] = {}
        for name, states in self._state.items():
            for what, tensor in states.items():
                local = tensor.local(mesh, rank)
                if local is not None:
                    found.setdefault(name, {})[what] = HeldTensor(tensor, local)
        return together_by_state(found) if self._is_grouped else found

    def _is_trained(self, name: str) -> bool:
        rule = find_rule(name, _VERSION)
        return rule is None or rule.is_parameter

    def _settings_of(self, is_expert: bool) -> list[dict[object, object]]:
        """The settings of the two groups of an optimizer: with weight decay, and without."""
        found = []
        for has_no_decay in (False, True):
            fitting = [s for s in self._settings if _has_no_decay(s) == has_no_decay]
            same = [s for s in fitting if s.get("is_expert_parallel", False) == is_expert] or fitting
            if len(same) > 1:
                raise ConversionError(
                    "nothing says which parameters each group of the optimizer has",
                    found=f"{len(same)} groups {'without' if has_no_decay else 'with'} weight decay",
                    hints=["--exclude 'optimizer.*' or --weights-only writes the model alone"],
                )
            if same:
                found.append(same[0] | ({"is_expert_parallel": is_expert} if "is_expert_parallel" in same[0] else {}))
        if not found:
            raise ConversionError("the source has no settings of the optimizer's groups", found="no `param_groups`")
        return found

    def _by_position(
        self,
        names: Sequence[str],
        held: Mapping[str, Held],
        shares: Mapping[str, Mapping[str, Held]],
        records: Records,
        is_expert: bool,
    ) -> dict[object, object]:
        settings = self._settings_of(is_expert)
        groups: list[list[str]] = [[] for _ in settings]
        for name in names:
            is_vector = self._is_vector(name, held[name])
            groups[next((i for i, s in enumerate(settings) if _has_no_decay(s) == is_vector), 0)].append(name)
        state: dict[object, object] = {}
        masters: list[object] = []
        numbered: list[dict[object, object]] = []
        for group, members in zip(settings, groups, strict=True):
            first = len(state)
            masters.append([records.add(shares[n][_MASTER]) for n in members if _MASTER in shares.get(n, {})])
            for name in members:
                inner: dict[object, object] = {w: records.add(h) for w, h in shares.get(name, {}).items() if w != _MASTER}
                inner |= {o.path[3]: o.record for o in self._objects if o.path[1:3] == ("state", name) and len(o.path) == 4}
                state[len(state)] = inner
            numbered.append({**group, "params": list(range(first, len(state)))})
        value: dict[object, object] = {"optimizer": {"state": state, "param_groups": numbered}}
        if any(_MASTER in states for states in self._state.values()):
            value["fp32_from_fp16_params"] = masters
        return value

    def _is_vector(self, name: str, held: Held) -> bool:
        if self._arguments.flag("apply_wd_to_qk_layernorm") and ("q_layernorm." in name or "k_layernorm." in name):
            return False
        return len(held.local.shape) < 2 or name.endswith(".bias")

    def _rest(self, records: Records, mesh: Mesh, rank: int) -> dict[object, object]:
        """The loss scale, where there is one."""
        scaler: dict[object, object] = {}
        for tensor in self._scaler:
            local = tensor.local(mesh, rank)
            if local is not None:
                scaler[tensor.path[-1]] = records.add(HeldTensor(tensor, local))
        for entry in self._objects:
            if "grad_scaler" in entry.path[:-1]:
                scaler[entry.path[-1]] = entry.record
        return {"grad_scaler": scaler} if scaler else {}

    def _flat(
        self,
        chunks: Sequence[Sequence[str]],
        held: Mapping[str, Held],
        shares: Mapping[str, Mapping[str, Held]],
        buffers: Records,
        *,
        is_first: bool,
    ) -> dict[object, object]:
        """One buffer per chunk and dtype, parameters in reverse."""
        found: dict[object, object] = {"buckets_coalesced": True}
        index = 0
        for position, chunk in enumerate(chunks):
            by_dtype: dict[str, list[str]] = {}
            for name in chunk:
                by_dtype.setdefault(held[name].spec.dtype.name, []).append(name)
            for dtype, names in by_dtype.items():
                names = names[::-1]
                own = [self._has_stages and self._arguments.is_tied and n.endswith(EMBEDDING) for n in names]
                limit = self._bucket_limit() if is_first and position == 0 else None
                *starts, length = lay_out([held[n].spec.volume for n in names], _ALIGNMENT, limit, own)
                world: dict[object, object] = {}
                for what in dict.fromkeys(w for n in names for w in shares.get(n, {})):
                    missing = [n for n in names if what not in shares.get(n, {})]
                    if missing:
                        raise ConversionError(
                            f"no `{what}` of {missing[0]}", found=f"it is there of {len(names) - len(missing)} others"
                        )
                    parts = tuple((start, shares[n][what]) for n, start in zip(names, starts, strict=True))
                    spec = TensorSpec(what, parts[0][1].spec.dtype, (length,))
                    world["param" if what == _MASTER else what] = buffers.add_flat(FlatStorage(spec, parts))
                world["numel_unpadded"] = length
                grads = "float32" if self._arguments.flag("accumulate_allreduce_grads_in_fp32") else dtype
                found[index] = {(Global("torch", dtype), Global("torch", grads)): world}
                index += 1
        return found

    def _bucket_limit(self) -> int | None:
        if self._arguments.flag("overlap_grad_reduce") is not True:
            return None
        ranks = self._arguments.number("data_parallel_size") or 1
        return self._arguments.number("ddp_bucket_size") or max(DEFAULT_BUCKET, 1_000_000 * ranks)


def _is_expert(name: str) -> bool:
    return ".local_experts." in name or ".experts.weight" in name


def _has_no_decay(settings: Mapping[object, object]) -> bool:
    if "wd_mult" in settings:
        return settings["wd_mult"] == 0.0
    return settings.get("weight_decay") == 0.0
