"""The stack machine of a pickle: its state, and the opcodes that are rare. The frequent ones are in `reader`.

Every method in `RARE` takes the byte after its opcode and answers with the byte after its operand. The rules are those
of CPython's `pickle.py`; where an opcode would act on something other than data, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

from ckpttools.pickles.limits import KEY_TYPES, Limits, bad_pickle, require_key
from ckpttools.pickles.names import Names
from ckpttools.pickles.operands import Operands, text_of_python2
from ckpttools.pickles.records import NO_STATE, Object, Persistent, SetBy

HIGHEST_PROTOCOL = 5
SAME_KEY_TWICE = "a dict with the same key twice"
"""Refused: no writer does it, and readers would differ in which value they keep."""
_UINT32 = Struct("<I").unpack_from
_UINT64 = Struct("<Q").unpack_from
_FLOAT64 = Struct(">d").unpack_from


class SparseMemo(dict[int, object]):
    """A memo with gaps; the usual one is a list. Both are filled by `append` and read by index."""

    def append(self, value: object) -> None:
        """MEMOIZE: the next index is the number of entries."""
        self[len(self)] = value


class Machine(Operands):
    """The state of one reading."""

    def __init__(self, data: bytes, offset: int, base: int, limits: Limits) -> None:
        super().__init__(data, base, limits)
        self.protocol = 0
        self.frame_stop = 0
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        """The stacks below each MARK."""
        self.memo: list[object] | SparseMemo = []
        self.names = Names(limits, self.end - offset)

    def _pop_mark(self) -> list[object]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    # what opcodes do to values; `reader` uses these, too

    def fill(self, target: object, items: list[object], pos: int) -> None:
        """Puts the keys and values that alternate in `items` into `target`."""
        if len(items) % 2:
            raise bad_pickle("a key without a value", self.base + pos - 1)
        keys, values = items[::2], items[1::2]
        if isinstance(target, Object):
            if not isinstance(target.pairs, list):
                target.pairs = []
            target.pairs.extend(zip(keys, values, strict=True))
            return
        if not isinstance(target, dict):
            raise bad_pickle(f"keys for a {type(target).__name__}", self.base + pos - 1)
        self.require_keys(keys, pos)
        expected = len(target) + len(keys)
        target.update(zip(keys, values, strict=True))
        if len(target) != expected:
            raise bad_pickle(SAME_KEY_TWICE, self.base + pos - 1)

    def require_keys(self, keys: list[object], pos: int) -> None:
        """Raises PickleError unless all can be keys."""
        for key in keys:
            if type(key) not in KEY_TYPES:
                require_key(key, self.limits, self.base + pos - 1)

    def extend(self, target: object, items: list[object], pos: int) -> None:
        """Puts `items`, which is not used elsewhere, at the end of `target`."""
        if type(target) is list:
            target.extend(items)
        elif not isinstance(target, Object):
            raise bad_pickle(f"items for a {type(target).__name__}", self.base + pos - 1)
        elif isinstance(target.items, list):
            target.items.extend(items)
        else:
            target.items = items

    def build(self, target: object, state: object, pos: int) -> None:
        """Gives an object its state."""
        if not isinstance(target, Object):
            raise bad_pickle(f"a state for a {type(target).__name__}", self.base + pos - 1)
        if target.state is not NO_STATE and target.state is not state:  # cycles through arguments do write it twice
            raise bad_pickle("a second state for an object", self.base + pos - 1)
        target.state = state

    def put(self, index: int) -> None:
        """The top of the stack into the memo."""
        value, memo = self.stack[-1], self.memo
        if index == len(memo):
            memo.append(value)
            return
        if index > len(memo) and isinstance(memo, list):  # never a list as long as an index says
            memo = self.memo = SparseMemo(enumerate(memo))
        memo[index] = value

    # opcodes: the pickle itself

    def _proto(self, pos: int) -> int:
        self.protocol = self.data[pos]
        if self.protocol > HIGHEST_PROTOCOL:
            raise bad_pickle(f"protocol {self.protocol}, and {HIGHEST_PROTOCOL} is the highest known,", self.base + pos - 1)
        return pos + 1

    def _frame(self, pos: int) -> int:
        start = self.require(pos, 8)
        if pos - 1 < self.frame_stop:
            raise bad_pickle("a frame inside a frame", self.base + pos - 1)
        self.frame_stop = self.require(start, _UINT64(self.data, pos)[0])
        return start

    def _refuse_extension(self, pos: int) -> int:
        raise bad_pickle("a reference to the extension registry, which only its writer has,", self.base + pos - 1)

    def _refuse_buffer(self, pos: int) -> int:
        raise bad_pickle("a reference to a buffer outside the pickle", self.base + pos - 1)

    # opcodes: stack and memo

    def _pop(self, pos: int) -> int:
        if not self.stack:
            self._pop_mark()
            return pos
        top = self.stack.pop()
        # obj, setter(obj, state), POP is how a reduction's sixth item is written: a state that a function sets
        if isinstance(top, Object) and len(top.args) == 2 and self.stack and top.args[0] is self.stack[-1]:
            target = self.stack[-1]
            if isinstance(target, Object) and target.state is NO_STATE:
                target.state = SetBy(top.callable, top.args[1])
        return pos

    def _pop_to_mark(self, pos: int) -> int:
        self._pop_mark()
        return pos

    def _dup(self, pos: int) -> int:
        self.stack.append(self.stack[-1])
        return pos

    def _put(self, pos: int) -> int:
        index, stop = self.index(pos)
        self.put(index)
        return stop

    def _get(self, pos: int) -> int:
        index, stop = self.index(pos)
        self.stack.append(self.memo[index])
        return stop

    # opcodes: numbers, text and bytes

    def _int(self, pos: int) -> int:
        line, stop = self.line(pos)
        value = {b"00": False, b"01": True}.get(line)
        self.stack.append(self.decimal(pos)[0] if value is None else value)
        return stop

    def _long(self, pos: int) -> int:
        value, stop = self.decimal(pos)
        self.stack.append(value)
        return stop

    def _long4(self, pos: int) -> int:
        start = self.require(pos, 4)
        stop = self.require(start, _UINT32(self.data, pos)[0])
        self.stack.append(self.integer(start, stop))
        return stop

    def _float(self, pos: int) -> int:
        line, stop = self.line(pos)
        self.stack.append(float(line.decode("ascii")))
        return stop

    def _binfloat(self, pos: int) -> int:
        self.stack.append(_FLOAT64(self.data, pos)[0])
        return pos + 8

    def _string(self, pos: int) -> int:
        value, stop = self.quoted(pos)
        self.stack.append(value)
        return stop

    def _binstring(self, pos: int) -> int:
        data, stop = self.sized(pos, 4)
        self.stack.append(text_of_python2(data))
        return stop

    def _short_binstring(self, pos: int) -> int:
        data, stop = self.sized(pos, 1)
        self.stack.append(text_of_python2(data))
        return stop

    def _unicode(self, pos: int) -> int:
        line, stop = self.line(pos)
        self.stack.append(line.decode("raw-unicode-escape"))
        return stop

    def _binunicode8(self, pos: int) -> int:
        data, stop = self.sized(pos, 8)
        self.stack.append(data.decode("utf-8", "surrogatepass"))
        return stop

    def _short_binbytes(self, pos: int) -> int:
        data, stop = self.sized(pos, 1)
        self.stack.append(data)
        return stop

    def _binbytes(self, pos: int) -> int:
        data, stop = self.sized(pos, 4)
        self.stack.append(data)
        return stop

    def _binbytes8(self, pos: int) -> int:
        data, stop = self.sized(pos, 8)
        self.stack.append(data)
        return stop

    def _bytearray8(self, pos: int) -> int:
        data, stop = self.sized(pos, 8)
        self.stack.append(bytearray(data))
        return stop

    # opcodes: containers

    def _list(self, pos: int) -> int:
        items = self._pop_mark()
        self.stack.append(items)
        return pos

    def _dict(self, pos: int) -> int:
        items = self._pop_mark()
        target: dict[object, object] = {}
        self.fill(target, items, pos)
        self.stack.append(target)
        return pos

    def _setitem(self, pos: int) -> int:
        value, key = self.stack.pop(), self.stack.pop()
        self.fill(self.stack[-1], [key, value], pos)
        return pos

    def _empty_set(self, pos: int) -> int:
        self.stack.append(set())
        return pos

    def _additems(self, pos: int) -> int:
        items = self._pop_mark()
        target = self.stack[-1]
        if type(target) is set:
            self.require_keys(items, pos)
            target.update(items)
        else:
            self.extend(target, items, pos)
        return pos

    def _frozenset(self, pos: int) -> int:
        items = self._pop_mark()
        self.require_keys(items, pos)
        self.stack.append(frozenset(items))
        return pos

    # opcodes: names and objects

    def _global(self, pos: int) -> int:
        module, middle = self.line(pos)
        name, stop = self.line(middle)
        self.stack.append(self.names.find(module.decode("utf-8"), name.decode("utf-8"), self.base + pos))
        return stop

    def _stack_global(self, pos: int) -> int:
        name = self.stack.pop()
        self.stack[-1] = self.names.find(self.stack[-1], name, self.base + pos - 1)
        return pos

    def _inst(self, pos: int) -> int:
        args = self._pop_mark()
        stop = self._global(pos)
        self.stack[-1] = Object(self.stack[-1], tuple(args), "inst")
        return stop

    def _obj(self, pos: int) -> int:
        cls, *args = self._pop_mark() or [None]
        self.names.require_callable(cls, self.base + pos - 1)
        self.stack.append(Object(cls, tuple(args), "inst"))
        return pos

    def _newobj_ex(self, pos: int) -> int:
        kwargs, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.names.require_callable(cls, self.base + pos - 1)
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise bad_pickle("arguments that are not a tuple and a dict", self.base + pos - 1)
        self.stack.append(Object(cls, args, "newobj_ex", kwargs))
        return pos

    def _persid(self, pos: int) -> int:
        line, stop = self.line(pos)
        self.stack.append(Persistent(line.decode("ascii")))
        return stop


RARE: dict[int, Callable[[Machine, int], int]] = {
    0x30: Machine._pop,
    0x31: Machine._pop_to_mark,
    0x32: Machine._dup,
    0x42: Machine._binbytes,
    0x43: Machine._short_binbytes,
    0x46: Machine._float,
    0x47: Machine._binfloat,
    0x49: Machine._int,
    0x4C: Machine._long,
    0x50: Machine._persid,
    0x53: Machine._string,
    0x54: Machine._binstring,
    0x55: Machine._short_binstring,
    0x56: Machine._unicode,
    0x63: Machine._global,
    0x64: Machine._dict,
    0x67: Machine._get,
    0x69: Machine._inst,
    0x6C: Machine._list,
    0x6F: Machine._obj,
    0x70: Machine._put,
    0x73: Machine._setitem,
    0x80: Machine._proto,
    0x82: Machine._refuse_extension,
    0x83: Machine._refuse_extension,
    0x84: Machine._refuse_extension,
    0x8B: Machine._long4,
    0x8D: Machine._binunicode8,
    0x8E: Machine._binbytes8,
    0x8F: Machine._empty_set,
    0x90: Machine._additems,
    0x91: Machine._frozenset,
    0x92: Machine._newobj_ex,
    0x93: Machine._stack_global,
    0x95: Machine._frame,
    0x96: Machine._bytearray8,
    0x97: Machine._refuse_buffer,
    0x98: Machine._refuse_buffer,
}
"""By opcode."""
