"""What is to be written, sorted by what it is: of the whole checkpoint, and of one model-parallel rank. Pure.

Read `sort_entries` and `Entries.of` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from ckpttools.dtypes import DType, parse_dtype
from ckpttools.errors import ConversionError
from ckpttools.geometry import intersect
from ckpttools.layouts.deepspeed.experts import expert_counts, is_expert
from ckpttools.layouts.deepspeed.flat import DEFAULT_SUB_GROUP
from ckpttools.layouts.deepspeed.orders import PARAM_NAMES, PIPELINE
from ckpttools.layouts.deepspeed.states import count, items, members, numbered, table
from ckpttools.layouts.deepspeed.write.grid import Grid
from ckpttools.layouts.families import EXTRA_STATE, MODEL, OPTIMIZER
from ckpttools.model import Box, ObjectEntry, Path, TensorSpec
from ckpttools.placement.held import HeldTensor
from ckpttools.placement.local import LocalTensor, Part, PlacedTensor

MASTER = "fp32"
BUFFER_NAMES = "buffer_names"


def is_number(key: str, shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Whether a state of a parameter is a number that its group has once, such as the step, and not one per element. Pure."""
    return shape == () and key != MASTER and (parameter != () or key == "step")


def layer_prefixes(names: Iterable[str], pipeline: object) -> dict[int, str]:
    """Number of each layer -> what its names begin with: as `extra_state.pipeline` and numbers in names have it. Pure."""
    stated = {n: p for n, p in numbered(table(pipeline).get("layers")).items() if isinstance(p, str)}
    heads = {name.partition(".")[0] for name in names}
    numbers = {int(head) for head in heads if head.isascii() and head.isdigit() and len(head) < 10}
    return dict(sorted(({n: f"{n}." for n in numbers} | stated).items()))


def buffers_in(values: Mapping[Path, object]) -> frozenset[str]:
    """Names of the model's buffers, by what the files of all ranks state. Pure."""
    stated = [r for p, r in values.items() if p[:1] == (EXTRA_STATE,) and p[-1] == BUFFER_NAMES and len(p) < 4]
    return frozenset(n for record in stated for n in items(record) if isinstance(n, str))


@dataclass(frozen=True, slots=True)
class Group:
    """The parameters of an optimizer's group that are on one pipeline stage."""

    place: int
    """Among the groups of the optimizer."""
    names: tuple[str, ...]
    """Those of experts with their global numbers."""

    @property
    def is_of_experts(self) -> bool:
        """Whether they are experts', which have data-parallel ranks of their own."""
        return bool(self.names) and is_expert(self.names[0])


@dataclass(frozen=True)
class Entries:
    """All that is to be written, sorted by what it is."""

    weights: Mapping[str, PlacedTensor]
    states: Mapping[str, Mapping[str, PlacedTensor]]
    """Parameter -> key -> tensor: `fp32`, `exp_avg`, ...; of no dimensions for what a group has once, such as `step`."""
    client: Mapping[Path, TensorSpec]
    values: Mapping[Path, object]
    aliases: Mapping[str, str]
    """Further name of a tied weight -> the name that is written."""
    sequences: Mapping[Path, str]
    grid: Grid
    stage: int

    @cached_property
    def groups(self) -> list[list[str]]:
        """The parameters of each group. Raises ConversionError where nothing states them."""
        stated = [[n for n in items(g) if isinstance(n, str)] for g in items(self.values.get(PARAM_NAMES))]
        missing = [n for g in stated for n in g if self.master(n) is None]
        if not stated or missing:
            raise ConversionError(
                "the parameter groups of the optimizer are not stated, or masters are missing",
                expected="`optimizer.param_names`, as a DeepSpeed source has it, and fp32 weights of each parameter in it",
                found=f"{missing[0]} without a master" if missing else "no `optimizer.param_names`",
            )
        return stated

    def master(self, name: str) -> PlacedTensor | None:
        """The fp32 values of a parameter: its master, or the weight itself where training is in fp32."""
        weight = self.weights.get(name)
        found = self.states.get(name, {}).get(MASTER)
        return found if found is not None or weight is None or weight.spec.dtype.name != "float32" else weight

    @cached_property
    def trained(self) -> frozenset[str]:
        """The parameters of all groups."""
        return frozenset(chain.from_iterable(self.groups))

    @cached_property
    def experts(self) -> dict[str, int]:
        """How many experts there are behind each prefix, in the order of the model."""
        return expert_counts((*chain.from_iterable(self.groups), *self.weights))

    @cached_property
    def layers(self) -> dict[int, str]:
        """Number of each layer of a pipeline -> what its names begin with."""
        return layer_prefixes((*self.weights, *self.trained), self.values.get(PIPELINE))

    @cached_property
    def layer_stages(self) -> dict[int, int]:
        """Number of each layer -> the first stage that holds it; one without parameters goes with the layer before it."""
        found: dict[int, int] = {}
        last = 0
        for number, prefix in self.layers.items():
            held = [dict(t.placement.held_at).get("pp", (0,)) for n, t in self.weights.items() if n.startswith(prefix)]
            last = found[number] = min((stages[0] for stages in held if stages), default=last)
        return found

    @cached_property
    def is_pipeline(self) -> bool:
        """Whether the model is a pipeline's, on however many stages."""
        return PIPELINE in self.values or self.grid.pp > 1

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Names of the model's buffers, on all ranks."""
        return buffers_in(self.values)

    @cached_property
    def numbers(self) -> list[dict[str, object]]:
        """Per group what the inner optimizer keeps once: of the group's first parameter that has it."""
        found: list[dict[str, object]] = []
        for group in self.groups:
            found.append({})
            for name in group:
                shape = self.shape(name)
                for key, tensor in self.states.get(name, {}).items():
                    if is_number(key, tensor.spec.shape, shape):
                        found[-1].setdefault(key, tensor.spec)
        places = {name: g for g, group in enumerate(self.groups) for name in group}
        for path, record in self.values.items():
            if path[:2] == (OPTIMIZER, "state") and len(path) == 4 and path[2] in places:
                found[places[str(path[2])]].setdefault(str(path[3]), record)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole of a parameter that is trained: as its weight has it, which may have rows that pad a vocabulary."""
        tensor = self.weights.get(name) or self.master(name)
        return tensor.spec.shape if tensor is not None else ()

    @cached_property
    def config(self) -> dict[str, object]:
        """The configuration that was saved."""
        return dict(members(self.values.get((EXTRA_STATE, "ds_config"))))

    @property
    def is_bf16(self) -> bool:
        """Whether it has bf16 switched on."""
        return (table(self.config.get("bf16")) or table(self.config.get("bfloat16"))).get("enabled") is True

    @property
    def is_half(self) -> bool:
        """Whether weights are of half the size of their masters."""
        return self.is_bf16 or table(self.config.get("fp16")).get("enabled") is True

    def of(self, pp: int, tp: int) -> Given:
        """What one model-parallel rank has, experts of all expert-parallel ranks included."""
        weights = {name: held for name, t in self.weights.items() if (held := self._held(t, pp, tp)) is not None}
        states: dict[str, dict[str, HeldTensor]] = {}
        for name in self.trained:
            shape, found = self.shape(name), dict(self.states.get(name, {}))
            master = self.master(name)
            found |= {MASTER: master} if master is not None else {}
            guide = self.weights.get(name) or master
            for key, tensor in found.items():
                if guide is not None and not is_number(key, tensor.spec.shape, shape):
                    held = self._held(guide, pp, tp)
                    if held is not None:
                        states.setdefault(name, {})[key] = _within(held, tensor)
        groups = [Group(g, tuple(n for n in group if n in states)) for g, group in enumerate(self.groups)]
        return Given(self, pp, tp, weights, states, [g for g in groups if g.names])

    def _held(self, tensor: PlacedTensor, pp: int, tp: int) -> HeldTensor | None:
        """What a rank has of a tensor, on whichever expert-parallel rank it is."""
        for ep in range(self.grid.ep):
            local = tensor.local(self.grid.shares, self.grid.rank(pp, ep, tp))
            if local is not None:
                return HeldTensor(tensor, local)
        return None


@dataclass(frozen=True)
class Given:
    """What one model-parallel rank has."""

    entries: Entries
    pp: int
    tp: int
    weights: Mapping[str, HeldTensor]
    states: Mapping[str, Mapping[str, HeldTensor]]
    """Of what is kept per element, the masters included."""
    groups: list[Group]

    @property
    def mp(self) -> int:
        """The number of the rank, as names of files have it."""
        return self.pp * self.entries.grid.tp + self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.entries.grid.dp

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return self.entries.stage

    def shape(self, name: str) -> tuple[int, ...]:
        """Of what the rank has of a parameter that is trained."""
        return self.states[name][MASTER].spec.shape

    def shapes(self, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Of several."""
        return {name: self.shape(name) for name in names}

    @property
    def zero_config(self) -> dict[str, object]:
        """What the configuration says of ZeRO."""
        return table(self.entries.config.get("zero_optimization"))

    @property
    def sub_group_size(self) -> int:
        """Elements of a rank's parts in one sub-group of ZeRO 3."""
        most = self.zero_config.get("sub_group_size")
        return (count(int(most)) if isinstance(most, (int, float)) else None) or DEFAULT_SUB_GROUP

    @property
    def dtype(self) -> DType:
        """Of the weights while training."""
        return parse_dtype("bfloat16" if self.entries.is_bf16 else "float16" if self.entries.is_half else "float32")

    @property
    def buffers(self) -> list[str]:
        """Names of the model's buffers, in the order of the source as far as it is the first rank's."""
        first = [n for n in items(self.entries.values.get((EXTRA_STATE, BUFFER_NAMES))) if isinstance(n, str)]
        names = dict.fromkeys((*first, *(n for n in self.weights if n in self.entries.buffers)))
        return [n for n in names if n in self.weights]

    @property
    def frozen(self) -> dict[str, HeldTensor]:
        """Parameters that are not trained."""
        others = self.entries.buffers | self.entries.trained
        return {n: t for n, t in self.weights.items() if n not in others}


def _within(held: HeldTensor, tensor: PlacedTensor) -> HeldTensor:
    """A tensor held as its parameter is; of fewer rows where it is without those that pad a vocabulary."""
    if tensor.spec.shape == held.tensor.spec.shape:
        return HeldTensor(tensor, held.local)
    found = []
    for part in held.local.parts:
        shared = intersect(part.box, tensor.spec.box)
        if shared is not None and shared.volume:
            offsets = tuple(p + s - b for p, s, b in zip(part.local.offsets, shared.offsets, part.box.offsets, strict=True))
            found.append(Part(shared, Box(offsets, shared.sizes)))
    return HeldTensor(tensor, LocalTensor(held.local.shape, tuple(found)))


def sort_entries(
    tensors: Sequence[PlacedTensor],
    objects: Sequence[ObjectEntry],
    *,
    aliases: Mapping[str, str],
    sequences: Mapping[Path, str],
    grid: Grid,
    stage: int,
) -> Entries:
    """What is to be written, sorted.

    Args: tensors: under their output names. aliases: further name -> the name that is written.
    """
    weights: dict[str, PlacedTensor] = {}
    states: dict[str, dict[str, PlacedTensor]] = {}
    client: dict[Path, TensorSpec] = {}
    for tensor in tensors:
        path = tensor.path
        if tensor.family == MODEL:
            weights[tensor.spec.name] = tensor
        elif len(path) == 4 and path[:2] == (OPTIMIZER, "state"):
            states.setdefault(str(path[2]), {})[str(path[3])] = tensor
        else:
            client[path] = tensor.spec
    known = weights.keys() | states.keys()
    tied = {alias: kept for alias, kept in aliases.items() if kept in known and not alias.startswith((f"{OPTIMIZER}.state.",))}
    return Entries(weights, states, client, {o.path: o.record for o in objects}, tied, sequences, grid, stage)
