"""Pipeline stages: which tensor is held at which, by layers in equal blocks or as a list says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.geometry import split
from ckpttools.placement.fit import Constraint, Requirements
from ckpttools.placement.globs import told_by
from ckpttools.placement.rules import RuleSet


@dataclass(frozen=True)
class StagePlan:
    """Which stages hold what."""

    rules: RuleSet
    stage_count: int
    order: Mapping[tuple[int, int], int]
    """(stack, layer) -> place among all the layers that there are."""
    blocks: tuple[int, ...]
    """Layers of each stage."""
    tied: frozenset[int]
    """Positions in `rules.stages.tied` of embeddings that serve as head too."""

    def stages_of(self, name: str) -> tuple[tuple[int, ...], str]:
        """(stages that hold a parameter, why); no stages for one that all of them hold."""
        if self.stage_count == 1:
            return (0,), ""
        place = self.rules.layer_of(name)
        if place is not None:
            stage = self._stage(self.order.get(place, len(self.order)))
            return (stage,), f"stage {stage}, layer {place[1]}"
        name, last = told_by(name), self.stage_count - 1
        stages = self.rules.stages
        if any(stages.tied_expressions[i][0].fullmatch(name) for i in self.tied):
            return (0, last), f"stages 0 and {last}, embedding and head in one"
        if stages.first_expression.fullmatch(name):
            return (0,), "stage 0, before the layers"
        if stages.last_expression.fullmatch(name):
            return (last,), f"stage {last}, after the layers"
        return (), "every stage, no rule names one"

    def _stage(self, layer: int) -> int:
        stop = 0
        for stage, count in enumerate(self.blocks):
            stop += count
            if layer < stop:
                return stage
        return self.stage_count - 1


def plan_stages(
    names: Sequence[str], rules: RuleSet, stage_count: int, layers_per_stage: Sequence[int], requirements: Requirements
) -> StagePlan:
    """How the parameters of a model go to the stages of a pipeline; what does not fit goes to `requirements`. Pure.

    Layers go in equal blocks; where they cannot be divided, the first stages have one more.

    Args: layers_per_stage: how many layers each stage has, in place of equal blocks; empty for these.
    """
    # numbers may begin anywhere and leave some out: a DeepSpeed pipeline counts embeddings and norms, too
    found = sorted({place for name in names if (place := rules.layer_of(name)) is not None})
    total = len(found)
    if total:
        requirements.ask(Constraint(("pp",), total, "layers", is_limit=True))
    blocks = tuple(layers_per_stage)
    if blocks and (len(blocks) != stage_count or sum(blocks) != total or min(blocks) < 0):
        expected = f"{stage_count} numbers that make {total} layers"
        requirements.fault("the layers per stage do not fit", expected, f"{len(blocks)} that make {sum(blocks)}")
    if not blocks:
        blocks = equal_blocks(total, stage_count)
    order = {place: i for i, place in enumerate(found)}
    return StagePlan(rules, stage_count, order, blocks, _tied(names, rules))


def equal_blocks(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage: equal, the first stages with one more where they do not divide. Pure."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def _tied(names: Sequence[str], rules: RuleSet) -> frozenset[int]:
    """Which embeddings have none of the heads that may share them."""
    cleaned = [told_by(name) for name in names if rules.layer_of(name) is None]
    pairs = rules.stages.tied
    with_head = {pairs[i][0] for i, (_, head) in enumerate(rules.stages.tied_expressions) if any(map(head.fullmatch, cleaned))}
    return frozenset(i for i, (embedding, _) in enumerate(pairs) if embedding not in with_head)


def expert_ranks(experts: int, ranks: int) -> list[int]:
    """The place along the expert axis of each of some experts that have names of their own: equal blocks. Pure."""
    return [place for place, (_, count) in enumerate(split(experts, ranks)) for _ in range(count)]
