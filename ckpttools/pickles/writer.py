"""Writes plain values and inert records as a pickle that CPython reads as the same graph; nothing recursive.

What `reader` read comes out with the same sharing and cycles, in the same order; members of a set come in an order of
their own. Equal values give equal bytes: texts are memoized by value, everything else by identity. What is to be
written is kept as a stack of tasks, so depth costs memory and not the interpreter's stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import pack

from ckpttools.pickles.limits import bad_pickle, over_limit
from ckpttools.pickles.python2 import modern
from ckpttools.pickles.records import NO_STATE, Global, Object, Persistent, SetBy
from ckpttools.pickles.views import ordered, outline

_BATCH = 1000
"""Items between two marks, as CPython writes them."""

Task = tuple[Callable[..., None], tuple[object, ...]]


def write_pickle(value: object, *, protocol: int = 2, replace: Callable[[object], object | None] | None = None) -> bytes:
    """The pickle of a value. Pure, and deterministic.

    Args: protocol: 2, which torch's restricted loader requires, or 4.
        replace: asked for each value that is no number or text, before it is written: a value to write in its place
            (an `Object` with a `Persistent` in it for a tensor, say), or None to write the value itself.
    Raises: PickleError: for a value that the protocol cannot hold. TypeError: for a type that is no plain value or record.
    """
    if protocol not in (2, 4):
        raise ValueError(f"protocol {protocol} is not written; 2 and 4 are")
    return _Writer(protocol, replace).write(value)


class _Writer:
    def __init__(self, protocol: int, replace: Callable[[object], object | None] | None) -> None:
        self._protocol = protocol
        self._replace = replace
        self._out = bytearray(b"\x80" + bytes([protocol]))
        self._memo: dict[object, int] = {}
        """Text, bytes and names by value, all else by `id`."""
        self._entries = 0
        self._kept: list[object] = []
        """Values made while writing, so that no `id` is used again."""
        self._tasks: list[Task] = []

    def write(self, value: object) -> bytes:
        self._plan([(self._save, (value,))])
        while self._tasks:
            act, arguments = self._tasks.pop()
            act(*arguments)
        return bytes(self._out + b".")

    # the stack of tasks

    def _plan(self, tasks: Iterable[Task]) -> None:
        """Do `tasks` in order, before what was planned earlier."""
        self._tasks.extend(reversed(list(tasks)))

    def _emit(self, data: bytes) -> None:
        self._out += data

    def _saves(self, values: Iterable[object]) -> list[Task]:
        return [(self._save, (value,)) for value in values]

    def _batches(self, units: Sequence[tuple[object, ...]], one: bytes | None, many: bytes) -> list[Task]:
        """Saves units of one or two values each, and lets `many` (`one`, for a single unit) put them in."""
        tasks: list[Task] = []
        for start in range(0, len(units), _BATCH):
            batch = self._saves(value for unit in units[start : start + _BATCH] for value in unit)
            if len(units) - start == 1 and one is not None:
                tasks += [*batch, (self._emit, (one,))]
            else:
                tasks += [(self._emit, (b"(",)), *batch, (self._emit, (many,))]
        return tasks

    # the memo

    def _memoize(self, key: object) -> None:
        """The top of the stack goes into the memo."""
        index = self._memo[key] = self._entries
        self._entries += 1
        if self._protocol >= 4:
            self._out += b"\x94"
        else:
            self._out += b"q" + pack("<B", index) if index < 256 else b"r" + pack("<I", index)

    def _recall(self, key: object) -> None:
        index = self._memo[key]
        self._out += b"h" + pack("<B", index) if index < 256 else b"j" + pack("<I", index)

    def _alias(self, value: object, replacement: object) -> None:
        index = self._memo.get(_memo_key(replacement))
        if index is not None:
            self._memo[_memo_key(value)] = index

    def _keep(self, value: object) -> object:
        self._kept.append(value)
        return value

    # values

    def _save(self, value: object, may_replace: bool = True) -> None:
        scalar = _SCALARS.get(type(value))
        if scalar is not None:
            self._out += scalar(value)
            return
        key = _memo_key(value)
        if key in self._memo:
            self._recall(key)
            return
        if may_replace and self._replace is not None and not isinstance(value, str):
            replacement = self._replace(value)
            if replacement is not None:
                self._keep((value, replacement))
                self._plan([(self._save, (replacement, False)), (self._alias, (value, replacement))])
                return
        save = _SAVES.get(type(value))
        if save is None:
            raise TypeError(f"a {type(value).__name__} is neither a plain value nor a record")
        save(self, value)

    def _save_text(self, value: str) -> None:
        self._emit(self._sized(value.encode("utf-8", "surrogatepass"), b"\x8c", b"X", b"\x8d"))
        self._memoize(value)

    def _save_bytes(self, value: bytes) -> None:
        if self._protocol >= 4:
            self._emit(self._sized(value, b"C", b"B", b"\x8e"))
            self._memoize(value)
        else:
            encoded = Object(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))
            self._plan([*self._makes(encoded), (self._memoize, (value,))])

    def _sized(self, data: bytes, short: bytes, usual: bytes, long: bytes) -> bytes:
        if self._protocol >= 4 and len(data) < 256:
            return short + pack("<B", len(data)) + data
        if len(data) < 1 << 32:
            return usual + pack("<I", len(data)) + data
        if self._protocol < 4:
            raise over_limit(f"a text of {len(data)} bytes, more than protocol {self._protocol} can hold")
        return long + pack("<Q", len(data)) + data

    def _save_list(self, value: list[object]) -> None:
        self._emit(b"]")
        self._memoize(id(value))
        self._plan(self._batches([(item,) for item in value], b"a", b"e"))

    def _save_dict(self, value: dict[object, object]) -> None:
        self._emit(b"}")
        self._memoize(id(value))
        self._plan(self._batches(list(value.items()), b"s", b"u"))

    def _save_tuple(self, value: tuple[object, ...]) -> None:
        if not value:
            self._emit(b")")
            return
        if all(type(item) is int for item in value):  # the ranks of a mesh, in the file of each: not a task for every number
            self._out += (b"(" if len(value) > 3 else b"") + b"".join(map(_SCALARS[int], value))
            self._close_tuple(value)
            return
        mark: list[Task] = [(self._emit, (b"(",))] if len(value) > 3 else []
        self._plan([*mark, *self._saves(value), (self._close_tuple, (value,))])

    def _close_tuple(self, value: tuple[object, ...]) -> None:
        if id(value) in self._memo:  # it contains itself, and was written meanwhile
            self._emit(b"0" * len(value) if len(value) <= 3 else b"1")
            self._recall(id(value))
            return
        self._emit({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t"))
        self._memoize(id(value))

    def _save_set(self, value: set[object]) -> None:
        members = ordered(value)
        if self._protocol >= 4:
            self._emit(b"\x8f")
            self._memoize(id(value))
            self._plan(self._batches([(member,) for member in members], None, b"\x90"))
        else:
            self._plan([*self._makes(Object(_builtin("set"), (members,))), (self._close_made, (value, b"0"))])

    def _save_frozenset(self, value: frozenset[object]) -> None:
        members = ordered(value)
        if self._protocol >= 4:
            self._plan([(self._emit, (b"(",)), *self._saves(members), (self._close_frozenset, (value,))])
        else:
            self._plan([*self._makes(Object(_builtin("frozenset"), (members,))), (self._close_made, (value, b"0"))])

    def _close_frozenset(self, value: frozenset[object]) -> None:
        if id(value) in self._memo:
            self._close_made(value, b"1")
            return
        self._emit(b"\x91")
        self._memoize(id(value))

    def _save_bytearray(self, value: bytearray) -> None:
        made = Object(_builtin("bytearray"), (bytes(value),) if value else ())
        self._plan([*self._makes(made), (self._close_made, (value, b"0"))])

    def _save_complex(self, value: complex) -> None:
        self._plan(self._makes(Object(_builtin("complex"), (value.real, value.imag))))

    # names and objects

    def _save_global(self, value: Global) -> None:
        owner, dot, attribute = value.name.rpartition(".")
        if self._protocol >= 4:
            self._plan([*self._saves(modern(value.module, value.name)), (self._emit, (b"\x93",)), (self._memoize, (value,))])
        elif dot and owner:  # before protocol 4 names have no dots
            reached = Object(_builtin("getattr"), (Global(value.module, owner), attribute))
            self._plan([*self._makes(reached), (self._memoize, (value,))])
        else:
            try:
                line = f"c{value.module}\n{value.name}\n".encode()
            except UnicodeEncodeError as e:
                raise bad_pickle(f"the name `{outline(value)}` has characters that protocol 2 cannot hold") from e
            if line.count(b"\n") != 2:
                raise bad_pickle(f"the name `{outline(value)}` has a line break, which protocol 2 cannot hold")
            self._emit(line)
            self._memoize(value)

    def _save_persistent(self, value: Persistent) -> None:
        self._plan([(self._save, (value.pid,)), (self._emit, (b"Q",))])

    def _save_object(self, value: Object) -> None:
        self._plan([*self._makes(value), (self._close_made, (value, b"0")), (self._fill, (value, value.state))])

    def _makes(self, value: Object) -> list[Task]:
        """Writes the call that makes an object."""
        self._keep(value)
        if value.how == "inst":
            return [(self._emit, (b"(",)), *self._saves([value.callable, *value.args]), (self._emit, (b"o",))]
        if value.how != "newobj_ex":
            opcode = b"\x81" if value.how == "newobj" else b"R"
            return [*self._saves([value.callable, value.args]), (self._emit, (opcode,))]
        kwargs = self._keep(dict(value.kwargs))
        if self._protocol >= 4:
            return [*self._saves([value.callable, value.args, kwargs]), (self._emit, (b"\x92",))]
        maker, args = Global("copy_reg", "__newobj_ex__"), self._keep((value.callable, value.args, kwargs))
        return [*self._saves([maker, args]), (self._emit, (b"R",))]

    def _close_made(self, value: object, drop: bytes) -> None:
        """Memoizes what was made; where it was written meanwhile, because it contains itself, that one is taken."""
        if id(value) in self._memo:
            self._emit(drop)
            self._recall(id(value))
            if isinstance(value, Object):
                self._tasks.pop()  # its `_fill`, which was done then
            return
        self._memoize(id(value))

    def _fill(self, value: Object, state: object) -> None:
        """Writes what is put into an object."""
        tasks = self._batches([(item,) for item in value.items], b"a", b"e")
        tasks += self._batches(value.pairs, b"s", b"u")
        if isinstance(state, SetBy):
            tasks += [(self._save, (state.setter,)), (self._recall, (id(value),)), (self._save, (state.state,))]
            tasks += [(self._emit, (b"\x86R0",))]
        elif state is not NO_STATE:
            tasks += [(self._save, (state,)), (self._emit, (b"b",))]
        self._plan(tasks)


def _builtin(name: str) -> Global:
    """As protocol 2 names it; for protocol 4 the name is translated like all others."""
    return Global("__builtin__", name)


def _memo_key(value: object) -> object:
    return value if type(value) in (str, bytes, Global) else id(value)


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + pack("<B", value)
    if 0 <= value < 1 << 16:
        return b"M" + pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + pack("<i", value)
    length = value.bit_length() // 8 + 1
    data = value.to_bytes(length, "little", signed=True)
    return b"\x8a" + pack("<B", length) + data if length < 256 else b"\x8b" + pack("<i", length) + data


_SCALARS: dict[type, Callable[..., bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _integer,
    float: lambda value: b"G" + pack(">d", value),
}

_SAVES: dict[type, Callable[..., None]] = {
    str: _Writer._save_text,
    bytes: _Writer._save_bytes,
    list: _Writer._save_list,
    dict: _Writer._save_dict,
    tuple: _Writer._save_tuple,
    set: _Writer._save_set,
    frozenset: _Writer._save_frozenset,
    bytearray: _Writer._save_bytearray,
    complex: _Writer._save_complex,
    Global: _Writer._save_global,
    Persistent: _Writer._save_persistent,
    Object: _Writer._save_object,
}
