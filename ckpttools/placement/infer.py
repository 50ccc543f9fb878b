"""Rules from how a source was cut: each tensor's pieces are compared with what cuts along the axes of a mesh would give.

What the pieces alone cannot tell is settled so: cuts along a later dimension are tensor parallelism; where there are none, or
the source's mesh does not name `tp`, cuts of dimension 0 alone are FSDP's, unless they are as many as tensor parallelism has
and FSDP has none; where nothing but stacked experts is cut, it is the experts that were divided.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from ckpttools.errors import UsageError
from ckpttools.model import Box, Mesh, TensorEntry
from ckpttools.names.factors import refactored
from ckpttools.placement.globs import exact_glob, skeleton
from ckpttools.placement.local import Cut, Placement, local_tensor
from ckpttools.placement.rule_files import built_in, choose
from ckpttools.placement.rules import Rule, RuleSet

_AXES_OF_OTHERS = {"tp": ("tp", "tensor", "model", "mp"), "ep": ("ep", "expert")}
Cuts = tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of the axes that cut the source."""

    fsdp: int
    tp: int
    ep: int

    @property
    def mesh(self) -> Mesh:
        return Mesh((("fsdp", self.fsdp), ("ep", self.ep), ("tp", self.tp)))


def infer(tensors: Mapping[str, TensorEntry], mesh: Mesh) -> RuleSet:
    """The rules by which a source was cut, for names as they are given. Pure.

    Where a built-in set knows the names, what it says of layers, experts and heads is taken from it, and its rules stand in
    for pieces that no cut of a mesh gives (interleaved ones).

    Args:
        tensors: of the source, by the names in the output.
        mesh: of the source, as far as it is known.

    Raises: UsageError: when no tensor was cut.
    """
    entries = {name: entry for name, entry in tensors.items() if entry.family == "model"} or dict(tensors)
    views = {name: _view(name, entry) for name, entry in entries.items()}
    if not any(len(view.boxes) > 1 for view in views.values()):
        hint = "leave --placements out for the rules that the names suggest, or name a set"
        raise UsageError("how the source is cut tells nothing: every tensor of it is in one piece", hints=[hint])
    base = choose({name: entry.spec.shape for name, entry in entries.items()}) or built_in("buffers")
    sizes = _sizes({name: view.boxes for name, view in views.items()}, mesh)
    groups: dict[str, dict[str, tuple[Rule, ...]]] = defaultdict(dict)
    known: dict[tuple[tuple[int, ...], frozenset[Box], bool], Cuts | None] = {}
    for name, view in views.items():
        key = (view.shape, view.boxes, _is_of_experts(name))
        if key not in known:
            known[key] = _cuts(*key, sizes)
        groups[skeleton(name)][name] = _rules(name, view, known[key], sizes, base)
    own = merged(groups, "source")
    about = f"how the source was cut: {Mesh(tuple(axis for axis in sizes.mesh.axes if axis[1] > 1))}"
    return RuleSet("source", (*own, *built_in("buffers").rules), base.stages, base.experts, about=about)


@dataclass(frozen=True, slots=True)
class _View:
    """What is looked at of a tensor."""

    shape: tuple[int, ...]
    boxes: frozenset[Box]
    """Those with elements."""
    skipped: int = 0
    """Dimensions in front that count layers, each of which is in pieces of its own, all cut alike."""


def _view(name: str, entry: TensorEntry) -> _View:
    """A tensor, or one layer of it where it has all layers stacked in front, as Megatron's distributed checkpoints have."""
    shape = entry.spec.shape
    boxes = frozenset(piece.box for piece in refactored(entry, ()).pieces if piece.box.volume)
    is_stacked = "layers" in name.split(".") and skeleton(name) == name and len(shape) > 1
    if not is_stacked or not boxes or any(box.sizes[0] != 1 for box in boxes):
        return _View(shape, boxes)
    layers: dict[int, set[Box]] = defaultdict(set)
    for box in boxes:
        layers[box.offsets[0]].add(Box(box.offsets[1:], box.sizes[1:]))
    first = next(iter(layers.values()))
    if len(layers) != shape[0] or any(layer != first for layer in layers.values()):
        return _View(shape, boxes)
    return _View(shape[1:], frozenset(first), 1)


def _sizes(boxes: Mapping[str, frozenset[Box]], mesh: Mesh) -> _Sizes:
    """How many ranks each axis had: from the mesh where it names the axis, else from the pieces.

    Where nothing but stacked experts is cut, along their dimension 0, it is the experts that were divided.
    """
    rows = {name: _places(found, 0) for name, found in boxes.items()}
    across = {name: max((_places(found, dim) for dim in range(1, _rank(found))), default=1) for name, found in boxes.items()}
    named = dict(mesh.axes)
    told = {axis: next((named[o] for o in others if o in named), 0) for axis, others in _AXES_OF_OTHERS.items()}
    # interleaved pieces are more than there are ranks, so what most tensors have counts
    often = Counter(across[name] for name in {skeleton(name): name for name in boxes}.values() if across[name] > 1)
    tp = told["tp"] or max(often, key=lambda count: (often[count], -count), default=1)
    ep = told["ep"] or 1
    if not mesh.axes and not told["tp"] and max(across.values()) == 1:
        cut = [name for name, found in boxes.items() if len(found) > 1]
        if all(map(_is_of_experts, cut)):
            return _Sizes(1, 1, max(rows.values()))
    crossed = [rows[name] for name, count in across.items() if count > 1]
    fsdp = max(crossed) // ep if crossed else max(rows.values()) // (tp * ep)
    return _Sizes(max(fsdp, 1), tp, ep)


def _is_of_experts(name: str) -> bool:
    return "experts" in name.split(".")


def _rank(boxes: Iterable[Box]) -> int:
    return next((len(box.sizes) for box in boxes), 0)


def _places(boxes: Iterable[Box], dim: int) -> int:
    """How many places along a dimension boxes begin at."""
    return len({box.offsets[dim] for box in boxes if dim < len(box.offsets)}) or 1


def _cuts(shape: tuple[int, ...], boxes: frozenset[Box], is_of_experts: bool, sizes: _Sizes) -> Cuts | None:
    """The cuts that give these boxes, the first of those that do; None where none do."""
    for cuts in _candidates(shape, is_of_experts, sizes):
        if _boxes_of(shape, cuts, sizes) == boxes:
            return cuts
    return None


def _candidates(shape: tuple[int, ...], is_of_experts: bool, sizes: _Sizes) -> Iterator[Cuts]:
    """What may have been done to a tensor, the likelier first where several give the same boxes."""
    rows = (Cut("fsdp", 0),) if sizes.fsdp > 1 and shape else ()
    columns: list[Cuts] = [(Cut("tp", dim),) for dim in range(len(shape))] if sizes.tp > 1 else []
    experts: list[Cuts] = [(Cut("ep", 0),), ()] if sizes.ep > 1 and is_of_experts and shape else [()]
    for expert, column in product(experts, [(), *columns]):
        yield expert + column + rows
    if rows:
        for expert, column in product(experts, [(), *columns]):
            yield expert + column


def _boxes_of(shape: tuple[int, ...], cuts: Cuts, sizes: _Sizes) -> frozenset[Box]:
    """The boxes with elements that ranks hold after some cuts."""
    axes = {cut.axis for cut in cuts}
    mesh = Mesh(tuple(axis for axis in sizes.mesh.axes if axis[0] in axes))
    found = set()
    for rank in range(mesh.ranks):
        local = local_tensor(shape, Placement(cuts), mesh, rank)
        found |= {part.box for part in local.parts if part.box.volume} if local is not None else set()
    return frozenset(found)


def _rules(name: str, view: _View, cuts: Cuts | None, sizes: _Sizes, base: RuleSet) -> tuple[Rule, ...]:
    """What the rules say of one tensor, without patterns."""
    suggested = base.matching(name)
    if cuts is None:  # interleaved, flattened: what the names suggest is better than nothing
        first = {rule.axis: rule for rule in reversed(suggested)}
        return tuple(replace(rule, tensors=(), label="") for rule in first.values())
    # how many stages there were stands in no box of stacked layers
    found = [replace(rule, tensors=(), label="") for rule in suggested if rule.axis == "pp"]
    for cut in cuts:
        if cut.axis != "fsdp":
            dim, dims = cut.dim + view.skipped, len(view.shape) + view.skipped
            alike = next((rule for rule in suggested if (rule.axis, rule.dim % dims) == (cut.axis, dim)), None)
            found.append(Rule((), cut.axis, dim, units=alike.units if alike else ""))
    is_left_whole = not cuts and view.shape != () and len(view.boxes) == 1 and sizes.fsdp > 1
    return (Rule(()),) if is_left_whole else tuple(found)


def merged(groups: Mapping[str, Mapping[str, tuple[Rule, ...]]], where: str) -> list[Rule]:
    """One rule per kind of cut, with one pattern for what is alike in every layer. Pure.

    Args:
        groups: skeleton of names -> name -> its rules, without patterns.
        where: the name of the set, for labels.
    """
    patterns: dict[Rule, list[str]] = {}
    for alike in groups.values():
        is_one = len(set(alike.values())) == 1
        for name, rules in list(alike.items())[: 1 if is_one else None]:
            for rule in rules:
                patterns.setdefault(rule, []).append(_general(name) if is_one else exact_glob(name))
    whole = tuple(glob for rule, globs in patterns.items() if not rule.axis for glob in globs)
    found = [Rule(whole, label=f"`replicate` of {where}")] if whole else []
    cutting = [(rule, globs) for rule, globs in patterns.items() if rule.axis]
    return found + [
        replace(rule, tensors=tuple(globs), label=f"rule {number} of {where}") for number, (rule, globs) in enumerate(cutting, 1)
    ]


def _general(name: str) -> str:
    """The pattern of a name and of those that differ from it in numbers alone."""
    parts = exact_glob(name).removeprefix("^").split(".")
    return "^" + ".".join("*" if re.fullmatch(r"[0-9]+", part) else part for part in parts)
