"""Converts names: takes every element of the source to one element of a target, or says which it cannot. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from ckpttools.errors import ConversionError
from ckpttools.geometry import cover
from ckpttools.model import Box, TensorEntry
from ckpttools.names.factors import Factors
from ckpttools.names.maps import Count, NameMap, Rule
from ckpttools.names.moves import Made, Move, assemble
from ckpttools.names.patterns import Pattern

_MAX_NAMED = 12
_MAX_PARTS = 1 << 20
"""Layers, experts or blocks; a tensor without elements may claim any number of them."""


@dataclass(frozen=True)
class Converted:
    """Tensors under the names of another side."""

    tensors: tuple[TensorEntry, ...]
    map: str
    left: tuple[str, ...] = ()
    """Names of source tensors that hold nothing of the model and were left behind."""
    cut: tuple[str, ...] = ()
    """What was cut off: padding rows of a vocabulary, in words."""
    unsure: tuple[str, ...] = ()
    """What was kept because nothing says whether it is padding, in words."""


class NamesError(ConversionError):
    """Names that a map cannot convert: each reason is told."""

    def __init__(self, map_: str, side: str, other: str, problems: tuple[str, ...]) -> None:
        self.problems = problems
        shown = list(problems[:_MAX_NAMED])
        shown += [f"and {len(problems) - _MAX_NAMED} more"] if len(problems) > _MAX_NAMED else []
        super().__init__(
            f"the names cannot be converted from {side} to {other} by the map {map_}:\n  " + "\n  ".join(shown),
            hints=["--exclude leaves source tensors behind, --names FILE.toml adds a map"],
        )


@dataclass
class _Work:
    """One conversion."""

    map: NameMap
    side: str
    counts: Mapping[str, int]
    problems: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)


def side_of(map_: NameMap, names: Iterable[str]) -> str | None:
    """The side to which names belong: that whose rules name more of them; None where neither names any. Pure."""
    listed = list(names)
    votes = {}
    for side in map_.sides:
        named = {n for n in listed if _is_named(map_, side, n)}
        votes[side] = len(named)
    best = max(map_.sides, key=lambda side: votes[side])
    return best if votes[best] else None


def _is_named(map_: NameMap, side: str, name: str) -> bool:
    names = {name, *(name.removeprefix(p) for p in map_.prefixes[side])}
    for first, other in map_.same[side]:
        for known in tuple(names):
            values = other.match(known) if first.match(known) is None else None
            if values is not None:
                names.add(first.fill(values | dict.fromkeys(other.stacked, "0")))
    return any(p.match(n) is not None for n in names for rule in map_.rules for p in rule.names[side])


def convert(map_: NameMap, side: str, tensors: Sequence[TensorEntry], counts: Mapping[str, int]) -> Converted:
    """The tensors of `side` under the names of the other side.

    Args: counts: numbers that the rules name: `groups`, `heads`, `vocab`, ...

    Raises: ConversionError: naming every source tensor that no rule takes, every target that is not filled, and every number
        that does not fit.
    """
    work = _Work(map_, side, counts)
    entries, dropped = _canonical(work, tensors)
    sources = {entry.name: entry for entry in entries}
    if len(sources) != len(entries):
        doubled = sorted({e.name for e in entries if sum(o.name == e.name for o in entries) > 1})
        raise NamesError(map_.name, side, map_.other(side), tuple(f"two tensors stand for one: {n}" for n in doubled))
    for rule in map_.rules:
        _apply(work, rule, sources)
    _require_layers(work, sources)
    work.problems += [f"no rule takes it: {name}" for name in sources if name not in work.taken]
    _require_filled(work, sources)
    if work.problems:
        raise NamesError(map_.name, side, map_.other(side), tuple(work.problems))
    made = tuple(assemble(m, sources) for m in work.made)
    return Converted(made, map_.name, tuple(dropped), tuple(dict.fromkeys(work.cut)), tuple(dict.fromkeys(work.unsure)))


def _canonical(work: _Work, tensors: Sequence[TensorEntry]) -> tuple[list[TensorEntry], list[str]]:
    """The source under the names that rules use: prefixes off, stacks taken apart; and what holds nothing."""
    prefix = next((p for p in work.map.prefixes[work.side] if tensors and all(t.name.startswith(p) for t in tensors)), "")
    entries = [_renamed(t, t.name.removeprefix(prefix)) for t in tensors]
    dropped = [t.name for t in entries if any(p.match(t.name) is not None for p in work.map.drop[work.side])]
    nothing = set(dropped)
    entries = [t for t in entries if t.name not in nothing]
    for first, other in work.map.same[work.side]:
        entries = [part for entry in entries for part in _unstacked(work, entry, first, other)]
    return entries, dropped


def _renamed(entry: TensorEntry, name: str) -> TensorEntry:
    whole = Made(name, entry.spec.shape, (_whole(entry),))
    return entry if name == entry.name else assemble(whole, {entry.name: entry})


def _whole(entry: TensorEntry) -> Move:
    rank = len(entry.spec.shape)
    return Move(entry.name, entry.spec.box, (0,) * rank, tuple(range(rank)))


def _unstacked(work: _Work, entry: TensorEntry, first: Pattern, other: Pattern) -> Iterator[TensorEntry]:
    """The tensors under the first spelling that one under the other is; itself when it is none."""
    values = other.match(entry.name) if first.match(entry.name) is None else None
    if values is None:
        yield entry
        return
    depth = len(other.stacked)
    if len(entry.spec.shape) < depth:
        work.problems.append(f"fewer than {depth} dimensions: {entry.name} {list(entry.spec.shape)}")
        return
    inner = entry.spec.shape[depth:]
    if prod(entry.spec.shape[:depth]) > _MAX_PARTS:
        work.problems.append(f"more than {_MAX_PARTS} layers or experts: {entry.name} {list(entry.spec.shape)}")
        return
    for index in product(*map(range, entry.spec.shape[:depth])):
        box = Box((*index, *(0 for _ in inner)), (*(1 for _ in index), *inner))
        move = Move(entry.name, box, (0,) * len(inner), tuple(range(depth, depth + len(inner))))
        name = first.fill(values | dict(zip(other.stacked, map(str, index), strict=True)))
        yield assemble(Made(name, inner, (move,)), {entry.name: entry})


def _apply(work: _Work, rule: Rule, sources: Mapping[str, TensorEntry]) -> None:
    """Every set of variables for which the source has tensors of a rule."""
    patterns = rule.names[work.side]
    found: dict[tuple[tuple[str, str], ...], None] = {}
    for name in sources:
        for pattern in patterns:
            values = pattern.match(name)
            if values is not None and name not in work.taken:
                found[tuple(sorted(values.items()))] = None
    for key in found:
        values = dict(key)
        names = [p.fill(values) for p in patterns]
        missing = [n for n in names if n not in sources]
        if missing:
            there = [n for n in names if n in sources]
            work.problems += [f"`{', '.join(there)}` has no counterpart in the source: {n} ({rule.label})" for n in missing]
            work.taken.update(there)
            continue
        work.taken.update(names)
        targets = [p.fill(values) for p in rule.names[work.map.other(work.side)]]
        try:
            work.made += list(_made(work, rule, [sources[n] for n in names], targets))
        except ValueError as e:
            work.problems.append(f"{names[0]}: {e} ({rule.label})")


def _made(work: _Work, rule: Rule, sources: Sequence[TensorEntry], targets: Sequence[str]) -> Iterator[Made]:
    """The targets of a rule. Raises ValueError where numbers do not fit."""
    forward = work.side == work.map.sides[0]
    if rule.rows:
        yield _permuted(work, rule, sources[0], targets[0], forward)
    elif len(targets) > 1 or (len(sources) == 1 and len(targets) == 1):
        yield from _split(work, rule, sources[0], targets, forward)
    else:
        yield _joined(work, rule, sources, targets[0])


def _split(work: _Work, rule: Rule, source: TensorEntry, targets: Sequence[str], forward: bool) -> Iterator[Made]:
    """The parts of one tensor."""
    shape = source.spec.shape
    if not shape:
        yield Made(targets[0], (), (_whole(source),))
        return
    rows = _true_rows(work, rule, source) if forward else shape[0]
    if len(targets) == 1:
        box = Box((0,) * len(shape), (rows, *shape[1:]))
        yield _turned(rule, targets[0], (rows, *shape[1:]), [Move(source.name, box, (0,) * len(shape), tuple(range(len(shape))))])
        return
    blocks = _number(work, rule.blocks)
    shares = _shares(work, rule, rows, blocks, len(targets))
    for i, target in enumerate(targets):
        before, moves = sum(shares[:i]), []
        for block in range(blocks):
            start = block * sum(shares) + before
            box = Box((start, *(0 for _ in shape[1:])), (shares[i], *shape[1:]))
            moves.append(Move(source.name, box, (block * shares[i], *(0 for _ in shape[1:])), tuple(range(len(shape)))))
        yield _turned(rule, target, (blocks * shares[i], *shape[1:]), moves)


def _shares(work: _Work, rule: Rule, rows: int, blocks: int, parts: int) -> list[int]:
    """Rows of each part in one block, as the rule has them; equal ones where it has none."""
    if rows % blocks:
        raise ValueError(f"{rows} rows cannot be divided into {blocks} blocks ({rule.blocks})")
    share = rows // blocks
    weights = [_number(work, n) for n in rule.shares] or [1] * parts
    if share % sum(weights):
        raise ValueError(f"{share} rows of a block cannot be divided into {'+'.join(map(str, weights))} parts")
    return [w * share // sum(weights) for w in weights]


def _joined(work: _Work, rule: Rule, sources: Sequence[TensorEntry], target: str) -> Made:
    """One tensor of its parts."""
    blocks = _number(work, rule.blocks)
    shapes = [tuple(reversed(s.spec.shape)) if rule.transpose else s.spec.shape for s in sources]
    if not all(shapes) or len({shape[1:] for shape in shapes}) != 1:
        raise ValueError(f"parts of shapes {', '.join(str(list(s)) for s in shapes)} cannot be joined along their rows")
    for shape in shapes:
        if shape[0] % blocks:
            raise ValueError(f"{shape[0]} rows cannot be divided into {blocks} blocks ({rule.blocks})")
    shares, inner = [shape[0] // blocks for shape in shapes], shapes[0][1:]
    if rule.shares and _shares(work, rule, sum(shares) * blocks, blocks, len(shares)) != shares:
        raise ValueError(f"parts of {'+'.join(map(str, shares))} rows are not as {'+'.join(map(str, rule.shares))}")
    axes = tuple(reversed(range(1 + len(inner)))) if rule.transpose else tuple(range(1 + len(inner)))
    moves = []
    for block in range(blocks):
        for i, source in enumerate(sources):
            start = block * sum(shares) + sum(shares[:i])
            own = Box((block * shares[i], *(0 for _ in inner)), (shares[i], *inner))
            box = Box(tuple(own.offsets[a] for a in axes), tuple(own.sizes[a] for a in axes))
            moves.append(Move(source.name, box, (start, *(0 for _ in inner)), axes))
    return Made(target, (blocks * sum(shares), *inner), tuple(moves))


def _permuted(work: _Work, rule: Rule, source: TensorEntry, target: str, forward: bool) -> Made:
    """A tensor whose rows are counted in another order."""
    shape = source.spec.shape
    turned = rule.transpose and not forward  # rows are those of the first side, so turn to it before, from it after
    if not shape or (rule.transpose and len(shape) != 2):
        raise ValueError(f"no rows to count in shape {list(shape)}")
    rows = shape[1] if turned else shape[0]
    known = prod(_number(work, n) for n in rule.rows if n != 0)
    if rows % known or (0 not in rule.rows and rows != known):
        raise ValueError(f"{rows} rows are not counted by {list(rule.rows)}, which makes {known}")
    sizes = [rows // known if n == 0 else _number(work, n) for n in rule.rows]
    order = list(rule.order)
    if not forward:  # the source counts in the second side's order
        sizes, order = [sizes[i] for i in order], [order.index(i) for i in range(len(order))]
    others = shape[:1] if turned else shape[1:]
    count, rest = tuple(sizes), tuple((n,) for n in others)
    first = len(others) if turned else 0  # dimension of the source, as counted, in which its rows begin
    own_rest = range(len(others)) if turned else range(len(sizes), len(sizes) + len(others))
    turn = tuple(first + i for i in order)
    is_turning = rule.transpose and forward
    box = Box((0,) * (len(sizes) + len(others)), (*others, *sizes) if turned else (*sizes, *others))
    move = Move(
        source.name,
        box,
        (0,) * len(box.sizes),
        (*own_rest, *turn) if is_turning else (*turn, *own_rest),
        (*rest, count) if turned else (count, *rest),
    )
    after = tuple(sizes[i] for i in order)
    if is_turning:
        return Made(target, (*others, rows), (move,), (*rest, after))
    return Made(target, (rows, *others), (move,), (after, *rest))


def _turned(rule: Rule, target: str, shape: tuple[int, ...], moves: Sequence[Move]) -> Made:
    """The same with rows for columns, where the rule says so."""
    if not rule.transpose or len(shape) < 2:
        return Made(target, shape, tuple(moves))
    turned = tuple(Move(m.source, m.box, m.offsets[::-1], m.axes[::-1]) for m in moves)
    return Made(target, shape[::-1], turned)


def _true_rows(work: _Work, rule: Rule, source: TensorEntry) -> int:
    """The rows that mean something: all of them, unless a count says that the others are padding."""
    rows = source.spec.shape[0]
    count = work.counts.get(rule.padded, rows) if rule.padded else rows
    if rule.padded and rule.padded not in work.counts:
        work.unsure.append(f"all {rows} rows of {source.name}: nothing states how many of them pad the {rule.padded}")
    if count > rows:
        raise ValueError(f"{rule.padded} is {count}, and there are only {rows} rows")
    if count < rows:
        work.cut.append(f"rows [{count}, {rows}) of {source.name}, which pad {rule.padded}")
    return count


def _number(work: _Work, count: Count) -> int:
    if isinstance(count, int):
        return count
    if count not in work.counts:
        raise ValueError(f"the number of {count} is not known")
    if not 0 < work.counts[count] <= _MAX_PARTS:
        raise ValueError(f"the number of {count} is {work.counts[count]}")
    return work.counts[count]


def _require_layers(work: _Work, sources: Mapping[str, TensorEntry]) -> None:
    """Every layer has every tensor that no model lacks, and layers are counted from 0 on."""
    numbers: dict[str, set[int]] = {}
    for rule in work.map.rules:
        for pattern in rule.names[work.side]:
            for name in sources:
                values = pattern.match(name)
                for word, text in (values or {}).items():
                    if text.isdigit():
                        numbers.setdefault(word, set()).add(int(text))
    for rule in work.map.rules:
        if rule.optional:
            continue
        pattern = rule.names[work.side][0]
        words = [w for w in pattern.variables if w in numbers]
        if len(words) != len(pattern.variables):
            work.problems.append(f"nothing in the source is `{pattern.text}` ({rule.label})")
            continue
        if prod(max(numbers[w]) + 1 for w in words) > 2 * len(sources) + _MAX_NAMED:
            work.problems.append(f"most of `{pattern.text}` are not there, up to the highest number in a name ({rule.label})")
            continue
        absent = [
            name
            for index in product(*(range(max(numbers[w]) + 1) for w in words))
            if (name := pattern.fill(dict(zip(words, map(str, index), strict=True)))) not in sources
        ]
        work.problems += [f"nothing fills {name}, which every such model has ({rule.label})" for name in absent[:_MAX_NAMED]]


def _require_filled(work: _Work, sources: Mapping[str, TensorEntry]) -> None:
    """Targets whose elements are filled once each, and that have names of their own; sources of which all is taken."""
    names: set[str] = set()
    taken: dict[tuple[str, Factors], list[Box]] = defaultdict(list)
    for made in work.made:
        if made.name in names:
            work.problems.append(f"two tensors become {made.name}")
        names.add(made.name)
        for move in made.moves:
            taken[move.source, move.factors].append(move.box)
        covered = cover(made.counted, [m.target for m in made.moves])
        if not covered.is_exact:
            work.problems.append(f"{covered.missing} elements of {made.name} {list(made.shape)} are not filled, or twice")
    for (name, factors), boxes in taken.items():
        shape = sources[name].spec.shape
        missing = cover(tuple(n for own in factors for n in own) if factors else shape, boxes).missing
        if missing and not any(f"of {name}," in cut for cut in work.cut):
            work.problems.append(f"{missing} elements of {name} {list(shape)} go nowhere")


def respelled(map_: NameMap, side: str, tensors: Sequence[TensorEntry], *, is_stacked: bool) -> list[TensorEntry]:
    """The tensors under the first spelling of their names, with layers and experts in stacks or out of them. Pure."""
    work, found = _Work(map_, side, {}), list(tensors)
    for first, other in map_.same[side]:
        if not (is_stacked and other.stacked):
            found = [part for entry in found for part in _unstacked(work, entry, first, other)]
    return stacked(map_, side, found) if is_stacked else found


def stacked(map_: NameMap, side: str, tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    """The tensors with layers and experts in stacks, where the map has a spelling for that and they are alike. Pure."""
    found = list(tensors)
    for first, other in reversed(map_.same[side]):
        if other.stacked:
            found = _stacked(found, first, other)
    return found


def _stacked(tensors: Sequence[TensorEntry], first: Pattern, other: Pattern) -> list[TensorEntry]:
    groups: dict[str, dict[tuple[int, ...], TensorEntry]] = defaultdict(dict)
    for entry in tensors:
        values = first.match(entry.name)
        if values is not None:
            groups[other.fill(values)][tuple(int(values[word]) for word in other.stacked)] = entry
    joined: dict[str, TensorEntry] = {}
    for name, parts in groups.items():
        entries = list(parts.values())
        sizes = tuple(max(axis) + 1 for axis in zip(*parts, strict=True))
        is_alike = len({(e.spec.dtype, e.spec.shape) for e in entries}) == 1
        if not is_alike or prod(sizes) != len(parts) or entries[0].spec.dtype.is_sub_byte:
            continue
        inner = entries[0].spec.shape
        axes = (*(None for _ in sizes), *range(len(inner)))
        moves = tuple(Move(e.name, e.spec.box, (*index, *(0 for _ in inner)), axes) for index, e in parts.items())
        made = assemble(Made(name, (*sizes, *inner), moves), {e.name: e for e in entries})
        joined |= dict.fromkeys((e.name for e in entries), made)
    return list({id(e): e for e in (joined.get(t.name, t) for t in tensors)}.values())
