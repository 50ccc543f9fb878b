"""Maps of names, and the files that hold them: which tensors of one side are which tensors of the other.

A rule names one tensor of one side and one or several of the other; the several are parts of the one. Both directions follow
from it. Read `NameMap` and `parse_map` first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ckpttools.errors import UsageError
from ckpttools.names.patterns import Pattern
from ckpttools.toml import parse_toml

BUILT_IN = ("llama", "mixtral", "gpt2", "llama_meta", "llama_fms")
"""In the order in which they are tried."""
_TOP = ("about", "sides", "rules", "same", "drop", "prefixes", "needs")
_RULE = ("blocks", "shares", "transpose", "rows", "order", "optional", "padded")
Count = int | str
"""A number, or the name of one that the model's settings have (`groups`, `heads`, ...)."""


@dataclass(frozen=True)
class Rule:
    """One tensor of one side and its parts on the other."""

    names: Mapping[str, tuple[Pattern, ...]]
    """By side; one of the two has a single pattern."""
    blocks: Count = 1
    """Into how many blocks the rows of the one are divided, each of which has a share of every part, one after the other."""
    shares: tuple[Count, ...] = ()
    """How the rows of a block are divided among the parts, as numbers to each other; equally where there are none."""
    transpose: bool = False
    """Whether rows of one side are columns of the other; done to each part."""
    rows: tuple[Count, ...] = ()
    """The rows of the first side, as numbers whose product they are; 0 for what is left."""
    order: tuple[int, ...] = ()
    """With `rows`: in which order the second side counts these numbers."""
    optional: bool = False
    """Whether a model may lack it."""
    padded: str = ""
    """The number of rows that mean something, where the first side may have more of them."""
    label: str = ""


@dataclass(frozen=True)
class NameMap:
    """How the names of one side stand for those of the other."""

    name: str
    sides: tuple[str, str]
    rules: tuple[Rule, ...]
    same: Mapping[str, tuple[tuple[Pattern, Pattern], ...]]
    """By side, (pattern, another one of the same tensors): first the one that rules use."""
    drop: Mapping[str, tuple[Pattern, ...]]
    """By side, what holds nothing of the model: tables that are made anew when it is loaded."""
    prefixes: Mapping[str, tuple[str, ...]]
    """By side, what wrappers put in front of every name."""
    about: str = ""

    def other(self, side: str) -> str:
        """The side that is not this one."""
        return self.sides[1] if side == self.sides[0] else self.sides[0]


@cache
def built_in(name: str) -> NameMap:
    """A map that comes with the tool. Raises UsageError for a name that is none."""
    if name not in BUILT_IN:
        raise UsageError(f"no built-in map of names is called `{name}`", hints=[f"there are: {', '.join(BUILT_IN)}"])
    text = files("ckpttools.names").joinpath("builtin").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return parse_map(text, name)


def parse_map(text: str | bytes, where: str) -> NameMap:
    """The map that a TOML document is. Pure. Raises UsageError, saying which rule is wrong."""
    table = parse_toml(text, where)
    unknown = [key for key in table if key not in _TOP]
    sides = _texts(table.get("sides"), where, "sides")
    if unknown or len(set(sides)) != 2:
        found = f"unknown key `{unknown[0]}`" if unknown else f"sides {list(sides)}"
        raise UsageError(f"not a map of names: {where}", expected="`sides` of two names, and `rules`", found=found)
    rows = table.get("rules")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"not a map of names: {where}", expected="a list of tables `rules`")
    rules = tuple(_rule(row, sides, f"rule {i} of {where}") for i, row in enumerate(rows, 1))
    return NameMap(
        where,
        (sides[0], sides[1]),
        rules,
        {side: _pairs(_of_side(table.get("same"), side, where), where) for side in sides},
        {side: _patterns(_of_side(table.get("drop"), side, where), where, "drop") for side in sides},
        {side: _texts(_of_side(table.get("prefixes"), side, where), where, "prefixes") for side in sides},
        str(table.get("about", "")),
    )


def _rule(row: dict[str, object], sides: Sequence[str], label: str) -> Rule:
    unknown = [key for key in row if key not in (*_RULE, *sides)]
    if unknown:
        raise UsageError(f"{label}: unknown key `{unknown[0]}`", expected=", ".join((*sides, *_RULE)))
    names = {side: _patterns(row.get(side), label, side) for side in sides}
    one = next((side for side in sides if len(names[side]) == 1), None)
    if one is None or not all(names.values()):
        raise UsageError(f"{label}: one side names one tensor, and the other one or several")
    _require_same_variables(names, label)
    blocks, rows, order = row.get("blocks", 1), row.get("rows", []), row.get("order", [])
    if not _is_count(blocks) or not isinstance(rows, list) or not all(_is_count(n) or n == 0 for n in rows):
        raise UsageError(f"{label}: `blocks` and `rows` are numbers, or names of numbers")
    if not isinstance(order, list) or sorted(map(repr, order)) != sorted(map(repr, range(len(rows)))) or rows.count(0) > 1:
        raise UsageError(f"{label}: `order` counts the numbers of `rows` in another order, and one of them may be 0")
    shares = row.get("shares", [])
    if not isinstance(shares, list) or not all(map(_is_count, shares)) or len(shares) not in (0, max(map(len, names.values()))):
        raise UsageError(f"{label}: `shares` are numbers, or names of numbers, one for each part")
    if rows and any(len(patterns) > 1 for patterns in names.values()):
        raise UsageError(f"{label}: `rows` go with one tensor on each side")
    flags = {key: row.get(key, False) for key in ("transpose", "optional")}
    if not all(isinstance(flag, bool) for flag in flags.values()) or not isinstance(row.get("padded", ""), str):
        raise UsageError(f"{label}: `transpose` and `optional` are true or false, `padded` is the name of a number")
    return Rule(
        names,
        blocks if isinstance(blocks, int) else str(blocks),
        tuple(n if isinstance(n, int) else str(n) for n in shares),
        bool(flags["transpose"]),
        tuple(n if isinstance(n, int) else str(n) for n in rows),
        tuple(n for n in order if isinstance(n, int)),
        bool(flags["optional"]),
        str(row.get("padded", "")),
        label,
    )


def _require_same_variables(names: Mapping[str, tuple[Pattern, ...]], label: str) -> None:
    for patterns in names.values():
        for pattern in patterns:
            if set(pattern.variables) != set(next(iter(names.values()))[0].variables) or pattern.stacked:
                raise UsageError(f"{label}: every pattern has the same words in braces: `{pattern.text}`")


def _is_count(value: object) -> bool:
    return (type(value) is int and 0 < value < 1 << 40) or (isinstance(value, str) and value.isidentifier())


def _texts(value: object, where: str, key: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise UsageError(f"{where}: `{key}` is a text, or a list of texts")
    return tuple(items)


def _patterns(value: object, where: str, key: str) -> tuple[Pattern, ...]:
    return tuple(Pattern.parse(text) for text in _texts(value, where, key))


def _of_side(value: object, side: str, where: str) -> object:
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"{where}: `same`, `drop` and `prefixes` are tables by side")
    return value.get(side) if isinstance(value, dict) else None


def _pairs(value: object, where: str) -> tuple[tuple[Pattern, Pattern], ...]:
    found = []
    for pair in value if isinstance(value, list) else []:
        patterns = _patterns(pair, where, "same")
        if len(patterns) != 2 or set(patterns[0].variables) != set(patterns[1].variables) or patterns[0].stacked:
            raise UsageError(f"{where}: `same` has pairs of patterns with the same words", found=str(pair)[:80])
        found.append((patterns[0], patterns[1]))
    return tuple(found)
