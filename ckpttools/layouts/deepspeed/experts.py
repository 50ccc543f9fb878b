"""Names of native experts: on a rank each counts its own from 0, and checkpoints as a whole count them all. Pure.

Source: deepspeedai/DeepSpeed, deepspeed/moe/experts.py, deepspeed/utils/groups.py, deepspeed/runtime/engine.py
(`_save_moe_checkpoint`), v0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

_MARK = "deepspeed_experts."
DATA_FIRST = "use_data_before_expert_parallelism"
"""The setting by which the ranks that share experts are neighbours, and not those that have different ones."""


def split_expert(name: str) -> tuple[str, int | None, str]:
    """(what stands before an expert's number, the number, what stands after it); None when it names no expert."""
    at = name.rfind(_MARK)
    head, tail = name[: at + len(_MARK)], name[at + len(_MARK) :]
    number, dot, rest = tail.partition(".")
    if at < 0 or not (number.isascii() and number.isdigit() and len(number) < 10):
        return name, None, ""
    return head, int(number), dot + rest


def is_expert(name: str) -> bool:
    """Whether a parameter is an expert's."""
    return split_expert(name)[1] is not None


def expert_counts(names: Iterable[str]) -> dict[str, int]:
    """How many experts there are behind each prefix, in order of appearance."""
    found: dict[str, int] = {}
    for name in names:
        prefix, number, _ = split_expert(name)
        if number is not None:
            found[prefix] = max(found.get(prefix, 0), number + 1)
    return found


def global_names(names: Iterable[str], ep: int, counts: Mapping[str, int] | None = None) -> dict[str, str]:
    """Local name -> name with the expert's global number, for the experts of expert-parallel rank `ep`.

    Args: counts: experts that a rank has behind each prefix, where the names are not all of them: a large layer may be
        spread over several groups.
    """
    names = list(names)
    counts = expert_counts(names) if counts is None else counts
    found = {}
    for name in names:
        prefix, number, rest = split_expert(name)
        if number is not None:
            found[name] = f"{prefix}{ep * counts[prefix] + number}{rest}"
    return found


def all_experts(names: Sequence[str], ranks: int, counts: Mapping[str, int]) -> list[str]:
    """A rank's parameters by local names, with the experts of all expert-parallel ranks in their place, by global names.

    Args: counts: as `global_names` has them.
    """
    found: list[str] = []
    for prefix, run in groupby(names, key=lambda n: split_expert(n)[0] if is_expert(n) else ""):
        own = list(run)
        for ep in range(ranks if prefix else 1):
            renamed = global_names(own, ep, counts)
            found += [renamed.get(name, name) for name in own]
    return found


def experts_of(names: Iterable[str], counts: Mapping[str, int], ranks: int, ep: int) -> dict[str, str]:
    """Global name -> local name, of the experts among some names that expert-parallel rank `ep` of `ranks` has.

    Args: counts: experts behind each prefix, over all ranks.
    """
    found = {}
    for name in names:
        prefix, number, rest = split_expert(name)
        if number is not None:
            each = max(1, counts[prefix] // ranks)
            if number // each == ep:
                found[name] = f"{prefix}{number - ep * each}{rest}"
    return found
