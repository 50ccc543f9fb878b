"""Patterns of names: `model.layers.{layer}.mlp.{*rest}`, with `[layer]` behind for a dimension that counts. Pure.

`{layer}` and `{expert}` (and every name that ends in `_number`) stand for digits, other words in braces for what has no dot,
`{*word}` for anything. `decoder.layers.{*rest}[layer]` names a tensor whose first dimension counts layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ckpttools.errors import UsageError

_PLACE = re.compile(r"\{(\*?)([a-z_]+)\}")
_STACK = re.compile(r"\[([a-z_]+)\]")
_DIGITS = ("layer", "expert")
_MAX_DIGITS = 6


@dataclass(frozen=True)
class Pattern:
    """A pattern of names."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Raises UsageError for braces or brackets that say nothing."""
        name = text[: text.index("[")] if "[" in text else text
        stacks = text[len(name) :]
        rest = _PLACE.sub("", name)
        words = [w for _, w in _PLACE.findall(name)]
        if not name or set(rest) & set("{}[]*") or _STACK.sub("", stacks) or len(set(words)) != len(words):
            raise UsageError(f"not a pattern of names: `{text}`", expected="like `model.layers.{layer}.mlp.{*rest}`")
        return cls(text)

    @cached_property
    def stacked(self) -> tuple[str, ...]:
        """The variables that leading dimensions count."""
        return tuple(_STACK.findall(self.text))

    @cached_property
    def name(self) -> str:
        """Without what is stacked."""
        return self.text[: self.text.index("[")] if "[" in self.text else self.text

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """All of them, those in the name first."""
        return (*(word for _, word in _PLACE.findall(self.name)), *self.stacked)

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        parts, stop = [], 0
        for match in _PLACE.finditer(self.name):
            star, word = match.groups()
            kind = ".+" if star else rf"\d{{1,{_MAX_DIGITS}}}" if word in _DIGITS else r"[^.]+"
            parts += [re.escape(self.name[stop : match.start()]), f"(?P<{word}>{kind})"]
            stop = match.end()
        return re.compile("".join(parts) + re.escape(self.name[stop:]))

    def match(self, name: str) -> dict[str, str] | None:
        """The variables of a name; None for one that the pattern does not name."""
        found = self._expression.fullmatch(name)
        return {word: _plain(word, text) for word, text in found.groupdict().items()} if found else None

    def fill(self, values: dict[str, str]) -> str:
        """The name for some variables."""
        return _PLACE.sub(lambda m: values[m[2]], self.name)


def _plain(word: str, text: str) -> str:
    return str(int(text)) if word in _DIGITS else text
