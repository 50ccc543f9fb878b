"""What is to be written, sorted by what it is; and what of a checkpoint need not be written. Pure. Read `sort_entries` first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.dtypes import DType, parse_dtype
from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.flat import DEFAULT_SUB_GROUP
from ckpttools.layouts.deepspeed.states import count, items, members, table
from ckpttools.layouts.families import EXTRA_STATE, MODEL, OPTIMIZER
from ckpttools.model import ObjectEntry, Path, TensorSpec
from ckpttools.placement.held import HeldTensor


@dataclass(frozen=True)
class Given:
    """What is to be written, sorted by what it is."""

    weights: Mapping[str, HeldTensor]
    states: Mapping[str, Mapping[str, HeldTensor]]
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

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter that is trained."""
        return self.states[name]["fp32"].spec.shape

    def shapes(self, group: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Of the parameters of a group."""
        return {name: self.shape(name) for name in group}

    @property
    def config(self) -> dict[str, object]:
        """The configuration that was saved."""
        return dict(members(self.values.get((EXTRA_STATE, "ds_config"))))

    @property
    def zero_config(self) -> dict[str, object]:
        """What it says of ZeRO."""
        return table(self.config.get("zero_optimization"))

    @property
    def sub_group_size(self) -> int:
        """Elements of a rank's parts in one sub-group of ZeRO 3."""
        most = self.zero_config.get("sub_group_size")
        return (count(int(most)) if isinstance(most, (int, float)) else None) or DEFAULT_SUB_GROUP

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
    def frozen(self) -> dict[str, HeldTensor]:
        """Parameters that are not trained."""
        others = {*self.buffers, *self.trained}
        return {n: s for n, s in self.weights.items() if n not in others}


def sort_entries(
    tensors: Sequence[tuple[TensorSpec, Path, str]],
    objects: Sequence[ObjectEntry],
    *,
    aliases: Mapping[str, str],
    sequences: Mapping[Path, str],
    dp: int,
    stage: int,
) -> Given:
    """What is to be written, sorted.

    Args: tensors: (spec under its output name, typed keys, family). aliases: further name -> the name that is written.
    """
    weights: dict[str, HeldTensor] = {}
    states: dict[str, dict[str, HeldTensor]] = {}
    client: dict[Path, TensorSpec] = {}
    for spec, path, family in tensors:
        if family == MODEL:
            weights[spec.name] = HeldTensor.whole(spec)
        elif len(path) == 4 and path[:2] == (OPTIMIZER, "state"):
            states.setdefault(str(path[2]), {})[str(path[3])] = HeldTensor.whole(spec)
        else:
            client[path] = spec
    tied = {alias: kept for alias, kept in aliases.items() if kept in weights or kept in states}
    return Given(weights, states, client, {o.path: o.record for o in objects}, tied, sequences, dp, stage)
