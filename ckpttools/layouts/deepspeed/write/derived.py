"""What of a checkpoint need not be written, because it follows from the rest. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpttools.layouts.deepspeed.names import model_name, stem_of
from ckpttools.layouts.deepspeed.states import items, table
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
    masters: Mapping[str, str]
    """Weight -> the tensor that it is made from when training resumes; it must be the rounding of that."""
    tied: Mapping[str, str]
    """Weight that is stated to be another one and is stored by itself -> the name that is written; the two must be equal."""


def find_derived(
    tensors: Mapping[str, TensorEntry], objects: Sequence[ObjectEntry], *, stage: int, dp: int, is_universal: bool = False
) -> Derived:
    """What of some tensors (by output name) need not be written."""
    stated = {o.path: o.record for o in objects}
    named = stated.get((OPTIMIZER, "param_names"))
    group_of = {name: g for g, group in enumerate(items(named)) for name in items(group) if isinstance(name, str)}
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
            first = once.setdefault((group_of.get(str(path[2])), path[3]), name)
            if first != name and path[2] in group_of:
                equal[name] = first
    tied = _tied(tensors, table(stated.get((EXTRA_STATE, "shared_params"))), aliases, trained)
    aliases |= _rank_copies(tensors, dp if stage == 3 and not is_universal else 1)
    return Derived(aliases, frozenset(left), equal, _masters(tensors, trained), tied)


def _masters(tensors: Mapping[str, TensorEntry], trained: Collection[str]) -> dict[str, str]:
    weights = [n for n, t in tensors.items() if n in trained and t.family == MODEL and t.spec.dtype.is_floating]
    masters = {n: render_path((OPTIMIZER, "state", n, "fp32")) for n in weights}
    return {n: m for n, m in masters.items() if m in tensors and tensors[m].spec.shape == tensors[n].spec.shape}


def _tied(
    tensors: Mapping[str, TensorEntry], stated: Mapping[str, object], aliases: Mapping[str, str], trained: Collection[str]
) -> dict[str, str]:
    """Weights that a layout without ties stored once for each of their names, as the source of it stated them."""
    found: dict[str, str] = {}
    for alias, name in stated.items():
        kept = aliases.get(str(name), str(name))
        entry, other = tensors.get(alias), tensors.get(kept)
        if entry is None or other is None or alias in aliases or alias in trained or alias == kept or kept in found:
            continue
        if (entry.family, entry.spec.dtype, entry.spec.shape) == (other.family, other.spec.dtype, other.spec.shape):
            found[alias] = kept
    return found


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
