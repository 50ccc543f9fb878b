"""The cut that a rule makes in a tensor, and what it asks of the size of its axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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


def cut_of(
    spec: TensorSpec, rule: Rule, before: Sequence[Cut], ranks: int, counts: Counts, requirements: Requirements
) -> Cut | None:
    """The cut that a rule makes, or None where it cannot be made; what does not fit goes to `requirements`.

    Args:
        before: cuts that were made in the tensor already.
        ranks: of the rule's axis.
    """
    if ranks == 1:  # what cannot be cut does no harm; what a larger axis would have to keep to is asked for all the same
        requirements = Requirements(requirements.constraints)
    dim = rule.dim + (len(spec.shape) if rule.dim < 0 else 0)
    if not 0 <= dim < len(spec.shape):
        found = f"{len(spec.shape)} dimensions"
        requirements.fault(f"{rule.label} cuts dimension {rule.dim}, which is not there", found=found, tensor=spec.name)
        return None
    length = spec.shape[dim]
    if not rule.sections:
        _ask_for_units(spec, rule, dim, length, counts, requirements)
        return Cut(rule.axis, dim)
    if any(cut.dim == dim for cut in before):
        requirements.fault(f"{rule.label} has sections in dimension {dim}, which another axis cuts before", tensor=spec.name)
        return None
    shares = _shares(spec, rule, ranks, counts, requirements)
    if shares is None:
        return None if ranks > 1 else Cut(rule.axis, dim)
    if length % sum(shares):
        named = " to ".join(map(str, shares))
        requirements.fault(f"dimension {dim} cannot be divided into {named} of {rule.label}",
                           f"a multiple of {sum(shares)}", str(length), spec.name)  # fmt: skip
        return None
    sections = tuple(share * length // sum(shares) for share in shares)
    for section, unit in zip(sections, _units(rule), strict=True):
        _ask_for_units(spec, Rule(rule.tensors, rule.axis, rule.dim, units=unit, label=rule.label), dim, section, counts,
                       requirements)  # fmt: skip
    return Cut(rule.axis, dim, sections)


def _units(rule: Rule) -> list[str]:
    """The unit of each section."""
    return [section if isinstance(section, str) else rule.units for section in rule.sections]


def _shares(spec: TensorSpec, rule: Rule, ranks: int, counts: Counts, requirements: Requirements) -> list[int] | None:
    """The relative lengths of a rule's sections; None where a count is not known."""
    found = []
    missing = []
    for section in rule.sections:
        share = section if isinstance(section, int) else counts.of(section)
        if share is None:
            missing.append(_WORDS[str(section)])
        else:
            found.append(share)
    if not missing:
        return found
    if ranks > 1:
        named = " and ".join(dict.fromkeys(missing))
        requirements.fault(f"{rule.label} needs the number of {named} to cut fused rows", tensor=spec.name)
    return None


def _ask_for_units(spec: TensorSpec, rule: Rule, dim: int, length: int, counts: Counts, requirements: Requirements) -> None:
    """Enters that the cut of a stretch of a dimension falls between units."""
    if rule.axis == "pp":
        requirements.ask(Constraint(("pp",), length, "layers, which are stacked in one tensor,"), spec.name)
    if not rule.units:
        return
    count = counts.of(rule.units)
    if count is None or rule.units == "experts":
        what = _WORDS[rule.units] if rule.units == "experts" else f"elements of dimension {dim}"
        why = "" if rule.units == "experts" else f"and each rank must have whole {_WORDS[rule.units]}"
        requirements.ask(Constraint((rule.axis,), length, what, why=why), spec.name)
        return
    if length % count:
        message = f"dimension {dim} is no multiple of the model config's {_WORDS[rule.units]} ({rule.label})"
        requirements.fault(message, f"a multiple of {count}", str(length), spec.name)
        return
    requirements.ask(Constraint((rule.axis,), count, _WORDS[rule.units], why=_WHY.get(rule.units, "")), spec.name)


def require_even(spec: TensorSpec, cuts: Sequence[Cut], requirements: Requirements) -> None:
    """Enters that every rank's share of a tensor has the same shape."""
    axes: dict[int, list[str]] = defaultdict(list)
    for cut in cuts:
        axes[cut.dim].append(cut.axis)
        for section in dict.fromkeys(cut.sections):
            requirements.ask(Constraint((cut.axis,), section, f"elements of a section of dimension {cut.dim}"), spec.name)
    for dim, named in axes.items():
        requirements.ask(Constraint(tuple(named), spec.shape[dim], f"elements of dimension {dim}"), spec.name)
