"""Rules: which mesh axis cuts which tensors along which dimension, told by the tensors' names.

A `RuleSet` answers three questions about a name: which rules name it (`matching`), which layer it belongs to (`layer_of`),
which expert (`expert_of`). Sets are written as TOML, see `rule_files`; `assign` makes placements of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckpttools.placement.globs import compile_globs, skeleton, tells_numbers_apart, told_by

CUTTING_AXES = ("tp", "ep", "fsdp", "pp")
"""Axes that a rule may give a dimension to; `dp` replicates. `pp` cuts layers that are stacked in one tensor; of others it
gives whole tensors to stages (see `Stages`)."""
UNITS = ("heads", "kv_heads", "experts", "vocab")
"""What a rule may count in; how many there are is told by the model's config (see `counts`)."""


@dataclass(frozen=True)
class Rule:
    """One rule: what an axis does to the tensors that some patterns name."""

    tensors: tuple[str, ...]
    """Patterns (see `globs`)."""
    axis: str = ""
    """One of `CUTTING_AXES`; empty for tensors that every rank holds whole."""
    dim: int = 0
    """The dimension that is cut; below 0 it counts from the end."""
    sections: tuple[int | str, ...] = ()
    """Relative lengths of the parts of a fused dimension, each of which is cut by itself: numbers, or units whose counts
    are the lengths (query, key and value rows are as `heads` to `kv_heads` to `kv_heads`)."""
    units: str = ""
    """What may not be cut in two along the dimension (in each section, where there are several)."""
    groups: str = ""
    """A unit, each of which has all sections for itself (query rows, then its key, then its value): a rank has whole groups, and
    only a single group is cut section by section."""
    label: str = ""
    """Which rule it is, for messages: `rule 3 of llama`."""

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """What the names of its tensors match."""
        return compile_globs(self.tensors)


@dataclass(frozen=True)
class Stages:
    """Which tensors belong to which layer, and to the first and last stage of a pipeline."""

    layers: tuple[str, ...] = ()
    """Patterns with {layer}, one per stack of layers, in the order in which data pass through them."""
    first: tuple[str, ...] = ()
    """Patterns of what comes before the layers."""
    last: tuple[str, ...] = ()
    """Patterns of what comes after the layers."""
    tied: tuple[tuple[str, str], ...] = ()
    """(pattern of an embedding, pattern of a head that may share it): where there is none of the heads that stand beside it,
    both ends hold the embedding."""

    @cached_property
    def layer_expressions(self) -> tuple[re.Pattern[str], ...]:
        """One expression per stack."""
        return tuple(compile_globs([glob]) for glob in self.layers)

    @cached_property
    def first_expression(self) -> re.Pattern[str]:
        """What names of the first stage match."""
        return compile_globs(self.first)

    @cached_property
    def last_expression(self) -> re.Pattern[str]:
        """What names of the last stage match."""
        return compile_globs(self.last)

    @cached_property
    def tied_expressions(self) -> tuple[tuple[re.Pattern[str], re.Pattern[str]], ...]:
        """The pairs of `tied`."""
        return tuple((compile_globs([embedding]), compile_globs([head])) for embedding, head in self.tied)


@dataclass(frozen=True, slots=True)
class Proportion:
    """That a dimension of one tensor is so many times a dimension of its partner, which has the same name but for its end."""

    tensor: str
    """End of the name."""
    dim: int
    times: int
    of: str
    """End of the partner's name; the same for a tensor's own dimensions."""
    of_dim: int

    def holds(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Whether it is true of every pair that is there."""
        for name, shape in shapes.items():
            if name == self.tensor or name.endswith(f".{self.tensor}"):
                partner = shapes.get(name[: -len(self.tensor)] + self.of)
                if partner is not None and not self._holds_for(shape, partner):
                    return False
        return True

    def _holds_for(self, shape: Sequence[int], partner: Sequence[int]) -> bool:
        are_there = -len(shape) <= self.dim < len(shape) and -len(partner) <= self.of_dim < len(partner)
        return are_there and shape[self.dim] == self.times * partner[self.of_dim]


@dataclass(frozen=True)
class RuleSet:
    """Rules for the names of one kind of model."""

    name: str
    rules: tuple[Rule, ...] = ()
    """The first that names a tensor and the axis in question counts; one that replicates ends the search."""
    stages: Stages = field(default_factory=Stages)
    experts: tuple[str, ...] = ()
    """Patterns with {expert} of experts that have names of their own."""
    recognise: tuple[tuple[str, ...], ...] = ()
    """By which names the set is chosen: for some of these groups, each pattern names a tensor."""
    models: tuple[str, ...] = ()
    """Model types, as a config names them, for which it goes before sets that the names suit as well."""
    unless: tuple[str, ...] = ()
    """Patterns by which it is not chosen where they name a tensor."""
    shaped: tuple[Proportion, ...] = ()
    """What must be true of the shapes for it to be chosen: kinds of models share names and not layouts."""
    about: str = ""

    @cached_property
    def _expert_expression(self) -> tuple[re.Pattern[str], ...]:
        return tuple(compile_globs([glob]) for glob in self.experts)

    @cached_property
    def _is_told_by_skeleton(self) -> bool:
        return not any(tells_numbers_apart(glob) for rule in self.rules for glob in rule.tensors)

    @cached_property
    def _matching(self) -> dict[str, tuple[Rule, ...]]:
        return {}

    def matching(self, name: str) -> tuple[Rule, ...]:
        """The rules that name a tensor, in order, up to the first that replicates."""
        name = told_by(name)
        key = skeleton(name) if self._is_told_by_skeleton else name
        if key not in self._matching:
            found: list[Rule] = []
            for rule in self.rules:
                if rule.expression.fullmatch(key):
                    found.append(rule)
                    if not rule.axis:
                        break
            self._matching[key] = tuple(found)
        return self._matching[key]

    def layer_of(self, name: str) -> tuple[int, int] | None:
        """(stack, layer) that a name belongs to; None for none."""
        name = told_by(name)
        for stack, expression in enumerate(self.stages.layer_expressions):
            match = expression.fullmatch(name)
            if match:
                return stack, int(match["layer"])
        return None

    def order_of(self, name: str) -> tuple[int, int, int, int, str]:
        """Sorts names as a model has them: first, layer by layer, last; in a layer as the patterns name them, then by name."""
        layer = self.layer_of(name)
        clean = told_by(name)
        part = 1 if layer is not None else 0 if self.stages.first_expression.fullmatch(clean) else 2
        place = next((i for i, glob in enumerate(self._patterns[part]) if glob.fullmatch(clean)), len(self._patterns[part]))
        return part, *(layer or (0, 0)), place, clean

    @cached_property
    def _patterns(self) -> tuple[list[re.Pattern[str]], ...]:
        """In order: those of the first stage, of what is in layers, of the last stage."""
        inside = [glob for rule in self.rules for glob in rule.tensors]
        return tuple([compile_globs([glob]) for glob in globs] for globs in (self.stages.first, inside, self.stages.last))

    def expert_of(self, name: str) -> int | None:
        """The expert that a name belongs to; None for none."""
        name = told_by(name)
        for expression in self._expert_expression:
            match = expression.fullmatch(name)
            if match:
                return int(match["expert"])
        return None

    def is_for(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Whether names, and shapes where these count, are those of such a model."""
        names = sorted({skeleton(told_by(name)) for name in shapes})

        def is_there(glob: str) -> bool:
            expression = compile_globs([glob])
            return any(expression.fullmatch(name) for name in names)

        is_named = not any(map(is_there, self.unless)) and any(all(map(is_there, group)) for group in self.recognise)
        return is_named and all(proportion.holds(shapes) for proportion in self.shaped)
