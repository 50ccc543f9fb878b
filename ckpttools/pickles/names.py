"""The names that a pickle refers to, and what a call of one comes to while reading: an inert `Object`, or a plain value.

Names are collected to be judged (see `table`), so what `getattr` reaches counts as a name, too: as a longer one where
it is an attribute of a name (enum members and nested classes are written so), and where it is anything else, as
`getattr(...)`, which the table calls unsafe, since it can reach any code.
"""

from __future__ import annotations

from ckpttools.pickles.calls import PLAIN_CALLS, PlainCall
from ckpttools.pickles.limits import Limits, bad_pickle, over_limit
from ckpttools.pickles.records import Global, Object, Persistent

_GETATTR = {("builtins", "getattr"), ("__builtin__", "getattr")}
_MAX_REACHED_CHARS = 1000


class Names:
    """The names of one pickle."""

    def __init__(self, limits: Limits, copy_budget: int) -> None:
        self._limits = limits
        self._copy_budget = copy_budget
        """Values that plain calls may still copy: a sound pickle spells out each value that it copies."""
        self._by_parts: dict[tuple[str, str], Global] = {}
        self.special: dict[int, PlainCall | None] = {}
        """By id, the names whose call may come to more than an `Object`; None for `getattr`."""
        self._reached: dict[int, tuple[Object, Global]] = {}
        """By id, calls of `getattr` on a name, and the name they come to."""

    def all(self) -> frozenset[Global]:
        """Every name referred to so far."""
        return frozenset(self._by_parts.values())

    def find(self, module: object, name: object, position: int) -> Global:
        """The record for a name, always the same one."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise bad_pickle("a name that is not text", position)
        found = self._by_parts.get((module, name))
        if found is None:
            found = self._by_parts[module, name] = Global(module, name)
            if (module, name) in _GETATTR or (module, name) in PLAIN_CALLS:
                self.special[id(found)] = PLAIN_CALLS.get((module, name))
        return found

    def call(self, called: Global, args: tuple[object, ...], position: int) -> object:
        """What a call of a name in `special` comes to."""
        plain = self.special[id(called)]
        if plain is None:
            return self._getattr(called, args, position)
        for arg in args:
            self._copy_budget -= len(arg) if isinstance(arg, (str, bytes, list, tuple)) else 1
        if self._copy_budget < 0:
            raise over_limit("values that are copied again and again", position)
        value = plain(args, self._limits, position)
        return Object(called, args) if value is NotImplemented else value

    def _getattr(self, called: Global, args: tuple[object, ...], position: int) -> Object:
        value = Object(called, args)
        owner, attribute = args if len(args) == 2 else (None, None)
        if isinstance(owner, Object) and id(owner) in self._reached:
            owner = self._reached[id(owner)][1]
        if isinstance(owner, Global) and isinstance(attribute, str) and len(owner.name) < _MAX_REACHED_CHARS:
            self._reached[id(value)] = (value, self.find(owner.module, f"{owner.name}.{attribute}", position))
        else:
            self.find("builtins", "getattr(...)", position)
        return value

    def require_callable(self, called: object, position: int) -> None:
        """For what is called and is no name: the result of an unknown call is noted like a name, as `call(...)`."""
        if isinstance(called, Object):
            if id(called) not in self._reached:
                self.find("builtins", "call(...)", position)
        elif not isinstance(called, (Global, Persistent)):
            raise bad_pickle(f"a call of a {type(called).__name__}", position)
