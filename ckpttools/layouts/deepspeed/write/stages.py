"""Which pipeline stages hold a layer, and which expert-parallel rank an expert. Pure. Read `held_at` first.

How a pipeline is divided is an argument of its program, and files do not have it. With the number of stages of the source the
division is the source's; with another it is what the same method gives, where one of DeepSpeed's methods gives the source's.

Source: deepspeedai/DeepSpeed, deepspeed/runtime/pipe/module.py (`_partition_layers`), deepspeed/runtime/utils.py
(`partition_balanced`, `partition_uniform`), v0.19.8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.experts import expert_counts, split_expert
from ckpttools.layouts.deepspeed.orders import TIED
from ckpttools.layouts.deepspeed.states import items, table
from ckpttools.layouts.deepspeed.write.given import layer_prefixes
from ckpttools.layouts.deepspeed.write.grid import Grid

Held = tuple[tuple[str, tuple[int, ...]], ...]
_HINT = "--pp-layers 4,4 says how many layers each stage has"


def held_at(
    names: Mapping[str, int], pipeline: object, trained: Sequence[str], grid: Grid, layers: Sequence[int]
) -> dict[str, Held]:
    """(axis, places along it) at which each parameter is, for those that are not everywhere.

    Args:
        names: parameters and buffers, with the number of their elements on a tensor-parallel rank.
        pipeline: the object `extra_state.pipeline` of the source.
        trained: what the optimizer's groups have, in order.
        layers: numbers of layers on each stage that a user gave; none for what the source tells.

    Raises: ConversionError: when the division of the layers cannot be told, or experts cannot be divided.
    """
    found: dict[str, Held] = {}
    if grid.pp > 1:
        division = Division(names, pipeline, frozenset(trained))
        for name, stages in division.stages(grid.pp, layers).items():
            found[name] = (("pp", stages),)
    if grid.ep > 1:
        counts = expert_counts((*trained, *names))
        for prefix, number in counts.items():
            if number % grid.ep:
                raise ConversionError(f"{number} experts of {prefix} cannot be divided by {grid.ep} expert-parallel ranks")
        for name in names:
            prefix, expert, _ = split_expert(name)
            if expert is not None:
                found[name] = (*found.get(name, ()), ("ep", (expert // (counts[prefix] // grid.ep),)))
    return found


@dataclass(frozen=True)
class Division:
    """The layers of a pipeline, as far as the source tells of them."""

    names: Mapping[str, int]
    pipeline: object
    trained: frozenset[str]

    @cached_property
    def prefixes(self) -> dict[int, str]:
        """Number of a layer -> what its names begin with."""
        return layer_prefixes(self.names, self.pipeline)

    @cached_property
    def source(self) -> list[frozenset[str]]:
        """The parameters on each stage of the source."""
        stated = [frozenset(n for n in items(s) if isinstance(n, str)) for s in items(table(self.pipeline).get("stages"))]
        return stated if all(stated) else []

    @cached_property
    def has_head(self) -> dict[str, bool]:
        """Prefix of each tied module -> whether its last use has no file, being a function."""
        found = {}
        for prefix in {f"{TIED}{n[len(TIED) :].partition('.')[0]}." for n in self.names if n.startswith(TIED)}:
            found[prefix] = sum(p == prefix for p in self.prefixes.values()) < 2
        return found

    def stages(self, pp: int, layers: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The stages that hold each parameter. Raises ConversionError."""
        if not self.prefixes:
            raise ConversionError(
                "nothing to divide into stages: no layers of a pipeline", expected="names that begin with a layer's number"
            )
        if not layers and len(self.source) == pp:
            return self._as_source()
        stage_of = self._given(layers, pp) if layers else self._told(pp)
        return self._of(stage_of, pp)

    def _as_source(self) -> dict[str, tuple[int, ...]]:
        """As the source has it; what is not trained is where its layer is."""
        found = {n: tuple(i for i, stage in enumerate(self.source) if n in stage) for n in self.names}
        by_prefix: dict[str, tuple[int, ...]] = {}
        for name, stages in found.items():
            if stages:
                by_prefix.setdefault(self._prefix(name), stages)
        last: tuple[int, ...] = (0,)
        for prefix in self.prefixes.values():
            last = by_prefix.setdefault(prefix, last)[:1]
        return {n: stages or by_prefix.get(self._prefix(n), ()) for n, stages in found.items()}

    def _given(self, layers: Sequence[int], pp: int) -> dict[int, int]:
        """Number of a layer -> stage, as a user says."""
        if len(layers) != pp or sum(layers) != len(self.prefixes):
            expected = f"{pp} numbers that make {len(self.prefixes)} layers ({', '.join(map(str, self.prefixes))})"
            found = f"{len(layers)} that make {sum(layers)}"
            raise ConversionError("the layers per stage do not fit", expected=expected, found=found)
        stages = [stage for stage, number in enumerate(layers) for _ in range(number)]
        return dict(zip(self.prefixes, stages, strict=True))

    def _told(self, pp: int) -> dict[int, int]:
        """Number of a layer -> stage, by the method that the source was divided by."""
        own = {n: stages[0] for n, p in self.prefixes.items() if (stages := self._source_stages(p))}
        fitting = [
            weights
            for weights in self._methods()
            if len(self.source) > 1 and all(self._by(weights, len(self.source))[n] == stage for n, stage in own.items())
        ]
        told = [self._by(weights, pp) for weights in fitting]
        if not told or any(t != told[0] for t in told):
            why = "fit several of" if told else "are by none of" if len(self.source) > 1 else "do not tell which of"
            raise ConversionError(
                f"how {pp} stages divide the layers is not told: those of the source {why} DeepSpeed's methods",
                expected=f"{len(self.prefixes)} layers: {', '.join(map(str, self.prefixes))}",
                hints=[_HINT],
            )
        return told[0]

    def _source_stages(self, prefix: str) -> tuple[int, ...]:
        return tuple(i for i, names in enumerate(self.source) if any(n.startswith(prefix) for n in names))

    def _methods(self) -> list[list[int]]:
        """The weight of each layer by `parameters`, by `type:` of the layers that there are most of, and by `uniform`."""
        size = max(self.prefixes) + 1
        numel = [0] * size
        kinds: list[tuple[str, ...]] = [()] * size
        for number, prefix in self.prefixes.items():
            own = [n for n in self.names if n.startswith(prefix) and n in self.trained]
            numel[number] = sum(self.names[n] for n in own)
            kinds[number] = tuple(sorted(n.removeprefix(prefix) for n in own))
        heads = [
            numel[min(numbers)]
            for prefix, has in self.has_head.items()
            if has and (numbers := [n for n, p in self.prefixes.items() if p == prefix])
        ]
        usual = Counter(k for k in kinds if k).most_common(1)[0][0] if any(kinds) else ()
        zeros = [0] * len(heads)
        return [numel + heads, [int(k == usual) for k in kinds] + zeros, [1] * size + [1] * len(heads)]

    def _by(self, weights: Sequence[int], stages: int) -> dict[int, int]:
        bounds = uniform_bounds(len(weights), stages) if set(weights) == {1} else balanced_bounds(weights, stages)
        return {n: max(s for s in range(stages) if bounds[s] <= n) for n in self.prefixes}

    def _of(self, stage_of: Mapping[int, int], pp: int) -> dict[str, tuple[int, ...]]:
        by_prefix: dict[str, set[int]] = {}
        for number, prefix in self.prefixes.items():
            by_prefix.setdefault(prefix, set()).add(stage_of[number])
        for prefix, has_head in self.has_head.items():
            ends = self._source_stages(prefix)
            if has_head and len(self.source) > 1 and ends and ends[-1] != len(self.source) - 1:
                raise ConversionError(f"where the last use of {prefix} is cannot be told for {pp} stages", found=f"on {ends}")
            if prefix in by_prefix and has_head:
                by_prefix[prefix].add(pp - 1)
        return {n: tuple(sorted(by_prefix.get(self._prefix(n), ()))) for n in self.names}

    def _prefix(self, name: str) -> str:
        if name.startswith(TIED):
            return f"{TIED}{name[len(TIED) :].partition('.')[0]}."
        return f"{name.partition('.')[0]}."


def uniform_bounds(number: int, stages: int) -> list[int]:
    """Where each stage begins, and the end, with equal numbers of layers."""
    if number <= stages:
        return [min(i, number) for i in range(stages + 1)]
    return [*(offset for offset, _ in _even(number, stages)), number]


def _even(number: int, stages: int) -> list[tuple[int, int]]:
    """(start, size) with sizes that differ by one at most, the larger ones first."""
    found, start = [], 0
    for i in range(stages):
        size = number // stages + (i < number % stages)
        found.append((start, size))
        start += size
    return found


def balanced_bounds(weights: Sequence[int], stages: int) -> list[int]:
    """Where each stage begins, and the end, such that the heaviest and the lightest differ least; of equals the last."""
    number = len(weights)
    if number <= stages:
        return uniform_bounds(number, stages)
    sums = [0, *accumulate(weights)]
    infinite = float("inf")
    most = [[infinite] * (stages + 1) for _ in range(number + 1)]
    least = [[infinite] * (stages + 1) for _ in range(number + 1)]
    cost = [[infinite] * (stages + 1) for _ in range(number + 1)]
    start = [[0] * (stages + 1) for _ in range(number + 1)]
    most[0][0] = cost[0][0] = 0
    for i in range(1, number + 1):
        for j in range(1, min(i, stages) + 1):
            for k in range(i):
                high = max(most[k][j - 1], sums[i] - sums[k])
                low = min(least[k][j - 1], sums[i] - sums[k])
                if cost[i][j] >= high - low:
                    cost[i][j], most[i][j], least[i][j], start[i][j] = high - low, high, low, k
    bounds = [number]
    for j in range(stages, 0, -1):
        bounds.append(start[bounds[-1]][j])
    return bounds[::-1]
