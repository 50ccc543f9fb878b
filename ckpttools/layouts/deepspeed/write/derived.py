"""What of a checkpoint need not be written, because it follows from the rest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttools.layouts.deepspeed.names import model_name, stem_of
from ckpttools.layouts.deepspeed.states import items
from ckpttools.layouts.families import EXTRA_STATE, MODEL, OPTIMIZER
from ckpttools.model import ObjectEntry, TensorEntry, render_path

PER_RANK = ("zero_pp_rank_", "mp_rank_")
"""What the names of a rank's own client state begin with."""


@dataclass(frozen=True)
class Derived:
    """What need not be written, because it follows from the rest."""

    aliases: Mapping[str, str]
    """Further name of a tied weight -> the name that is written."""
    left: frozenset[str]
    """Tensors that the files have no place for, and that the engine makes again: weights in ZeRO 3."""
    equal: Mapping[str, str]
    """Number that is written once for a group -> the one that is written; the two must be equal."""


def find_derived(
    tensors: Mapping[str, TensorEntry], objects: Sequence[ObjectEntry], *, stage: int, dp: int, is_universal: bool = False
) -> Derived:
    """What of some tensors (by output name) need not be written."""
    named = next((o.record for o in objects if o.path == (OPTIMIZER, "param_names")), None)
    group_of = {name: g for g, group in enumerate(items(named)) for name in items(group)}
    trained = set(group_of)
    aliases: dict[str, str] = {}
    left: set[str] = set()
    kept: dict[object, str] = {}
    weights = [(n, t) for n, t in tensors.items() if t.family == MODEL and t.spec.volume]
    for name, entry in sorted(weights, key=lambda item: item[0] not in trained):
        first = kept.setdefault((entry.spec.dtype, entry.spec.shape, entry.pieces), name)
        if first != name:
            aliases[name] = first
        elif stage == 3 and name in trained:
            left.add(name)
    # a universal checkpoint has masters of parameters that are not trained, made from their weights
    left |= {
        n for n, t in tensors.items() if t.path[:2] == (OPTIMIZER, "state") and t.path[2] not in trained and t.path[2] in tensors
    }
    equal: dict[str, str] = {}
    once: dict[object, str] = {}
    for name, entry in tensors.items():
        path = entry.path
        if path[:2] == (OPTIMIZER, "state") and len(path) == 4 and entry.spec.shape == () and path[3] != "fp32":
            first = once.setdefault((group_of.get(path[2]), path[3]), name)
            if first != name and path[2] in group_of:
                equal[name] = first
    return Derived(aliases | _rank_copies(tensors, dp if stage == 3 and not is_universal else 1), frozenset(left), equal)


def _rank_copies(tensors: Mapping[str, TensorEntry], ranks: int) -> dict[str, str]:
    """Names under which further ranks' files hold the client's tensors, where a rank had none of its own."""
    shared = {n: t for n, t in tensors.items() if t.path[:1] == (EXTRA_STATE,) and not str(t.path[1]).startswith(PER_RANK)}
    own = {t.path for t in tensors.values()}
    found: dict[str, str] = {}
    for rank in range(1, ranks):
        stem = stem_of(model_name(0, rank))
        for name, entry in shared.items():
            path = (EXTRA_STATE, stem, *entry.path[1:])
            if path not in own:
                found[render_path(path)] = name
    return found
