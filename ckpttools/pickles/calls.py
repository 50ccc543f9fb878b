"""Calls of Python's own value types that older protocols write for lack of an opcode, read as the values they make.

Keyed on the names alone: each function here is ours, looks at the arguments and answers with a plain value, or with
`NotImplemented`, and then the call stays an inert `Object`.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpttools.pickles.limits import KEY_TYPES, Limits, require_key

PlainCall = Callable[[tuple[object, ...], Limits, int], object]


def _encoded(args: tuple[object, ...], _limits: Limits, _position: int) -> object:
    """`_codecs.encode(text, "latin1")`: bytes under protocols 0 to 2."""
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        try:
            return args[0].encode("latin-1")
        except UnicodeEncodeError:
            return NotImplemented
    return NotImplemented


def _bytes(args: tuple[object, ...], _limits: Limits, _position: int) -> object:
    """`bytes()`: the empty bytes under protocols 0 to 2."""
    return b"" if not args else NotImplemented


def _bytearray(args: tuple[object, ...], limits: Limits, position: int) -> object:
    """`bytearray()`, `bytearray(bytes)` or `bytearray(text, "latin-1")`."""
    if not args:
        return bytearray()
    data = args[0] if len(args) == 1 else _encoded(args, limits, position)
    return bytearray(data) if type(data) is bytes else NotImplemented


def _complex(args: tuple[object, ...], _limits: Limits, _position: int) -> object:
    """`complex(real, imaginary)`."""
    if len(args) == 2 and type(args[0]) is float and type(args[1]) is float:
        return complex(args[0], args[1])
    return NotImplemented


def _members(args: tuple[object, ...], limits: Limits, position: int) -> list[object] | None:
    if not args:
        return []
    if len(args) != 1 or not isinstance(args[0], (list, tuple)):
        return None
    for member in args[0]:
        if type(member) not in KEY_TYPES:
            require_key(member, limits, position)
    return list(args[0])


def _set(args: tuple[object, ...], limits: Limits, position: int) -> object:
    """`set([...])` under protocols 0 to 3."""
    members = _members(args, limits, position)
    return NotImplemented if members is None else set(members)


def _frozenset(args: tuple[object, ...], limits: Limits, position: int) -> object:
    """`frozenset([...])` under protocols 0 to 3."""
    members = _members(args, limits, position)
    return NotImplemented if members is None else frozenset(members)


_BUILTINS: dict[str, PlainCall] = {
    "bytes": _bytes,
    "bytearray": _bytearray,
    "complex": _complex,
    "set": _set,
    "frozenset": _frozenset,
}

PLAIN_CALLS: dict[tuple[str, str], PlainCall] = {
    ("_codecs", "encode"): _encoded,
    **{(module, name): call for module in ("builtins", "__builtin__") for name, call in _BUILTINS.items()},
}
"""By module and name."""
