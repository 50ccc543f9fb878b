"""The cut that a rule makes in a tensor, and what it asks of the size of its axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttools.model import TensorSpec
from ckpttools.placement.counts import Counts
from ckpttools.placement.fit import Constraint, Requirements
from ckpttools.placement.local import Cut
from ckpttools.placement.rules import Rule

_WORDS = {"heads": "attention heads", "kv_heads": "key/value heads", "experts": "experts", "vocab": "rows of the vocabulary"}
_WHY = {
    "heads": "and each rank must have whole heads",
    "kv_heads": "and each rank must have whole key/value heads of its own: copies of a head are not written",
}
_WHY_WITH_COPIES = "and each rank must have whole key/value heads, or as many ranks as divide evenly among them one head"


@dataclass(frozen=True)
class Cutting:
    """What decides how rules cut."""

    counts: Counts
    requirements: Requirements
    """What does not fit goes to these."""
    copies_heads: bool = False
    """Whether neighbours may hold the same head of keys and values where there are fewer of these than ranks."""


def cut_of(spec: TensorSpec, rule: Rule, before: Sequence[Cut], ranks: int, cutting: Cutting) -> Cut | None:
    """The cut that a rule makes, or None where it cannot be made.

    Args:
        before: cuts that were made in the tensor already.
        ranks: of the rule's axis.
    """
    if ranks == 1:  # what cannot be cut does no harm; what a larger axis would have to keep to is asked for all the same
        cutting = replace(cutting, requirements=Requirements(cutting.requirements.constraints))
    fault = cutting.requirements.fault
    dim = rule.dim + (len(spec.shape) if rule.dim < 0 else 0)
    if not 0 <= dim < len(spec.shape):
        found = f"{len(spec.shape)} dimensions"
        fault(f"{rule.label} cuts dimension {rule.dim}, which is not there", found=found, tensor=spec.name)
        return None
    length = spec.shape[dim]
    if rule.groups:
        rule, cutting = _of_groups(spec, rule, ranks, cutting)
    if not rule.sections:
        return Cut(rule.axis, dim, copies=_copies([_ask_for_units(spec, rule, (dim, length), ranks, cutting)]))
    if any(cut.dim == dim for cut in before):
        fault(f"{rule.label} has sections in dimension {dim}, which another axis cuts before", tensor=spec.name)
        return None
    shares = _shares(spec, rule, ranks, cutting)
    if shares is None:
        return None if ranks > 1 else Cut(rule.axis, dim)
    if length % sum(shares):
        named = " to ".join(map(str, shares))
        fault(f"dimension {dim} cannot be divided into {named} of {rule.label}",
              f"a multiple of {sum(shares)}", str(length), spec.name)  # fmt: skip
        return None
    sections = tuple(share * length // sum(shares) for share in shares)
    copies = []
    for section, unit in zip(sections, _units(rule), strict=True):
        part = Rule(rule.tensors, rule.axis, rule.dim, units=unit, label=rule.label)
        copies.append(_ask_for_units(spec, part, (dim, section), ranks, cutting))
    return Cut(rule.axis, dim, sections, _copies(copies))


def _of_groups(spec: TensorSpec, rule: Rule, ranks: int, cutting: Cutting) -> tuple[Rule, Cutting]:
    """The rule for rows in groups: whole groups, of which no copies are made; a single group is its sections."""
    count = cutting.counts.of(rule.groups)
    if count is None and ranks > 1:
        message = f"{rule.label} needs the number of {_WORDS[rule.groups]} to cut rows that are grouped by them"
        cutting.requirements.fault(message, tensor=spec.name)
    if count == 1:
        return rule, cutting
    return replace(rule, sections=(), units=rule.groups), replace(cutting, copies_heads=False)


def _copies(of_sections: Sequence[int]) -> tuple[int, ...]:
    """As a cut has them: none where every rank has a share of its own."""
    return tuple(of_sections) if any(copies > 1 for copies in of_sections) else ()


def _units(rule: Rule) -> list[str]:
    """The unit of each section."""
    return [section if isinstance(section, str) else rule.units for section in rule.sections]


def _shares(spec: TensorSpec, rule: Rule, ranks: int, cutting: Cutting) -> list[int] | None:
    """The relative lengths of a rule's sections; None where a count is not known."""
    found = []
    missing = []
    for section in rule.sections:
        share = section if isinstance(section, int) else cutting.counts.of(section)
        if share is None:
            missing.append(_WORDS[str(section)])
        else:
            found.append(share)
    if not missing:
        return found
    if ranks > 1:
        named = " and ".join(dict.fromkeys(missing))
        cutting.requirements.fault(f"{rule.label} needs the number of {named} to cut fused rows", tensor=spec.name)
    return None


def _ask_for_units(spec: TensorSpec, rule: Rule, stretch: tuple[int, int], ranks: int, cutting: Cutting) -> int:
    """Enters that the cut of a stretch of a dimension falls between units. Returns how many ranks hold each share.

    Args: stretch: (dimension, how long it is).
    """
    dim, length = stretch
    requirements = cutting.requirements
    if rule.axis == "pp":
        requirements.ask(Constraint(("pp",), length, "layers, which are stacked in one tensor,"), spec.name)
    if not rule.units:
        return 1
    count = cutting.counts.of(rule.units)
    if count is None or rule.units == "experts":
        what = _WORDS[rule.units] if rule.units == "experts" else f"elements of dimension {dim}"
        why = "" if rule.units == "experts" else f"and each rank must have whole {_WORDS[rule.units]}"
        requirements.ask(Constraint((rule.axis,), length, what, why=why), spec.name)
        return 1
    if length % count:
        message = f"dimension {dim} is no multiple of the model config's {_WORDS[rule.units]} ({rule.label})"
        requirements.fault(message, f"a multiple of {count}", str(length), spec.name)
        return 1
    may_copy = cutting.copies_heads and rule.units == "kv_heads"
    why = _WHY_WITH_COPIES if may_copy else _WHY.get(rule.units, "")
    requirements.ask(Constraint((rule.axis,), count, _WORDS[rule.units], why=why, is_either=may_copy), spec.name)
    return ranks // count if may_copy and ranks > count and ranks % count == 0 else 1


def require_even(spec: TensorSpec, cuts: Sequence[Cut], sizes: Mapping[str, int], requirements: Requirements) -> None:
    """Enters that every rank's share of a tensor has the same shape.

    Args: sizes: of the axes; only those of cuts with copies count, whose shares are whole heads.
    """
    axes: dict[int, list[str]] = defaultdict(list)
    lengths = dict(enumerate(spec.shape))
    for cut in cuts:
        if cut.copies:
            sections = cut.sections or (spec.shape[cut.dim],)
            ranks = sizes.get(cut.axis, 1)
            lengths[cut.dim] = sum(section * copies // ranks for section, copies in zip(sections, cut.copies, strict=True))
        else:
            axes[cut.dim].append(cut.axis)
        for section, copies in zip(cut.sections, cut.copies or (1,) * len(cut.sections), strict=False):
            if copies == 1:
                requirements.ask(Constraint((cut.axis,), section, f"elements of a section of dimension {cut.dim}"), spec.name)
    for dim, named in axes.items():
        requirements.ask(Constraint(tuple(named), lengths[dim], f"elements of dimension {dim}"), spec.name)
