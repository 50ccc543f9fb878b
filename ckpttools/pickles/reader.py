"""Reads a pickle into inert records, on a stack machine of our own: nothing is imported, nothing is called.

Protocols 0 to 5. Python's own values come out as themselves, everything else as `Global`, `Object` or `Persistent`. Bad
input, whatever it is, ends in a `PickleError` that names the byte; lengths are checked against the input before memory is
taken. What a walk over shared references could blow up is limited where values are walked (`containers.trees`).

Source: CPython, Lib/pickletools.py (the meaning of each opcode), 3.13.
"""

from __future__ import annotations

import codecs
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from struct import error as StructError
from struct import unpack_from

from ckpttools.pickles.records import NO_STATE, Global, Object, Persistent
from ckpttools.pickles.table import PLAIN_CALLS

MAX_INPUT_BYTES = 1 << 30
_MAX_DIGITS = 4000
"""Python refuses longer integers in text, because reading them takes quadratic time."""
_MAX_LONG_BYTES = 1 << 16
_MAX_KEY_DEPTH = 8
"""Hashing a deeply nested tuple overflows the C stack and kills the process."""
_LARGE_BYTES = 1 << 20
_KEY_TYPES = frozenset({str, int, float, bool, bytes, type(None), complex, Global, Object, Persistent})


class PickleError(Exception):
    """A pickle that does not parse (`bad-pickle`) or exceeds a limit (`pickle-limit`)."""

    def __init__(self, message: str, *, code: str = "bad-pickle") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Pickled:
    """One pickle, read."""

    value: object
    stop: int
    """The byte after it in the input."""
    protocol: int
    globals: frozenset[Global]
    """Everything that it refers to by name."""


class _Mark:
    __slots__ = ()


_MARK = _Mark()


def read_pickle(data: bytes | memoryview, *, offset: int = 0) -> Pickled:
    """The pickle that starts at `offset`. Pure.

    Raises: PickleError: for every input that is not a pickle, or one beyond the limits.
    """
    data = bytes(data) if not isinstance(data, bytes) else data
    if len(data) - offset > MAX_INPUT_BYTES:
        raise PickleError(f"{len(data) - offset} bytes, more than the limit of {MAX_INPUT_BYTES}", code="pickle-limit")
    machine = _Machine(data, offset)
    try:
        with _collector_paused(len(data) - offset):
            return machine.run()
    except (IndexError, StructError) as e:
        what = "truncated" if machine.position >= len(data) else "the stack or the memo has no such entry"
        raise PickleError(f"{what} at byte {machine.position}: {e}") from e
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, UnicodeError) as e:
        raise PickleError(f"at byte {machine.position}: {e}") from e
    except MemoryError as e:
        raise PickleError(f"out of memory at byte {machine.position}", code="pickle-limit") from e


class _Pause:
    """Counts the threads that read a large pickle; a collector that runs meanwhile made it five times slower."""

    lock = threading.Lock()
    readers = 0
    was_enabled = False


@contextmanager
def _collector_paused(length_bytes: int) -> Iterator[None]:
    if length_bytes < _LARGE_BYTES:
        yield
        return
    with _Pause.lock:
        if _Pause.readers == 0:
            _Pause.was_enabled = gc.isenabled()
            gc.disable()
        _Pause.readers += 1
    try:
        yield
    finally:
        with _Pause.lock:
            _Pause.readers -= 1
            if _Pause.readers == 0 and _Pause.was_enabled:
                gc.enable()


class _Machine:
    """The state of one reading: input, position, stack, memo."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self.position = offset
        self._stack: list[object] = []
        self._memo: list[object] = []
        self._far_memo: dict[int, object] = {}
        """Entries that a writer numbered out of order; a list grown to their number could take all memory."""
        self._globals: dict[tuple[str, str], Global] = {}
        self._protocol = 0

    def run(self) -> Pickled:  # noqa: C901  # one loop over opcodes; the frequent ones stand here, in order of frequency
        """Read to STOP. The opcodes of a DCP manifest (millions) are handled in line, all others by `_rare`."""
        data, stack, memo = self._data, self._stack, self._memo
        i = self.position
        while True:
            op = data[i]
            i += 1
            if op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op == 0x6A:  # LONG_BINGET
                (number,) = unpack_from("<I", data, i)
                i += 4
                stack.append(memo[number] if number < len(memo) else self._far(number, i))
            elif op == 0x68:  # BINGET
                number = data[i]
                i += 1
                stack.append(memo[number] if number < len(memo) else self._far(number, i))
            elif op == 0x4B:  # BININT1
                stack.append(data[i])
                i += 1
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x28:  # MARK
                stack.append(_MARK)
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x81:  # NEWOBJ
                args = stack.pop()
                stack[-1] = self._new(stack[-1], args)
            elif op == 0x62:  # BUILD
                state = stack.pop()
                built = stack[-1]
                if not isinstance(built, Object) or built.state is not NO_STATE:
                    self._refuse(i, "state for something that takes none")
                built.state = state
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif op == 0x75:  # SETITEMS
                items = self._pop_mark()
                self._set_items(stack[-1], items, i)
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                stack[-1] = self._reduce(stack[-1], args)
            elif op == 0x8C:  # SHORT_BINUNICODE
                stop = i + 1 + data[i]
                stack.append(self._text(i + 1, stop))
                i = stop
            elif op == 0x86:  # TUPLE2
                stack[-2:] = [(stack[-2], stack[-1])]
            elif op == 0x4D:  # BININT2
                stack.append(data[i] | data[i + 1] << 8)
                i += 2
            elif op == 0x4A:  # BININT
                stack.append(unpack_from("<i", data, i)[0])
                i += 4
            elif op == 0x71:  # BINPUT
                self._put(data[i], stack[-1], i)
                i += 1
            elif op == 0x58:  # BINUNICODE
                stop = i + 4 + unpack_from("<I", data, i)[0]
                stack.append(self._text(i + 4, stop))
                i = stop
            elif op == 0x74:  # TUPLE
                stack.append(tuple(self._pop_mark()))
            elif op == 0x89:  # NEWFALSE
                stack.append(False)
            elif op == 0x88:  # NEWTRUE
                stack.append(True)
            elif op == 0x4E:  # NONE
                stack.append(None)
            elif op == 0x51:  # BINPERSID
                stack[-1] = Persistent(stack[-1])
            elif op == 0x72:  # LONG_BINPUT
                self._put(unpack_from("<I", data, i)[0], stack[-1], i)
                i += 4
            elif op == 0x2E:  # STOP
                self.position = i
                return self._finish()
            else:
                self.position = i
                _RARE[op](self) if op in _RARE else self._refuse(i, f"an unknown opcode {op:#04x}")
                i = self.position
            self.position = i

    def _finish(self) -> Pickled:
        value = self._stack.pop()
        if self._stack or value is _MARK:
            raise PickleError(f"{len(self._stack)} values left at the end, byte {self.position}")
        return Pickled(value, self.position, self._protocol, frozenset(self._globals.values()))

    def _refuse(self, position: int, what: str, code: str = "bad-pickle") -> None:
        raise PickleError(f"{what} at byte {position}", code=code)

    def _take(self, count: int) -> bytes:
        """The next `count` bytes of the input."""
        start = self.position
        if count < 0 or start + count > len(self._data):
            raise PickleError(f"truncated: {count} bytes announced at byte {start}, {len(self._data) - start} left")
        self.position += count
        return self._data[start : start + count]

    def _line(self) -> bytes:
        stop = self._data.find(b"\n", self.position)
        if stop < 0:
            raise PickleError(f"truncated: no end of line after byte {self.position}")
        line = self._data[self.position : stop]
        self.position = stop + 1
        return line

    def _text(self, start: int, stop: int) -> str:
        if stop > len(self._data):
            raise PickleError(f"truncated: text up to byte {stop}, the input has {len(self._data)}")
        return self._data[start:stop].decode("utf-8", "surrogatepass")

    def _pop_mark(self) -> list[object]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise PickleError(f"no mark on the stack at byte {self.position}")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def _put(self, number: int, value: object, position: int) -> None:
        if number == len(self._memo):
            self._memo.append(value)
        elif number < len(self._memo):
            self._memo[number] = value
        else:
            self._far_memo[number] = value
        if value is _MARK:
            self._refuse(position, "a mark in the memo")

    def _far(self, number: int, position: int) -> object:
        if number not in self._far_memo:
            self._refuse(position, f"memo entry {number} that was never made")
        return self._far_memo[number]

    def _global(self, module: object, name: object) -> Global:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise PickleError(f"a global whose name is no text at byte {self.position}")
        return self._globals.setdefault((module, name), Global(module, name))

    def _reduce(self, callable_: object, args: object) -> object:
        """A call that is not made: the value it means where that is a plain one, else a record of it."""
        if not isinstance(args, tuple):
            raise PickleError(f"arguments that are no tuple at byte {self.position}")
        if isinstance(callable_, Global):
            plain = PLAIN_CALLS.get((callable_.module, callable_.name))
            made = plain(args) if plain is not None and self._are_keys(args) else None
            return Object(callable_, args) if made is None else made
        if not isinstance(callable_, Object):
            raise PickleError(f"a call of something that is no name at byte {self.position}")
        return Object(callable_, args)

    def _are_keys(self, args: tuple[object, ...]) -> bool:
        """Whether what goes into a set can be hashed safely."""
        return all(not isinstance(a, (list, set, frozenset)) or all(_is_key(k, 0) for k in a) for a in args)

    def _new(self, cls: object, args: object) -> Object:
        if not isinstance(cls, (Global, Object)) or not isinstance(args, tuple):
            raise PickleError(f"an object of something that is no class at byte {self.position}")
        return Object(cls, args, "newobj")

    def _set_items(self, target: object, items: list[object], position: int) -> None:
        if len(items) % 2:
            self._refuse(position, "a key without a value")
        if isinstance(target, Object):
            target.pairs = [*target.pairs, *zip(items[::2], items[1::2], strict=True)]
            return
        if not isinstance(target, dict):
            self._refuse(position, f"items for a {type(target).__name__}")
        for k, v in zip(items[::2], items[1::2], strict=True):
            if type(k) is not str and not _is_key(k, 0):
                self._refuse(position, f"a {type(k).__name__} as a key")
            target[k] = v  # type: ignore[index]  # refused above unless it is a dict


def _is_key(value: object, depth: int) -> bool:
    """Whether a value may be hashed: a plain one, a record, or a shallow tuple of these."""
    if type(value) in _KEY_TYPES:
        return True
    return isinstance(value, (tuple, frozenset)) and depth < _MAX_KEY_DEPTH and all(_is_key(v, depth + 1) for v in value)


def _append(machine: _Machine, values: list[object]) -> None:
    target = machine._stack[-1]
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, Object):
        target.items = [*target.items, *values]
    else:
        raise PickleError(f"an item for a {type(target).__name__} at byte {machine.position}")


def _add_items(machine: _Machine) -> None:
    values = machine._pop_mark()
    target = machine._stack[-1]
    if isinstance(target, Object):
        target.items = [*target.items, *values]
    elif isinstance(target, set) and all(_is_key(v, 0) for v in values):
        target.update(values)
    else:
        raise PickleError(f"members for a {type(target).__name__} at byte {machine.position}")


def _frozen_set(machine: _Machine) -> None:
    values = machine._pop_mark()
    if not all(_is_key(v, 0) for v in values):
        raise PickleError(f"a member that cannot be hashed at byte {machine.position}")
    machine._stack.append(frozenset(values))


def _dict(machine: _Machine) -> None:
    items = machine._pop_mark()
    machine._stack.append({})
    machine._set_items(machine._stack[-1], items, machine.position)


def _set_item(machine: _Machine) -> None:
    value, key = machine._stack.pop(), machine._stack.pop()
    machine._set_items(machine._stack[-1], [key, value], machine.position)


def _pop(machine: _Machine) -> None:
    machine._stack.pop()


def _integer(machine: _Machine, line: bytes) -> int:
    if len(line) > _MAX_DIGITS:
        raise PickleError(f"an integer of {len(line)} digits at byte {machine.position}", code="pickle-limit")
    return int(line)


def _int_text(machine: _Machine) -> None:
    line = machine._line()
    known = {b"00": False, b"01": True}
    machine._stack.append(known[line] if line in known else _integer(machine, line))


def _long(machine: _Machine, count: int) -> None:
    if count > _MAX_LONG_BYTES:
        raise PickleError(f"an integer of {count} bytes at byte {machine.position}", code="pickle-limit")
    machine._stack.append(int.from_bytes(machine._take(count), "little", signed=True))


def _number(machine: _Machine, form: str) -> int:
    """A length or a number of the format `form` at the position."""
    (value,) = unpack_from(form, machine._data, machine.position)
    machine.position += {"<B": 1, "<H": 2, "<I": 4, "<i": 4, "<Q": 8}[form]
    return int(value)


def _old_text(machine: _Machine, data: bytes) -> None:
    """A str of Python 2: text where it is UTF-8, else bytes."""
    try:
        machine._stack.append(data.decode())
    except UnicodeDecodeError:
        machine._stack.append(data)


def _quoted_text(machine: _Machine) -> None:
    line = machine._line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise PickleError(f"text without quotes at byte {machine.position}")
    _old_text(machine, codecs.escape_decode(line[1:-1])[0])


def _double(machine: _Machine) -> None:
    machine._stack.append(unpack_from(">d", machine._data, machine.position)[0])
    machine.position += 8


def _protocol(machine: _Machine) -> None:
    machine._protocol = _number(machine, "<B")
    if machine._protocol > 5:
        raise PickleError(f"protocol {machine._protocol} at byte {machine.position}")


def _frame(machine: _Machine) -> None:
    length = _number(machine, "<Q")
    if machine.position + length > len(machine._data):
        raise PickleError(f"truncated: a frame of {length} bytes at byte {machine.position}")


def _stack_global(machine: _Machine) -> None:
    name, module = machine._stack.pop(), machine._stack.pop()
    machine._stack.append(machine._global(module, name))


def _line_global(machine: _Machine) -> None:
    module, name = machine._line().decode(), machine._line().decode()
    machine._stack.append(machine._global(module, name))


def _inst(machine: _Machine) -> None:
    cls = machine._global(machine._line().decode(), machine._line().decode())
    machine._stack.append(Object(cls, tuple(machine._pop_mark()), "inst"))


def _obj(machine: _Machine) -> None:
    cls, *args = machine._pop_mark()
    machine._stack.append(Object(machine._new(cls, ()).callable, tuple(args), "inst"))


def _new_with_keywords(machine: _Machine) -> None:
    kwargs, args = machine._stack.pop(), machine._stack.pop()
    made = machine._new(machine._stack.pop(), args)
    if not isinstance(kwargs, dict):
        raise PickleError(f"keywords that are no dict at byte {machine.position}")
    made.how, made.kwargs = "newobj_ex", kwargs
    machine._stack.append(made)


def _unsupported(machine: _Machine) -> None:
    raise PickleError(f"an extension code or an out-of-band buffer, which no file can have, at byte {machine.position}")


_RARE = {
    ord("a"): lambda m: _append(m, [m._stack.pop()]),
    ord("e"): lambda m: _append(m, m._pop_mark()),
    ord("s"): _set_item,
    ord("]"): lambda m: m._stack.append([]),
    ord("l"): lambda m: m._stack.append(m._pop_mark()),
    ord("d"): _dict,
    ord("0"): _pop,
    ord("1"): lambda m: m._pop_mark(),
    ord("2"): lambda m: m._stack.append(m._stack[-1]),
    0x87: lambda m: m._stack.__setitem__(slice(-3, None), [tuple(m._stack[-3:])]),
    0x8F: lambda m: m._stack.append(set()),
    0x90: _add_items,
    0x91: _frozen_set,
    ord("I"): _int_text,
    ord("L"): lambda m: m._stack.append(_integer(m, m._line().rstrip(b"L"))),
    0x8A: lambda m: _long(m, _number(m, "<B")),
    0x8B: lambda m: _long(m, _number(m, "<I")),
    ord("F"): lambda m: m._stack.append(float(m._line())),
    ord("G"): _double,
    ord("S"): _quoted_text,
    ord("T"): lambda m: _old_text(m, m._take(_number(m, "<i"))),
    ord("U"): lambda m: _old_text(m, m._take(_number(m, "<B"))),
    ord("V"): lambda m: m._stack.append(m._line().decode("raw-unicode-escape")),
    0x8D: lambda m: m._stack.append(m._take(_number(m, "<Q")).decode("utf-8", "surrogatepass")),
    ord("B"): lambda m: m._stack.append(m._take(_number(m, "<I"))),
    ord("C"): lambda m: m._stack.append(m._take(_number(m, "<B"))),
    0x8E: lambda m: m._stack.append(m._take(_number(m, "<Q"))),
    0x96: lambda m: m._stack.append(bytearray(m._take(_number(m, "<Q")))),
    ord("c"): _line_global,
    0x93: _stack_global,
    ord("i"): _inst,
    ord("o"): _obj,
    0x92: _new_with_keywords,
    ord("P"): lambda m: m._stack.append(Persistent(m._line().decode())),
    ord("g"): lambda m: m._stack.append(_get(m, _integer(m, m._line()))),
    ord("p"): lambda m: m._put(_integer(m, m._line()), m._stack[-1], m.position),
    0x80: _protocol,
    0x95: _frame,
    0x82: _unsupported,
    0x83: _unsupported,
    0x84: _unsupported,
    0x97: _unsupported,
    0x98: _unsupported,
}


def _get(machine: _Machine, number: int) -> object:
    return machine._memo[number] if 0 <= number < len(machine._memo) else machine._far(number, machine.position)
