"""What a pickle is read into: Python's own plain values, and three inert records for everything else.

Nothing here is ever called or imported; a `Global` is two strings. Records compare and hash by identity (but `Global`,
which is a value), so they can be keys of a dict as the pickled objects were. Their `repr` is short whatever they hold:
a record in a message must not be able to fill it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType


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

_NO_KWARGS: Mapping[object, object] = MappingProxyType({})


@dataclass(slots=True, eq=False, repr=False)
class Object:
    """An object that a pickle would build: what would be called with what, and what would be put into the result.

    The defaults are shared and immutable, because a manifest has millions of these and most have only arguments and
    a state; who fills `items` or `pairs` puts a list there.
    """

    callable: object
    """Usually a `Global`; an `Object` where a pickle calls the result of a call, a `Persistent` for a stored class."""
    args: tuple[object, ...]
    how: str = "reduce"
    """`reduce` (callable(*args)), `newobj` (cls.__new__), `newobj_ex` (with keywords) or `inst` (protocol 0 and 1)."""
    kwargs: Mapping[object, object] = field(default_factory=lambda: _NO_KWARGS)
    """Keyword arguments; `newobj_ex` alone has them."""
    state: object = NO_STATE
    """The argument of BUILD, or a `SetBy`."""
    items: Sequence[object] = ()
    """What APPEND, APPENDS and ADDITEMS put in."""
    pairs: Sequence[tuple[object, object]] = ()
    """What SETITEM and SETITEMS put in."""

    @property
    def type_name(self) -> str:
        """`module.name` of what would be called."""
        called: object = self
        calls = 0
        while isinstance(called, Object):  # a loop: calls of calls may be nested as deeply as the pickle is long
            called = called.callable
            calls += 1
        return str(called if isinstance(called, Global) else type_name(called)) + "(...)" * min(calls - 1, 3)

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


@dataclass(slots=True, eq=False, repr=False)
class Persistent:
    """A persistent id: in torch files the reference to a storage."""

    pid: object

    def __repr__(self) -> str:
        return "<persistent id>"


@dataclass(slots=True, eq=False, repr=False)
class SetBy:
    """A state that a function of the object's own choice sets, instead of BUILD (since Python 3.8)."""

    setter: object
    state: object

    def __repr__(self) -> str:
        return "<state with a setter>"


def type_name(value: object) -> str:
    """What a value is, for people: `int`, `dict`, `argparse.Namespace`. Pure."""
    if isinstance(value, Object):
        return value.type_name
    if isinstance(value, Global):
        return f"global {value}"
    if isinstance(value, Persistent):
        return "persistent id"
    return type(value).__name__
