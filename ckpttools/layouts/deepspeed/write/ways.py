"""How tensor-parallel ranks cut each parameter: what a checkpoint states of it, asked the other way round, and stated anew. Pure.

The reader puts shards together (`tensor_parallel`); here each way to cut a tensor is tried on it, and the one that it would put
together is the one that is stated. Read `way_of` and `stated_ways` first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttools.errors import ConversionError
from ckpttools.geometry import split
from ckpttools.layouts.deepspeed.states import counts, items, table
from ckpttools.layouts.deepspeed.tensor_parallel import Placement as Joined
from ckpttools.layouts.deepspeed.tensor_parallel import Rules, find_placement, read_rules
from ckpttools.placement.globs import skeleton
from ckpttools.placement.infer import merged
from ckpttools.placement.local import PlacedTensor
from ckpttools.placement.rule_files import built_in
from ckpttools.placement.rules import Rule, RuleSet

if TYPE_CHECKING:
    from ckpttools.layouts.deepspeed.write.given import Entries

INFO, MAPS = "universal_checkpoint_info", "affine_map"
WIDTHS = "sub_param_shard_widths"
REPLICATED = "tp_replicated_parameter_patterns"
ROWS = "parameter_with_row_parallelism_patterns"
HALVES = "parameter_with_2_sub_params_cat_dim_0"
PARTS = "parameter_with_sub_params"
_VERSION, _VERSION_WRITTEN = "universal_checkpoint_version", 0.2
_MAX_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class Way:
    """How a parameter is cut."""

    dim: int | None
    """The dimension that is cut; None where every rank has all of it."""
    sections: tuple[int, ...] = ()
    """Elements of each part of the dimension that is cut by itself; none where it is one."""


def way_of(name: str, shape: tuple[int, ...], rules: Rules, ranks: int) -> Way | None:
    """How a parameter is cut for several ranks; None where nothing says so."""
    found = find_placement(name, [shape] * ranks, rules)
    if isinstance(found, Joined) and not found.cuts:
        return Way(None)
    for dim, size in enumerate(shape):
        shards = [(*shape[:dim], part, *shape[dim + 1 :]) for _, part in split(size, ranks)]
        found = find_placement(name, shards, rules)
        if isinstance(found, Joined) and found.cuts and found.dim == dim and found.shape == shape and not found.is_guessed:
            parts = len(found.cuts[0])
            return Way(dim, tuple(sum(rank[i].size for rank in found.cuts) for i in range(parts)) if parts > 1 else ())
    return None


def rules_of(info: object) -> Rules:
    """What is stated, for any number of ranks."""
    rules = read_rules(info, "", [])
    rules.widths = {}
    return rules


def ways_of(shapes: Mapping[str, tuple[int, ...]], info: object, buffers: Collection[str]) -> dict[str, Way] | None:
    """How parameters and buffers are cut; None where neither the checkpoint nor their names say so of all parameters."""
    rules = rules_of(info)
    found = {name: Way(None) if name in buffers else way_of(name, shape, rules, 2) for name, shape in shapes.items()}
    known = {name: way for name, way in found.items() if way is not None}
    return known if len(known) == len(found) else None


def cutting_rules(ways: Mapping[str, Way]) -> RuleSet:
    """The rules by which parameters are cut so; their state is named, too, for where weights are not stored beside it."""
    groups: dict[str, dict[str, tuple[Rule, ...]]] = {}
    for name, way in ways.items():
        rule = Rule(()) if way.dim is None else Rule((), "tp", way.dim, way.sections)
        for known in (name, f"optimizer.state.{name}"):
            groups.setdefault(skeleton(known), {})[known] = (rule,)
    buffers = built_in("buffers")
    about = "how the checkpoint says that it is cut, or parameters of such names are"
    return RuleSet("deepspeed", (*merged(groups, "deepspeed"), *buffers.rules), about=about)


def actual_way(tensor: PlacedTensor) -> Way:
    """How a placed tensor is cut."""
    cut = next((c for c in tensor.placement.cuts if c.axis == "tp"), None)
    return Way(None) if cut is None else Way(cut.dim, cut.sections if len(cut.sections) > 1 else ())


def stated_ways(entries: Entries, info: object) -> object:
    """`universal_checkpoint_info` for the ranks that are written: as it is where it tells the cuts, else with new patterns.

    Raises: ConversionError: when parts that it names cannot be divided by the ranks.
    """
    ranks = entries.grid.tp
    tensors = {n: t for n in (*entries.weights, *entries.trained) if (t := entries.weights.get(n) or entries.master(n))}
    ways = {name: actual_way(tensor) for name, tensor in tensors.items() if name not in entries.buffers}
    if table(info).get(MAPS) is not None:  # they say which elements each rank has, of as many ranks as there were
        if ranks > 1:
            raise ConversionError("affine maps of tensor parallelism are not made for other ranks", found=f"`{INFO}.{MAPS}`")
        info = {k: v for k, v in table(info).items() if k != MAPS}
    rules = rules_of(info)
    if ranks > 1 and any(way_of(name, tensors[name].spec.shape, rules, ranks) != way for name, way in ways.items()):
        kept = {k: v for k, v in table(info).items() if k not in (REPLICATED, ROWS, HALVES, PARTS, WIDTHS)}
        shapes = {name: tensors[name].spec.shape for name in ways}
        return {_VERSION: _VERSION_WRITTEN, **kept, **_patterns(ways, shapes)}
    stated = table(info)
    if not table(stated.get(WIDTHS)):
        return info
    return {**stated, WIDTHS: {text: _widths(text, record, ranks) for text, record in table(stated[WIDTHS]).items()}}


def _widths(text: str, record: object, ranks: int) -> list[list[int]]:
    totals = [sum(counts(part)) for part in items(record)]
    if any(total % ranks for total in totals):
        raise ConversionError(f"parts of {totals} of `{text}` cannot be divided by {ranks} tensor-parallel ranks")
    return [[total // ranks] * ranks for total in totals]


def _patterns(ways: Mapping[str, Way], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Lists of patterns that say it; what is in none of them is cut along dimension 0."""
    found: dict[str, list[object]] = {REPLICATED: [], ROWS: [], HALVES: [], PARTS: []}
    for (way, shape), names in _by_way(ways, shapes).items():
        patterns = list(dict.fromkeys(_expressions(names, ways)))
        if way.dim is None:
            found[REPLICATED] += patterns
        elif way == Way(1):
            found[ROWS] += patterns
        elif way.dim == 0 and len(way.sections) == 2 and way.sections[0] == way.sections[1]:
            found[HALVES] += patterns
        elif way != Way(0):
            sizes = way.sections or (shape[way.dim],)
            stated = (*shape[: way.dim], sizes, *shape[way.dim + 1 :])
            found[PARTS].append({"patterns": patterns, "shape": stated, "partition_dim": way.dim})
    return dict(found)


def _by_way(ways: Mapping[str, Way], shapes: Mapping[str, tuple[int, ...]]) -> dict[tuple[Way, tuple[int, ...]], list[str]]:
    """Names by their way, and by their shape where that is stated with it."""
    found: dict[tuple[Way, tuple[int, ...]], list[str]] = {}
    for name, way in ways.items():
        is_stated = way.dim is not None and (bool(way.sections) or way.dim > 1)
        found.setdefault((way, shapes[name] if is_stated else ()), []).append(name)
    return found


def _expressions(names: Iterable[str], ways: Mapping[str, Way]) -> Iterable[str]:
    """One pattern for names that differ in numbers alone, where all of these are cut alike; else one for each."""
    alike: dict[str, set[Way]] = {}
    for name, way in ways.items():
        alike.setdefault(skeleton(name), set()).add(way)
    for name in names:
        parts = name.split(".")
        is_general = len(alike[skeleton(name)]) == 1 and sum(part.isdigit() for part in parts) <= _MAX_NUMBERS
        yield "^" + r"\.".join(r"\d+" if is_general and part.isdigit() else re.escape(part) for part in parts) + "$"
