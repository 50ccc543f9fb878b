"""Strict JSON, for manifests and headers that strangers wrote.

Python's own parser keeps the last of two equal keys, takes `NaN`, turns `1e999` into infinity, lets half of a surrogate
pair through and answers deep nesting with a RecursionError. Each of these is an error here. Read `parse_json` first;
`parse_json_noting_duplicates` is for headers, where what stands beside a repeated key is still worth checking.
"""

from __future__ import annotations

import json
from collections import Counter
from math import isinf

_MAX_DIGITS = 400  # far more than any count or size needs; int() of a long text takes quadratic time
_MAX_SHOWN = 200


class JsonError(ValueError):
    """Bytes that are not strict JSON."""

    def __init__(self, message: str, *, position: int | None = None, key: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.position = position
        """Byte of the input, where it is known."""
        self.key = key
        """The repeated key, when that is what is wrong."""


def parse_json(data: bytes, *, max_depth: int = 32) -> object:
    """The value of a JSON text in UTF-8. Pure.

    Args:    max_depth: how many arrays and objects may stand inside one another
    Raises:  JsonError: when it is not strict JSON, repeats a key or nests too deeply.
    """
    value, duplicates = parse_json_noting_duplicates(data, max_depth=max_depth)
    if duplicates:
        key = duplicates[0]
        raise JsonError(f"the key `{shown(key)}` stands twice", position=_second_place(data, key), key=key)
    return value


def parse_json_noting_duplicates(data: bytes, *, max_depth: int = 32) -> tuple[object, tuple[str, ...]]:
    """As `parse_json`, but repeated keys are returned (each once, in order) and the last value of each is kept. Pure."""
    duplicates: dict[str, None] = {}

    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        built = dict(pairs)
        if len(built) != len(pairs):
            duplicates.update((key, None) for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        return built

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise JsonError("not UTF-8", position=e.start) from e
    try:
        value: object = json.loads(
            text, object_pairs_hook=build, parse_int=_bounded_int, parse_float=_finite_float, parse_constant=_refuse_constant
        )
    except RecursionError as e:
        raise JsonError(f"nested more than {max_depth} deep") from e
    except json.JSONDecodeError as e:
        raise JsonError(e.msg[:1].lower() + e.msg[1:], position=len(text[: e.pos].encode())) from e
    _require_shallow(value, max_depth, check_text=b"\\ud" in data.lower())
    return value, tuple(duplicates)


def shown(text: str) -> str:
    """A name for a message: cut when it is too long to be read. Pure."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _bounded_int(text: str) -> int | float:
    if len(text) > _MAX_DIGITS:
        raise JsonError(f"a number of {len(text)} digits")
    return int(text) if text != "-0" else -0.0  # no integer, and no count for other parsers either


def _finite_float(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise JsonError(f"a number that no float holds: {shown(text)}")
    return value


def _refuse_constant(text: str) -> object:
    raise JsonError(f"{text} is not JSON")


def _require_shallow(value: object, max_depth: int, *, check_text: bool) -> None:
    """Raises when containers stand more than `max_depth` deep; on request also for half characters in any text.

    Level by level in comprehensions: a header of 200,000 tensors has 600,000 containers.
    """
    level: list[object] = [value]
    for _ in range(max_depth):
        if check_text:
            _require_whole_characters(level)
        level = [
            child
            for container in level
            if isinstance(container, (dict, list))
            for child in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return
    if any(isinstance(item, (dict, list)) for item in level):
        raise JsonError(f"nested more than {max_depth} deep")
    if check_text:
        _require_whole_characters(level)


def _require_whole_characters(level: list[object]) -> None:
    """Half a surrogate pair is no character: such a name can be neither printed nor written again."""
    for item in level:
        for text in item if isinstance(item, dict) else (item,):
            if isinstance(text, str):
                try:
                    text.encode()
                except UnicodeEncodeError as e:
                    raise JsonError(f"half a surrogate pair in {text.encode('ascii', 'backslashreplace')!r}") from e


def _second_place(data: bytes, key: str) -> int | None:
    """Byte of the second time that `key` stands in quotes, when it is not spelled with escapes."""
    quoted = json.dumps(key, ensure_ascii=False).encode("utf-8", "surrogatepass")
    first = data.find(quoted)
    second = data.find(quoted, first + 1) if first >= 0 else -1
    return second if second >= 0 else None
