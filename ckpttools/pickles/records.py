"""What a pickle is read into: Python's own plain values, and three inert records for everything else.

Nothing here is ever called or imported; a `Global` is two strings. Records compare and hash by identity (but `Global`,
which is a value), so they can be keys of a dict as the pickled objects were.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle refers to: a class, a function, a dtype. Two strings, never resolved."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _NoState:
    __slots__ = ()

    def __repr__(self) -> str:
        return "NO_STATE"


NO_STATE = _NoState()
"""Stands for "no BUILD opcode", since None is a state of its own."""


@dataclass(slots=True, eq=False)
class Object:
    """An object that a pickle would build: what would be called with what, and what would be put into the result."""

    callable: object
    """Usually a `Global`; an `Object` where a pickle calls the result of a call."""
    args: tuple[object, ...]
    how: str = "reduce"
    """`reduce` (callable(*args)), `newobj` (cls.__new__), `newobj_ex` (with keywords) or `inst` (protocol 0 and 1)."""
    kwargs: dict[object, object] = field(default_factory=dict)
    """Keyword arguments; `newobj_ex` alone has them."""
    state: object = NO_STATE
    """The argument of BUILD."""
    items: list[object] = field(default_factory=list)
    """What APPEND, APPENDS and ADDITEMS put in."""
    pairs: list[tuple[object, object]] = field(default_factory=list)
    """What SETITEM and SETITEMS put in."""

    @property
    def type_name(self) -> str:
        """`module.name` of what would be called."""
        return str(self.callable) if isinstance(self.callable, Global) else f"{type_name(self.callable)}(...)"


@dataclass(slots=True, eq=False)
class Persistent:
    """A persistent id: in torch files the reference to a storage."""

    pid: object


def type_name(value: object) -> str:
    """What a value is, for people: `int`, `dict`, `argparse.Namespace`. Pure."""
    if isinstance(value, Object):
        return value.type_name
    if isinstance(value, Global):
        return f"global {value}"
    if isinstance(value, Persistent):
        return "persistent id"
    return type(value).__name__
