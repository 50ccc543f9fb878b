"""What the reader refuses: the one exception it raises, and the limits against pickles that are made to harm.

A limit is either far above what any checkpoint holds, or there because Python itself falls over behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpttools.pickles.records import Global, Object, Persistent


class PickleError(Exception):
    """A pickle that does not parse (`bad-pickle`) or exceeds a limit (`pickle-limit`); `code` is that of the finding."""

    def __init__(self, code: str, message: str, position: int | None = None, *, is_cut: bool = False) -> None:
        super().__init__(message if position is None else f"{message} at byte {position}")
        self.code = code
        self.message = message
        self.position = position
        """Byte of the opcode, from the start of the buffer that was given; None where there is none (writing)."""
        self.is_cut = is_cut
        """Whether the buffer ended before the pickle did, so that more bytes could help."""


def bad_pickle(message: str, position: int | None = None, *, is_cut: bool = False) -> PickleError:
    """The error for a pickle that does not parse; `is_cut`: because the buffer ends in the middle of it."""
    return PickleError("bad-pickle", message, position, is_cut=is_cut)


def over_limit(message: str, position: int | None = None) -> PickleError:
    """The error for a pickle that exceeds a limit."""
    return PickleError("pickle-limit", message, position)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one reading."""

    max_bytes: int = 1 << 30
    """Of one pickle. Memory follows from it: what is read takes about 15 times its pickle, a hostile one up to 220 times."""
    max_integer_bytes: int = 1024
    """Of one integer. Python refuses to print those of more than 4300 digits (1785 bytes)."""
    max_key_parts: int = 256
    """Values in a tuple that is a key; its hash is computed anew at each use, two bytes of the pickle each."""
    max_key_depth: int = 8
    """Levels of such a tuple; the interpreter hashes by unguarded recursion, which overflows its stack."""


DEFAULT_LIMITS = Limits()

KEY_TYPES = frozenset({str, int, float, bool, bytes, complex, type(None), Global, Object, Persistent})
"""What can be a key or a member of a set as it stands: hashed in constant time, or (text) once."""


def require_key(key: object, limits: Limits, position: int) -> None:
    """Raises PickleError unless `key` can be hashed, and safely so."""
    todo, parts = [(key, 0)], 0
    while todo:
        value, depth = todo.pop()
        kind = type(value)
        if kind in KEY_TYPES:
            continue
        if not isinstance(value, (tuple, frozenset)):
            raise bad_pickle(f"a key or set member of type {kind.__name__}, which cannot be hashed,", position)
        parts += len(value)
        if parts > limits.max_key_parts or depth >= limits.max_key_depth:
            message = f"a key of more than {limits.max_key_parts} parts or {limits.max_key_depth} levels"
            raise over_limit(message, position)
        todo.extend((part, depth + 1) for part in value)
