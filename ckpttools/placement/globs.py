"""Patterns for tensor names, and names without what wrappers put into them.

`*` stands for any run of characters but dots, `**` for any run at all, `?` for one character that is no dot, `[abc]` and
`[!abc]` for one of a set. A pattern names a tensor whose name ends with it, from a dot on or as a whole, so whatever stands
in front of a model's own names (`model.`, `module.`, `base_model.model.`) does not matter; `^` in front ties it to the
beginning. `{layer}` and `{expert}` stand for a number that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "base_layer"})
"""Parts of names that torch.compile, FSDP, activation checkpointing, Lightning and PEFT put in between."""
_WRAPPER = re.compile("|".join(sorted(WRAPPERS)))
PLACEHOLDERS = ("layer", "expert")
_MAX_LENGTH = 400
_MAX_NAME = 1000
_MAX_OPEN = 4
"""How often `**` may stand in a pattern: each doubles the ways in which a name can be tried."""
_TOKEN = re.compile(r"\*+|\?|\[!?\]?[^\]]*\]|\{[^}]*\}|[^*?\[\]{}^]+")
_LETTERS = re.compile(r"\[[^]!0-9-]+\]")
"""A set that no digit is in."""
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


def unwrapped(name: str) -> str:
    """A dotted name without the parts that wrappers put into it. Pure."""
    if not _WRAPPER.search(name):
        return name
    kept = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(kept) if kept else name


def told_by(name: str) -> str:
    """What of a name is looked at: it without wrappers, and no more than its end, for trying a pattern takes time that grows
    with the square of a name's length, and names are untrusted. Pure."""
    return unwrapped(name[-_MAX_NAME:])


def skeleton(name: str) -> str:
    """A dotted name with 0 for each part that is a number: equal for the same tensor of every layer. Pure."""
    return _NUMBER.sub("0", name)


def tells_numbers_apart(glob: str) -> bool:
    """Whether a pattern may match a name and not another one with the same `skeleton`. Pure."""
    for part in _LETTERS.sub("x", glob).split("."):
        is_any = part in ("*", "**") or part.startswith("{")
        if not is_any and (not re.search(r"[^\W\d]", part) or ("**" in part and re.search(r"[0-9?\[]", part))):
            return True
    return False


def parse_glob(glob: str) -> str:
    """The regular expression that a whole name must match. Pure. Raises ValueError, saying why, for what is no pattern."""
    body = glob.removeprefix("^")
    if not body or len(glob) > _MAX_LENGTH or re.search(r"\s", glob):
        raise ValueError(f"a pattern has 1 to {_MAX_LENGTH} characters and no spaces")
    if body.count("**") > _MAX_OPEN:
        raise ValueError(f"a pattern has at most {_MAX_OPEN} `**`")
    at, found, placeholders = 0, [], []
    while at < len(body):
        token = _TOKEN.match(body, at)
        if token is None:
            raise ValueError(f"`{body[at]}` at character {at + 1 + len(glob) - len(body)} closes or opens nothing")
        if token[0].startswith("{"):
            placeholders.append(token[0])
        found.append(_expression(token[0]))
        at = token.end()
    if len(set(placeholders)) != len(placeholders):
        raise ValueError(f"{placeholders[0]} stands there twice")
    start = "" if glob.startswith(("^", "**")) else r"(?:.*?\.)??"
    return start + "".join(found)


def _expression(token: str) -> str:
    """The regular expression of one token of a pattern."""
    if token.startswith("*"):
        if len(token) > 2:
            raise ValueError(f"`{token}` is neither `*` nor `**`")
        return ".*" if token == "**" else "[^.]*"
    if token == "?":
        return "[^.]"
    if token.startswith("{"):
        if token[1:-1] not in PLACEHOLDERS:
            raise ValueError(f"`{token}` is not one of {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}")
        return f"(?P<{token[1:-1]}>[0-9]{{1,9}})"
    if token.startswith("["):
        return _set_of(token)
    return re.escape(token)


def _set_of(token: str) -> str:
    """The regular expression of `[abc]` or `[!abc]`."""
    is_negated = token.startswith("[!")
    members = token[2 if is_negated else 1 : -1]
    if not members:
        raise ValueError(f"`{token}` is a set of nothing")
    # a hyphen between two members is a range, as in a shell
    inner = "".join("-" if c == "-" and 0 < i < len(members) - 1 else re.escape(c) for i, c in enumerate(members))
    expression = f"[{'^' if is_negated else ''}{inner}]"
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"`{token}` is not a set: {error.msg}") from error
    return expression


def compile_globs(globs: Iterable[str]) -> re.Pattern[str]:
    """One expression for names that any of the patterns matches; without patterns it matches nothing. Pure."""
    return re.compile("|".join(f"(?:{parse_glob(glob)})" for glob in globs) or r"(?!)", re.DOTALL)


def exact_glob(name: str) -> str:
    """The pattern that matches one name and no other. Pure."""
    return "^" + re.sub(r"[*?\[\]{}^\s]", lambda match: "?" if match[0].isspace() else f"[{match[0]}]", name)
