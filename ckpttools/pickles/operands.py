"""The operands of a pickle's opcodes: bytes, lengths, lines, integers, and the texts of Python 2.

Every length is checked against what is left before anything of it is made.
"""

from __future__ import annotations

import re

from ckpttools.pickles.limits import Limits, bad_pickle, over_limit

_DECIMAL = re.compile(rb"[+-]?[0-9]+L?")
_MAX_INDEX_DIGITS = 20
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v", b"\n": b""}


class Operands:
    """Reads operands of one pickle; positions are in `data`, and `base` more in messages."""

    def __init__(self, data: bytes, base: int, limits: Limits) -> None:
        self.data = data
        self.base = base
        """Where `data` starts in the caller's buffer."""
        self.end = len(data)
        self.limits = limits

    def require(self, pos: int, length: int) -> int:
        """The byte after an operand of `length` bytes, which must be there."""
        if length > self.end - pos:
            raise bad_pickle(f"an operand of {length} bytes goes past the end", self.base + pos, is_cut=True)
        return pos + length

    def line(self, pos: int) -> tuple[bytes, int]:
        """The bytes up to a newline, and the byte after it."""
        stop = self.data.find(b"\n", pos)
        if stop < 0:
            raise bad_pickle("a text operand goes past the end", self.base + pos, is_cut=True)
        return self.data[pos:stop], stop + 1

    def sized(self, pos: int, width: int) -> tuple[bytes, int]:
        """The bytes behind their length (little-endian, `width` bytes), and the byte after them."""
        start = self.require(pos, width)
        stop = self.require(start, int.from_bytes(self.data[pos:start], "little"))
        return self.data[start:stop], stop

    def decimal(self, pos: int) -> tuple[int, int]:
        """An integer on a line, and the byte after the line."""
        digits, stop = self.line(pos)
        if len(digits) > self.limits.max_integer_bytes * 2:
            raise over_limit(f"an integer of {len(digits)} digits", self.base + pos)
        if not _DECIMAL.fullmatch(digits):
            raise bad_pickle(f"`{digits[:20].decode('latin-1')}` is not an integer", self.base + pos)
        return int(digits.rstrip(b"L")), stop

    def index(self, pos: int) -> tuple[int, int]:
        """A memo index on a line, and the byte after the line."""
        line, stop = self.line(pos)
        if not (line.isdigit() and len(line) <= _MAX_INDEX_DIGITS):
            raise bad_pickle("a memo index that is not a number", self.base + pos - 1)
        return int(line), stop

    def integer(self, pos: int, stop: int) -> int:
        """A little-endian two's complement integer of any length."""
        if stop - pos > self.limits.max_integer_bytes:
            raise over_limit(f"an integer of {stop - pos} bytes", self.base + pos)
        return int.from_bytes(self.data[pos:stop], "little", signed=True)

    def quoted(self, pos: int) -> tuple[str | bytes, int]:
        """A string as Python 2 printed it, and the byte after its line."""
        line, stop = self.line(pos)
        if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
            raise bad_pickle("a string without its quotes", self.base + pos)
        return text_of_python2(_ESCAPE.sub(_unescaped, line[1:-1])), stop


def _unescaped(match: re.Match[bytes]) -> bytes:
    hexadecimal, octal, letter = match.groups()
    if letter is not None:
        return _ESCAPED.get(letter, letter if letter in b"\\'\"" else b"\\" + letter)
    return bytes([int(hexadecimal, 16) if hexadecimal else int(octal, 8) & 0xFF])


def text_of_python2(data: bytes) -> str | bytes:
    """Python 2 did not tell text from bytes: text where it is UTF-8 (as torch.load has it), else bytes. Pure."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data
