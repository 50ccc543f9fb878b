"""Rule sets as TOML: the built-in ones, a user's own, and which of the built-in ones is for a model's names.

Read `parse_rules` for the format (docs/reference/placement-rules.md has it for people) and `choose`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

from ckpttools.errors import UsageError
from ckpttools.placement.globs import parse_glob
from ckpttools.placement.rules import CUTTING_AXES, UNITS, Proportion, Rule, RuleSet, Stages
from ckpttools.toml import parse_toml

BUILT_IN = (
    *("gpt_oss", "minimax", "mixtral", "mixtral_transposed", "internlm2", "llama", "gpt2", "gpt2_linear", "gpt_bigcode", "gptj"),
    *("bloom", "falcon", "chatglm", "chatglm1", "gpt_neox", "t5", "megatron", "megatron_gated"),
)
"""The sets that `choose` tries, in this order: a more particular one stands before the one whose names it shares."""
OTHERS = ("llama_meta1", "buffers")
"""Further sets that are there to be named: Llama 1 and 2 as Meta cut them, and what every set has in the end."""
_TOP = ("about", "include", "recognise", "models", "unless", "shaped", "replicate", "rules", "stages", "experts")
_RULE = ("tensors", "axis", "dim", "sections", "units", "groups")
_STAGES = ("layers", "first", "last", "tied")
_PROPORTION = ("tensor", "dim", "times", "of", "of_dim")
_MAX_DIM = 8
_MAX_SHARE = 1 << 40


@cache
def built_in(name: str) -> RuleSet:
    """A set that comes with the tool. Raises UsageError for a name that is none."""
    if name not in (*BUILT_IN, *OTHERS):
        raise UsageError(f"no built-in set of rules is called `{name}`", hints=[f"there are: {', '.join(BUILT_IN + OTHERS)}"])
    text = files("ckpttools.placement").joinpath("builtin").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return parse_rules(text, name)


def choose(shapes: Mapping[str, Sequence[int]], model_type: str = "") -> RuleSet | None:
    """The built-in set for a model's tensors, given their shapes by name; None where no set knows them.

    Args: model_type: as the model's config has it, where there is one; it decides between sets for the same names.
    """
    sets = sorted(map(built_in, BUILT_IN), key=lambda rules: model_type not in rules.models)
    return next((rules for rules in sets if rules.is_for(shapes)), None)


def parse_rules(text: str, where: str) -> RuleSet:
    """The set that a TOML document describes, after it the sets that it includes and the built-in buffers.

    Args: where: what messages call it: the name of a file, or of a built-in set.
    Raises: UsageError: for what is not TOML or not such a set; it names the line or the rule.
    """
    reader = _Reader(text, where)
    table = parse_toml(text, where)
    reader.require_keys(table, _TOP, "")
    included = [reader.included(name) for name in reader.texts(table, "include", "")]
    if where != "buffers":
        included.append(built_in("buffers"))
    rules = [Rule(globs, label=f"`replicate` of {where}")] if (globs := reader.globs(table, "replicate", "")) else []
    rules += reader.rules(table)
    stages = reader.stages(table)
    experts = reader.experts(table)
    for other in included:
        rules += [rule for rule in other.rules if rule not in rules]
        stages = stages if stages != Stages() else other.stages
        experts = experts or other.experts
    recognise = tuple(reader.checked(group, "recognise") for group in reader.lists(table, "recognise", ""))
    about = table.get("about", "")
    if not isinstance(about, str):
        raise reader.error("`about` is not a text")
    unless = reader.globs(table, "unless", "")
    models = reader.texts(table, "models", "")
    return RuleSet(where, tuple(rules), stages, experts, recognise, models, unless, reader.proportions(table), about)


class _Reader:
    """Takes a parsed document apart; every error names the place."""

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        lines = text.splitlines()
        self.lines = [i for i, line in enumerate(lines, 1) if re.match(r"\s*\[\[\s*[\"']?rules[\"']?\s*\]\]", line)]

    def error(self, message: str, place: str = "", *, expected: str = "", found: str = "") -> UsageError:
        return UsageError(f"{place}: {message}" if place else message, where=self.where, expected=expected, found=found)

    def included(self, name: str) -> RuleSet:
        if name not in BUILT_IN + OTHERS:
            raise self.error(f"`include`: no built-in set of rules is called `{name}`", expected=", ".join(BUILT_IN + OTHERS))
        return built_in(name)

    def require_keys(self, table: Mapping[str, object], known: tuple[str, ...], place: str) -> None:
        for key in table:
            if key not in known:
                raise self.error(f"unknown key `{key}`", place, expected=f"one of {', '.join(known)}")

    def texts(self, table: Mapping[str, object], key: str, place: str) -> tuple[str, ...]:
        found = table.get(key, [])
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise self.error(f"`{key}` is not a list of texts", place)
        return tuple(found)

    def lists(self, table: Mapping[str, object], key: str, place: str) -> tuple[tuple[str, ...], ...]:
        found = table.get(key, [])
        if not isinstance(found, list) or not all(
            isinstance(group, list) and group and all(isinstance(item, str) for item in group) for group in found
        ):
            raise self.error(f"`{key}` is not a list of lists of patterns", place)
        return tuple(tuple(group) for group in found)

    def pairs(self, table: Mapping[str, object], key: str, place: str) -> tuple[tuple[str, str], ...]:
        found = self.lists(table, key, place)
        if any(len(pair) != 2 for pair in found):
            raise self.error(f"`{key}` is not a list of pairs", place)
        return tuple((first, second) for first, second in found)

    def globs(self, table: Mapping[str, object], key: str, place: str, placeholder: str = "") -> tuple[str, ...]:
        return self.checked(self.texts(table, key, place), f"{place} {key}".strip(), placeholder)

    def checked(self, globs: tuple[str, ...], place: str, placeholder: str = "") -> tuple[str, ...]:
        for glob in globs:
            try:
                parse_glob(glob)
            except ValueError as error:
                raise self.error(f"bad pattern `{glob}`: {error}", place) from error
            asked = re.findall(r"\{(\w+)\}", glob)
            if asked != ([placeholder] if placeholder else []):
                expected = f"{{{placeholder}}} in it, once" if placeholder else "no placeholder in it"
                raise self.error(f"bad pattern `{glob}`", place, expected=expected)
        return globs

    def table(self, table: Mapping[str, object], key: str) -> Mapping[str, object]:
        found = table.get(key, {})
        if not isinstance(found, dict):
            raise self.error(f"`{key}` is not a table")
        return found

    def rules(self, table: Mapping[str, object]) -> list[Rule]:
        found = table.get("rules", [])
        if not isinstance(found, list) or not all(isinstance(rule, dict) for rule in found):
            raise self.error("`rules` is not a list of tables", expected="[[rules]] in front of each rule")
        return [self.rule(rule, number) for number, rule in enumerate(found, 1)]

    def rule(self, table: Mapping[str, object], number: int) -> Rule:
        place = f"rule {number}" + (f" (line {self.lines[number - 1]})" if number <= len(self.lines) else "")
        self.require_keys(table, _RULE, place)
        globs = self.globs(table, "tensors", place)
        axis, dim, units = table.get("axis"), table.get("dim"), table.get("units", "")
        if not globs:
            raise self.error("`tensors` is missing or empty", place, expected="a list of patterns")
        if axis not in CUTTING_AXES:
            raise self.error("`axis` is none that a rule can cut along", place, expected=f"one of {', '.join(CUTTING_AXES)}",
                             found="nothing" if axis is None else f"{axis!r}")  # fmt: skip
        if not isinstance(dim, int) or isinstance(dim, bool) or not -_MAX_DIM <= dim < _MAX_DIM:
            raise self.error("`dim` is not a dimension", place, expected=f"a number from {-_MAX_DIM} to {_MAX_DIM - 1}",
                             found="nothing" if dim is None else f"{dim!r}")  # fmt: skip
        if units != "" and units not in UNITS:
            raise self.error("unknown `units`", place, expected=f"one of {', '.join(UNITS)}", found=f"{units!r}")
        sections, groups = self.sections(table, place), table.get("groups", "")
        if groups != "" and (groups not in UNITS or not sections):
            expected = f"one of {', '.join(UNITS)}, beside `sections`"
            raise self.error("unknown `groups`, or none that have sections", place, expected=expected, found=f"{groups!r}")
        return Rule(globs, str(axis), dim, sections, str(units), str(groups), f"rule {number} of {self.where}")

    def sections(self, table: Mapping[str, object], place: str) -> tuple[int | str, ...]:
        found = table.get("sections", [])
        if not isinstance(found, list) or not all(map(_is_section, found)) or (len(found) < 2 and "sections" in table):
            expected = f"two or more of: a number of 1 or more, {', '.join(UNITS)}"
            raise self.error("`sections` is not a list of relative lengths", place, expected=expected)
        if {type(item) for item in found} == {int, str}:
            raise self.error("`sections` has numbers and units; they cannot be compared", place)
        return tuple(found)

    def proportions(self, table: Mapping[str, object]) -> tuple[Proportion, ...]:
        found = table.get("shaped", [])
        if not isinstance(found, list) or not all(isinstance(item, dict) and set(item) == set(_PROPORTION) for item in found):
            raise self.error("`shaped` is not a list of proportions", expected=f"tables of {', '.join(_PROPORTION)}")
        for item in found:
            are_texts = isinstance(item["tensor"], str) and isinstance(item["of"], str)
            if not are_texts or not all(type(item[key]) is int for key in ("dim", "times", "of_dim")):
                raise self.error("`shaped` has names and numbers that are none", expected="two texts and three numbers")
        return tuple(Proportion(*(item[key] for key in _PROPORTION)) for item in found)

    def stages(self, table: Mapping[str, object]) -> Stages:
        found = self.table(table, "stages")
        self.require_keys(found, _STAGES, "[stages]")
        pairs = self.pairs(found, "tied", "[stages]")
        for pair in pairs:
            self.checked(pair, "[stages] tied")
        return Stages(
            self.globs(found, "layers", "[stages]", "layer"),
            self.globs(found, "first", "[stages]"),
            self.globs(found, "last", "[stages]"),
            pairs,
        )

    def experts(self, table: Mapping[str, object]) -> tuple[str, ...]:
        found = self.table(table, "experts")
        self.require_keys(found, ("names",), "[experts]")
        return self.globs(found, "names", "[experts]", "expert")


def _is_section(item: object) -> bool:
    if isinstance(item, bool):
        return False
    return 0 < item < _MAX_SHARE if isinstance(item, int) else item in UNITS


def render_rules(rules: RuleSet) -> str:
    """A set as TOML that `parse_rules` reads back to the same placements. Pure."""
    lines = [f"# {rules.about}"] if rules.about else []
    own = [rule for rule in rules.rules if rule not in built_in("buffers").rules]
    replicated = [glob for rule in own if not rule.axis for glob in rule.tensors]
    if replicated:
        lines += [f"replicate = {_render(replicated)}", ""]
    for rule in own:
        if rule.axis:
            lines += ["[[rules]]", f"tensors = {_render(list(rule.tensors))}", f'axis = "{rule.axis}"', f"dim = {rule.dim}"]
            lines += [f"sections = {_render(list(rule.sections))}"] if rule.sections else []
            lines += [f'units = "{rule.units}"'] if rule.units else []
            lines += [f'groups = "{rule.groups}"'] if rule.groups else []
            lines.append("")
    stages = rules.stages
    if stages != Stages():
        lines.append("[stages]")
        for key, value in (("layers", stages.layers), ("first", stages.first), ("last", stages.last), ("tied", stages.tied)):
            lines += [f"{key} = {_render(list(value))}"] if value else []
        lines.append("")
    if rules.experts:
        lines += ["[experts]", f"names = {_render(list(rules.experts))}", ""]
    return "\n".join(lines)


def _render(value: object) -> str:
    """A text, a number or a list of them as TOML."""
    if isinstance(value, (list, tuple)):
        inner = [_render(item) for item in value]
        line = f"[{', '.join(inner)}]"
        return line if len(line) < 110 else "[\n" + "".join(f"    {item},\n" for item in inner) + "]"
    if isinstance(value, int):
        return str(value)
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in str(value))
    return f'"{escaped}"'
