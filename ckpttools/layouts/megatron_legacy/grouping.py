"""Which parameters each group of an optimizer has, from the shapes of the group's state. Pure.

Optimizers sort parameters by what they are: matrices, vectors (no weight decay), norms of queries and keys (which some
exempt from that), experts, embeddings (which may have a learning rate of their own). A group has all parameters of some
of these classes, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from ckpttools.layouts.megatron_legacy.model import Parameter

_Class = tuple[str, bool, bool]
"""(kind of shape, is an expert's, is an embedding or the output layer)"""
_MAX_GROUPS = 16


@dataclass(frozen=True, slots=True)
class Group:
    """What an optimizer tells of one of its groups."""

    shapes: tuple[tuple[int, ...] | None, ...]
    """Of each parameter, in order; None where it has no state."""
    is_expert: bool | None
    """Whether it has experts' parameters; None where the optimizer does not say."""
    has_no_decay: bool
    """Whether it is exempt from weight decay."""


def assign(groups: Sequence[Group], parameters: Sequence[Parameter], *, has_expert_ranks: bool) -> list[list[Parameter]] | None:
    """The parameters of each group; None where no choice fits the shapes, or several do.

    Args: has_expert_ranks: whether experts are spread over ranks of their own; only then are they apart from the rest.
    """
    if len(groups) > _MAX_GROUPS:
        return None
    classes: dict[_Class, list[int]] = {}
    for i, parameter in enumerate(parameters):
        classes.setdefault(_class_of(parameter, has_expert_ranks), []).append(i)
    found: list[list[list[int]]] = []
    for solution in islice(_solutions(groups, parameters, classes), 64):
        if solution not in found:
            found.append(solution)
    if len(found) != 1:
        return None
    return [[parameters[i] for i in group] for group in found[0]]


def _class_of(parameter: Parameter, has_expert_ranks: bool) -> _Class:
    is_vector = len(parameter.stored.shape) < 2 or parameter.name.endswith(".bias")
    is_of_attention = "q_layernorm." in parameter.name or "k_layernorm." in parameter.name
    kind = "matrix" if not is_vector else "attention norm" if is_of_attention else "vector"
    is_end = parameter.name.endswith(("embeddings.weight", "output_layer.weight", "word_embeddings_for_head.weight"))
    return kind, parameter.is_expert and has_expert_ranks, is_end


def _solutions(
    groups: Sequence[Group], parameters: Sequence[Parameter], classes: dict[_Class, list[int]]
) -> Iterator[list[list[int]]]:
    """Every way to give each group some classes, each class to at most one group, so that all shapes agree."""
    if not groups:
        yield []
        return
    group = groups[0]
    usable = [c for c in classes if _may_have(group, c)]
    wanted = len(group.shapes)
    for count in range(len(usable) + 1):
        for chosen in combinations(usable, count):
            indices = sorted(i for c in chosen for i in classes[c])
            if len(indices) != wanted or not _agree(group, [parameters[i] for i in indices]):
                continue
            rest = {c: members for c, members in classes.items() if c not in chosen}
            for others in _solutions(groups[1:], parameters, rest):
                yield [indices, *others]


def _may_have(group: Group, of: _Class) -> bool:
    kind, is_expert, _ = of
    return (group.is_expert is None or group.is_expert == is_expert) and not (group.has_no_decay and kind == "matrix")


def _agree(group: Group, parameters: Sequence[Parameter]) -> bool:
    pairs = zip(group.shapes, parameters, strict=True)
    return all(shape is None or shape == parameter.stored.shape for shape, parameter in pairs)
