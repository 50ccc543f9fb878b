"""What of a checkpoint need not be written, because it follows from the rest. Pure. Read `find_derived` first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttools.errors import ConversionError
from ckpttools.layouts.deepspeed.orders import PARAM_NAMES
from ckpttools.layouts.deepspeed.states import count, items, members, table
from ckpttools.layouts.deepspeed.tensor_parallel import compile_pattern
from ckpttools.layouts.deepspeed.write.grid import Grid
from ckpttools.layouts.deepspeed.write.ways import INFO
from ckpttools.layouts.families import EXTRA_STATE, MODEL, OPTIMIZER
from ckpttools.model import Mesh, ObjectEntry, TensorEntry, render_path

PER_RANK = ("zero_pp_rank_", "mp_rank_")
"""What the names of a rank's own client state begin with."""


@dataclass(frozen=True)
class Derived:
    """What need not be written, because it follows from the rest."""

    aliases: Mapping[str, str]
    """Further name of a tensor -> the name that is written: tied weights, masters of weights that are in fp32 themselves."""
    left: frozenset[str]
    """Tensors that the files have no place for, and that the engine makes again: weights in ZeRO 3."""
    equal: Mapping[str, str]
    """Tensor that is written once -> the one that is written; the two must be equal: a group's numbers, masters in ZeRO 0."""
    masters: Mapping[str, str]
    """Weight -> the tensor that it is made from when training resumes; it must be the rounding of that."""
    tied: Mapping[str, str]
    """Weight that is stated to be another one and is stored by itself -> the name that is written; the two must be equal."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Tensor that is written with other rows -> how many: of a vocabulary, without those that pad it in universal checkpoints,
    with them in all others."""
    kept_rows: Mapping[str, int] = field(default_factory=dict)
    """Weight whose further rows become zeros -> how many are kept: the engine rounds it from a master that has zeros there."""


def find_derived(
    tensors: Mapping[str, TensorEntry], objects: Sequence[ObjectEntry], *, stage: int, mesh: Mesh, is_universal: bool = False
) -> Derived:
    """What of some tensors (by output name) need not be written, for the ranks of a mesh as `world_mesh` gives it."""
    values = {o.path: o.record for o in objects}
    groups = [[n for n in items(group) if isinstance(n, str)] for group in items(values.get(PARAM_NAMES))]
    group_of = {name: g for g, group in enumerate(groups) for name in group}
    masters = {n: t for n in group_of if (t := tensors.get(master_name(n))) is not None}
    aliases, left = _stored_once(tensors, group_of, masters if stage == 3 else {})
    for name in group_of:
        weight = tensors.get(name)
        if name not in masters and stage and weight is not None and weight.spec.dtype.name == "float32":
            aliases[master_name(name)] = name
    # a universal checkpoint has masters of parameters that are not trained, made from their weights
    left |= {
        n for n, t in tensors.items() if t.path[:2] == (OPTIMIZER, "state") and t.path[2] not in group_of and t.path[2] in tensors
    }
    equal = _numbers(tensors, group_of)
    if stage == 0 and not _is_half(values.get((EXTRA_STATE, "ds_config"))):
        equal |= {master_name(n): n for n, t in masters.items() if n in tensors and _alike(tensors[n], t)}
    grid = Grid.of(mesh)
    stems = Grid(grid.pp, 1, 1, grid.tp).stems(stage) if is_universal else grid.stems(stage)
    rows = _rows(tensors, group_of, values.get((EXTRA_STATE, INFO)), is_universal=is_universal)
    stored = {n: master_name(n) for n, t in masters.items() if n in tensors and _is_rounding(tensors[n], t)}
    rounded = {n: master for n, master in stored.items() if master not in rows}
    shared = table(values.get((EXTRA_STATE, "shared_params")))
    aliases |= {name: str(kept) for name, kept in shared.items() if name not in tensors and str(kept) in tensors}
    tied = _tied(tensors, shared, aliases, group_of)
    longer = {n: t.spec.shape[0] for n, t in masters.items() if master_name(n) in rows and n in tensors}
    kept = {n: count for n, count in longer.items() if rows[master_name(n)] > count}
    return Derived(aliases | _rank_copies(tensors, stems), frozenset(left), equal, rounded, tied, rows, kept)


def master_name(parameter: str) -> str:
    """The name of a parameter's master."""
    return render_path((OPTIMIZER, "state", parameter, "fp32"))


def _is_rounding(weight: TensorEntry, master: TensorEntry) -> bool:
    return weight.family == MODEL and weight.spec.dtype.is_floating and weight.spec.shape == master.spec.shape


def _stored_once(
    tensors: Mapping[str, TensorEntry], group_of: Mapping[str, int], masters: Mapping[str, TensorEntry]
) -> tuple[dict[str, str], set[str]]:
    """Further names of weights, and the weights that their masters stand for."""
    aliases: dict[str, str] = {}
    left: set[str] = set()
    kept: dict[object, str] = {}
    weights = [(n, t) for n, t in tensors.items() if t.family == MODEL and t.spec.volume]
    for name, entry in sorted(weights, key=lambda item: item[0] not in group_of):
        first = kept.setdefault((entry.spec.dtype, entry.spec.shape, entry.pieces), name)
        if first != name:
            aliases[name] = first
        elif name in masters:
            left.add(name)
    return aliases, left


def _numbers(tensors: Mapping[str, TensorEntry], group_of: Mapping[str, int]) -> dict[str, str]:
    """What a group has once, under the names of its further parameters.

    Raises: ConversionError: when some of them have it and others do not: written, it would be all of theirs.
    """
    equal: dict[str, str] = {}
    once: dict[object, str] = {}
    owners: dict[tuple[int, object], list[str]] = {}
    for name, entry in tensors.items():
        path = entry.path
        if path[:2] == (OPTIMIZER, "state") and len(path) == 4 and entry.spec.shape == () and path[2] in group_of:
            name_of = str(path[2])
            guide = tensors.get(master_name(name_of)) or tensors.get(name_of)
            if path[3] != "fp32" and (path[3] == "step" or guide is None or guide.spec.shape != ()):
                first = once.setdefault((group_of[name_of], path[3]), name)
                owners.setdefault((group_of[name_of], path[3]), []).append(name_of)
                if first != name:
                    equal[name] = first
    sizes = Counter(group_of.values())
    for (group, key), names in owners.items():
        if len(names) < sizes[group]:
            raise ConversionError(
                f"a group has one `{key}`, and that of some of its parameters is left out",
                expected=f"that of {sizes[group]} parameters, or of none",
                found=f"of {len(names)}, {names[0]} among them",
                hints=[f"--exclude 'optimizer.state.*.{key}' leaves it out of all"],
            )
    return equal


def _alike(one: TensorEntry, other: TensorEntry) -> bool:
    return (one.spec.dtype, one.spec.shape) == (other.spec.dtype, other.spec.shape)


def _is_half(config: object) -> bool:
    stated = members(config)
    return any(table(stated.get(key)).get("enabled") is True for key in ("bf16", "bfloat16", "fp16"))


def _rows(tensors: Mapping[str, TensorEntry], group_of: Mapping[str, int], info: object, *, is_universal: bool) -> dict[str, int]:
    """States of vocabularies that get other rows: as many as there are words, or as the weight has."""
    stated = table(info)
    words = count(stated.get("original_vocab_size"))
    patterns = vocabulary_patterns(info)
    found: dict[str, int] = {}
    for name, entry in tensors.items():
        path = entry.path
        if words and path[:2] == (OPTIMIZER, "state") and len(path) == 4 and path[2] in group_of:
            weight = tensors.get(str(path[2]))
            padded = weight.spec.shape[0] if weight is not None and len(weight.spec.shape) == 2 else words
            wanted = words if is_universal else max(words, padded)
            is_words = any(p.match(str(path[2])) for p in patterns) and len(entry.spec.shape) == 2
            if is_words and (entry.spec.shape[0] > wanted if is_universal else entry.spec.shape[0] == words < wanted):
                found[name] = wanted
    return found


def vocabulary_patterns(info: object) -> list[re.Pattern[str]]:
    """Of parameters that have a row per word, as the checkpoint states them."""
    texts = items(table(info).get("vocabulary_parameter_patterns"))
    return [p for text in texts if (p := compile_pattern(text, "", [])) is not None]


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


def _rank_copies(tensors: Mapping[str, TensorEntry], stems: Sequence[str]) -> dict[str, str]:
    """Names under which further ranks' files hold the client's tensors, where a rank had none of its own."""
    shared = {n: t for n, t in tensors.items() if t.path[:1] == (EXTRA_STATE,) and not str(t.path[1]).startswith(PER_RANK)}
    own = {t.path for t in tensors.values()}
    found: dict[str, str] = {}
    for stem in stems[1:]:
        for name, entry in shared.items():
            path = (EXTRA_STATE, stem, *entry.path[1:])
            if path not in own:
                found[render_path(path)] = name
    return found
