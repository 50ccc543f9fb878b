"""All experts of a rank in one matrix, as models without Transformer Engine's grouped linear layers store them.

`weight1` is (hidden, experts x rows), kept as (experts, hidden, rows); `weight2` is (experts x columns, hidden): the transpose of
what a linear layer has, one expert after the other. The inverse of what `resolution` reads.

Source: NVIDIA/Megatron-LM, megatron/core/transformer/moe/experts.py (GroupedMLP), core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpttools.containers.torch_archive import FlatStorage, Storage
from ckpttools.errors import ConversionError
from ckpttools.layouts.megatron_legacy.rules import LOCAL_EXPERT
from ckpttools.model import TensorSpec
from ckpttools.placement.held import HeldTensor, TurnedTensors

Held = HeldTensor | TurnedTensors
_MATRICES = {"linear_fc1.weight": "weight1", "linear_fc2.weight": "weight2"}

MAX_COLUMNS = 1 << 17
"""Columns that are turned in one conversion: each is a write of its own, which takes some 4 KB of memory and a millisecond."""


def require_few_columns(count: int) -> None:
    """Raises ConversionError for a conversion of more columns than are turned."""
    if count > MAX_COLUMNS:
        raise ConversionError(
            f"experts in one transposed matrix (`weight1`, `weight2`): more than {MAX_COLUMNS} columns are to be turned",
            expected=f"at most {MAX_COLUMNS}",
            found=f"{count} or more",
            hints=["megatron-dist holds experts as linear layers have them, and Megatron-core loads that into such modules"],
        )


def together(held: Mapping[str, HeldTensor]) -> dict[str, Held]:
    """What a rank holds, with one matrix for all of its experts in the place of the first of them. Pure.

    Raises: ConversionError: for what these modules have no place for, and experts of several shapes.
    """
    found: dict[str, Held] = {}
    groups: dict[str, dict[int, HeldTensor]] = {}
    for name, one in held.items():
        match = LOCAL_EXPERT.fullmatch(name)
        if match is None:
            found[name] = one
            continue
        if match["rest"] not in _MATRICES:
            raise ConversionError(
                f"experts in one matrix have no place for {name}",
                expected=" and ".join(_MATRICES),
                hints=[f"--exclude '{name}'"],
            )
        for which in _MATRICES.values():  # both stand where the first expert does
            found.setdefault(f"{match['module']}.{which}", one)
        groups.setdefault(f"{match['module']}.{_MATRICES[match['rest']]}", {})[int(match["expert"])] = one
    return {name: _joined(name, groups[name]) if name in groups else one for name, one in found.items()}


def columns_of(storages: Iterable[Storage]) -> int:
    """Columns that are turned to fill some storages. Pure."""
    parts = (part for one in storages for part in ([p for _, p in one.parts] if isinstance(one, FlatStorage) else [one]))
    return sum(part.slot_count for part in parts if isinstance(part, TurnedTensors))


def together_by_state(shares: Mapping[str, Mapping[str, Held]]) -> dict[str, dict[str, Held]]:
    """The same for states of the optimizer, by the name of their parameter. Pure. Raises: ConversionError: as `together`."""
    kinds = dict.fromkeys(what for states in shares.values() for what in states)
    found: dict[str, dict[str, Held]] = {}
    for what in kinds:
        held = {name: one for name, states in shares.items() if isinstance(one := states.get(what), HeldTensor)}
        for name, joined in together(held).items():
            found.setdefault(name, {})[what] = joined
    return found


def _joined(name: str, experts: Mapping[int, HeldTensor]) -> TurnedTensors:
    parts = tuple(experts[number] for number in sorted(experts))
    if len(parts) > 1 and any(one.tensor.spec.shape == () for one in parts):
        raise ConversionError(
            f"experts in one matrix have one number in the place of {len(parts)}: {parts[0].tensor.spec.name} and others",
            expected="state of the shape of its parameter",
            hints=["--exclude 'optimizer.state.*.local_experts.*.step' leaves them out", "--weights-only writes the model alone"],
        )
    shapes = {(one.spec.dtype, one.local.shape) for one in parts}
    if len(shapes) > 1 or len(parts[0].local.shape) != 2:
        told = " and ".join(sorted(f"{dtype} {list(shape)}" for dtype, shape in shapes))
        raise ConversionError(f"experts of several kinds cannot lie in one matrix: {name}", expected="one shape", found=told)
    rows, columns = parts[0].local.shape
    count = len(parts)
    shape = (columns, count * rows) if name.endswith("1") else (count * columns, rows)
    return TurnedTensors(TensorSpec(name, parts[0].spec.dtype, shape), parts)
