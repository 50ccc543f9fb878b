"""Reads pickles of protocols 0 to 5 into inert records, in one pass over the bytes; nothing is imported or called.

Here are the entry, `read_pickle`, and the loop over the opcodes that manifests and state dicts consist of; `machine`
has the other opcodes. A manifest of a large job holds tens of millions of opcodes, so the loop is one function.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from threading import Lock

from ckpttools.pickles.limits import DEFAULT_LIMITS, KEY_TYPES, Limits, PickleError, bad_pickle, over_limit, require_key
from ckpttools.pickles.machine import RARE, SAME_KEY_TWICE, Machine
from ckpttools.pickles.records import NO_STATE, Global, Object, Persistent

__all__ = ["DEFAULT_LIMITS", "Limits", "PickleError", "Pickled", "read_pickle"]

_INT32 = Struct("<i").unpack_from
_UINT32 = Struct("<I").unpack_from

# Two runs of opcodes make up most of a manifest, so they are taken in one step.
_REDUCED = b"\x94\x85\x94R\x94"
"""After a tuple: MEMOIZE TUPLE1 MEMOIZE REDUCE MEMOIZE, as in every torch.Size."""
_MADE_WITH_STATE = b"\x81\x94}\x94("
"""After EMPTY_TUPLE: NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK, as in every object with attributes."""

_PAST_THE_END = "index out of range"
"""What Python says when `bytes` end; for the stack and the memo, which are lists, it says something else."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """What one pickle holds."""

    value: object
    """Plain values, and `Object`, `Global` and `Persistent` for everything else."""
    stop: int
    """The byte after it in the buffer, where the next one may start."""
    protocol: int
    """As declared; 0 where nothing is."""
    globals: frozenset[Global]
    """Every name that it refers to, and those that it reaches by `getattr`, for `table.judge`."""


def read_pickle(data: bytes | memoryview, *, offset: int = 0, limits: Limits = DEFAULT_LIMITS) -> Pickled:
    """The pickle that starts at byte `offset`. Pure; what follows its end is not looked at.

    Raises: PickleError: when it does not parse or exceeds a limit; whatever the bytes are, no other exception escapes.
    """
    base = 0
    is_cut = len(data) - offset > limits.max_bytes
    if is_cut or not isinstance(data, bytes):
        data, base, offset = bytes(data[offset : offset + limits.max_bytes]), offset, 0
    machine = Machine(data, offset, base, limits)
    with _collector_paused():
        try:
            value, stop = _run(machine, offset)
        except PickleError as e:
            if is_cut and e.code == "bad-pickle":
                raise over_limit(f"a pickle of more than {limits.max_bytes} bytes, or: {e.message}", e.position) from e
            raise
    return Pickled(value, base + stop, machine.protocol, machine.names.all())


_pause_lock = Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without the cycle collector, which would walk millions of new records again and again for nothing (3 times slower).

    It is one for the process, so readings in several threads count, and the last one to end turns it on again.
    """
    global _pauses, _was_enabled
    with _pause_lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _pause_lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


def _run(machine: Machine, pos: int) -> tuple[object, int]:  # noqa: C901  # a call per opcode would triple the time
    """The value, and the byte after STOP. The order of the branches is that of how often real manifests take them."""
    data, end, base, limits = machine.data, machine.end, machine.base, machine.limits
    stack, marks, memo, names = machine.stack, machine.marks, machine.memo, machine.names
    special = names.special
    op = 0
    try:
        while True:
            op = data[pos]
            pos += 1
            if op == 0x6A:  # LONG_BINGET
                stack.append(memo[_UINT32(data, pos)[0]])
                pos += 4
            elif op == 0x68:  # BINGET
                stack.append(memo[data[pos]])
                pos += 1
            elif op == 0x4B:  # BININT1
                stack.append(data[pos])
                pos += 1
            elif op == 0x4D:  # BININT2
                stack.append(data[pos] | data[pos + 1] << 8)
                pos += 2
            elif op == 0x75:  # SETITEMS
                pairs, stack = stack, marks.pop()
                target = stack[-1]
                if type(target) is dict and not len(pairs) & 1:
                    expected = len(target) + len(pairs) // 2
                    rest = iter(pairs)
                    for key in rest:
                        if type(key) is not str and type(key) not in KEY_TYPES:
                            require_key(key, limits, base + pos - 1)
                        target[key] = next(rest)
                    if len(target) != expected:
                        raise bad_pickle(SAME_KEY_TWICE, base + pos - 1)
                else:
                    machine.fill(target, pairs, pos)
            elif op == 0x29:  # EMPTY_TUPLE
                if data.startswith(_MADE_WITH_STATE, pos) and type(stack[-1]) is Global:
                    stack[-1] = made = Object(stack[-1], (), "newobj")
                    state: dict[object, object] = {}
                    stack.append(state)
                    memo.append(made)
                    memo.append(state)
                    marks.append(stack)
                    stack = []
                    pos += 5
                else:
                    stack.append(())
            elif op == 0x86 or op == 0x85 or op == 0x87:  # TUPLE1, TUPLE2, TUPLE3
                last = stack.pop()
                items: tuple[object, ...]
                if op == 0x86:
                    items = (stack.pop(), last)
                elif op == 0x85:
                    items = (last,)
                else:
                    middle = stack.pop()
                    items = (stack.pop(), middle, last)
                if data.startswith(_REDUCED, pos) and type(stack[-1]) is Global and id(stack[-1]) not in special:
                    args = (items,)
                    stack[-1] = made = Object(stack[-1], args)
                    memo.append(items)
                    memo.append(args)
                    memo.append(made)
                    pos += 5
                else:
                    stack.append(items)
            elif op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op == 0x4A:  # BININT
                stack.append(_INT32(data, pos)[0])
                pos += 4
            elif op == 0x8C:  # SHORT_BINUNICODE
                stop = pos + 1 + data[pos]
                if stop > end:
                    machine.require(pos + 1, stop - pos - 1)
                stack.append(str(data[pos + 1 : stop], "utf-8", "surrogatepass"))
                pos = stop
            elif op == 0x8A:  # LONG1
                stop = pos + 1 + data[pos]
                if stop > end:
                    machine.require(pos + 1, stop - pos - 1)
                stack.append(int.from_bytes(data[pos + 1 : stop], "little", signed=True))
                pos = stop
            elif op == 0x71:  # BINPUT
                index = data[pos]
                if index == len(memo):
                    memo.append(stack[-1])
                else:
                    machine.stack = stack
                    machine.put(index)
                    memo = machine.memo
                pos += 1
            elif op == 0x58:  # BINUNICODE
                start = pos + 4
                stop = start + _UINT32(data, pos)[0]
                if stop > end:
                    machine.require(start, stop - start)
                stack.append(str(data[start:stop], "utf-8", "surrogatepass"))
                pos = stop
            elif op == 0x28:  # MARK
                marks.append(stack)
                stack = []
            elif op == 0x52:  # REDUCE
                value = stack.pop()
                called = stack[-1]
                if type(value) is not tuple:
                    raise bad_pickle("arguments that are not a tuple", base + pos - 1)
                if type(called) is not Global:
                    names.require_callable(called, base + pos - 1)
                elif id(called) in special:
                    stack[-1] = names.call(called, value, base + pos - 1)
                    continue
                stack[-1] = Object(called, value)
            elif op == 0x62:  # BUILD
                value = stack.pop()
                target = stack[-1]
                if type(target) is Object and target.state is NO_STATE:
                    target.state = value
                else:
                    machine.build(target, value, pos)
            elif op == 0x72:  # LONG_BINPUT
                index = _UINT32(data, pos)[0]
                if index == len(memo):
                    memo.append(stack[-1])
                else:
                    machine.stack = stack
                    machine.put(index)
                    memo = machine.memo
                pos += 4
            elif op == 0x74:  # TUPLE
                values, stack = stack, marks.pop()
                stack.append(tuple(values))
            elif op == 0x51:  # BINPERSID
                stack[-1] = Persistent(stack[-1])
            elif op == 0x81:  # NEWOBJ
                value = stack.pop()
                called = stack[-1]
                if type(value) is not tuple:
                    raise bad_pickle("arguments that are not a tuple", base + pos - 1)
                if type(called) is not Global:
                    names.require_callable(called, base + pos - 1)
                stack[-1] = Object(called, value, "newobj")
            elif op == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif op == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif op == 0x61:  # APPEND
                value = stack.pop()
                machine.extend(stack[-1], [value], pos)
            elif op == 0x65:  # APPENDS
                values, stack = stack, marks.pop()
                machine.extend(stack[-1], values, pos)
            elif op == 0x89:  # NEWFALSE
                stack.append(False)
            elif op == 0x88:  # NEWTRUE
                stack.append(True)
            elif op == 0x4E:  # NONE
                stack.append(None)
            elif op == 0x2E:  # STOP
                return stack.pop(), pos
            else:
                rare = RARE.get(op)
                if rare is None:
                    raise bad_pickle(f"unknown opcode 0x{op:02x}", base + pos - 1)
                machine.stack = stack
                pos = rare(machine, pos)
                stack, memo = machine.stack, machine.memo
    except (IndexError, KeyError, StructError) as e:
        if isinstance(e, StructError) or str(e) == _PAST_THE_END:
            raise bad_pickle("it is truncated: there is no STOP before the end", base + end, is_cut=True) from e
        raise bad_pickle(f"opcode 0x{op:02x} needs what the stack or the memo does not hold,", base + pos - 1) from e
    except (ValueError, TypeError, OverflowError, RecursionError) as e:  # undecodable text above all
        raise bad_pickle(f"opcode 0x{op:02x}: {type(e).__name__}: {e!s:.200}", base + pos - 1) from e
    except MemoryError as e:
        raise over_limit("it needs more memory than there is", base + pos - 1) from e
