"""Reads common records without calling anything: what is in a mapping, a sequence, an object, and what kind it is.

A `collections.OrderedDict` is an `Object` here like any other; these functions know how Python and torch pickle such
classes. Each answers None for what is not of its sort. To read a whole value of unknown depth, use `walk`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ckpttools.model import Path
from ckpttools.pickles.limits import over_limit
from ckpttools.pickles.numpy_records import describe_array
from ckpttools.pickles.python2 import modern
from ckpttools.pickles.records import NO_STATE, Global, Object, Persistent, SetBy, type_name

_CONTAINERS = (dict, list, tuple, set, frozenset)
_MAPPINGS = {("collections", "OrderedDict"), ("collections", "defaultdict"), ("collections", "Counter")}
_SEQUENCES = {("torch", "Size"), ("collections", "deque"), ("_collections", "deque")}
_MAKERS = {
    ("copyreg", "_reconstructor"),
    ("copy_reg", "_reconstructor"),
    ("copyreg", "__newobj__"),
    ("copyreg", "__newobj_ex__"),
}
"""Functions that make an object of the class that is their first argument."""


def class_of(value: object) -> Global | None:
    """The class (or the function) that would make an object; None where that is not simply a name."""
    if not isinstance(value, Object):
        return None
    called = value.callable
    if isinstance(called, Global) and (called.module, called.name) in _MAKERS and value.args:
        called = value.args[0]
    return called if isinstance(called, Global) else None


def class_is(value: object, name: str, modules: Collection[str]) -> bool:
    """Whether `value` is an object of the class `name`, in any of the modules that it lived in over the releases."""
    cls = class_of(value)
    return cls is not None and cls.name == name and cls.module in modules


def mapping_items(value: object) -> list[tuple[object, object]] | None:
    """The keys and values of a dict, an OrderedDict, defaultdict, Counter, or an object that keys were set in."""
    if isinstance(value, dict):
        return list(value.items())
    if not isinstance(value, Object):
        return None
    cls = class_of(value)
    if cls is None or (cls.module, cls.name) not in _MAPPINGS:
        return list(value.pairs) if value.pairs else None
    first = value.args[0] if value.args else None  # Counter({...}); Python 2 wrote OrderedDict([[key, value], ...])
    given: list[tuple[object, object]] = list(first.items()) if isinstance(first, dict) else []
    if isinstance(first, (list, tuple)):
        given = [(p[0], p[1]) for p in first if isinstance(p, (list, tuple)) and len(p) == 2]
    return [*given, *value.pairs]


def sequence_items(value: object) -> list[object] | None:
    """The items of a list, tuple, set (in an order that depends on its members alone), Size, deque or namedtuple."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return ordered(value)
    if not isinstance(value, Object) or value.pairs:
        return None
    cls = class_of(value)
    first = value.args[0] if value.args else ()
    if cls is not None and (cls.module, cls.name) in _SEQUENCES and isinstance(first, (list, tuple)):
        return [*first, *value.items]
    if value.items:
        return list(value.items)
    if value.how == "newobj" and len(value.args) > 1 and value.state is NO_STATE:
        return list(value.args)
    return None


def attributes(value: object) -> dict[str, object] | None:
    """The attributes that an object's state sets; None for a state of another form, or for none at all.

    Attributes have names, so a key that is no text (some classes have a `__setstate__` of their own) is given as text.
    """
    if not isinstance(value, Object):
        return None
    state = value.state.state if isinstance(value.state, SetBy) else value.state
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # (__dict__, slots)
    if all(p is None for p in parts):
        return None
    found: dict[str, object] = {}
    for part in parts:
        if part is not None:
            items = mapping_items(part)
            if items is None:
                return None
            found.update((key if isinstance(key, str) else str(path_key(key)), child) for key, child in items)
    return found


def ordered(members: Collection[object]) -> list[object]:
    """The members of a set in an order that depends on them alone, since a set has another one in each process. Pure."""
    if all(type(m) is str for m in members) or all(type(m) is int for m in members):
        return sorted(members)  # type: ignore[type-var]  # all of one type, which has an order
    return sorted(members, key=_order_key)


def _order_key(member: object) -> tuple[str, str]:
    return type_name(member), outline(member, max_parts=1000, max_chars=1 << 20)


def outline(value: object, *, max_parts: int = 64, max_chars: int = 64) -> str:
    """A text for a value, for messages and for comparing; it never takes long, whatever the value is. Pure.

    Args: max_parts: of the value, in all. max_chars: of each text in it.
    """
    texts: list[str] = []
    todo: list[object] = [value]
    while todo and len(texts) < max_parts:
        part = todo.pop()
        if isinstance(part, (str, bytes, bytearray)):
            texts.append(repr(part[:max_chars]))
            continue
        texts.append(f"{type(part).__name__} of {len(part)}" if isinstance(part, _CONTAINERS) else _word(part))
        if isinstance(part, (set, frozenset)):
            todo.extend(sorted((m for m in part if isinstance(m, (str, bytes, int, float))), key=repr)[:max_parts])
        else:
            todo.extend(reversed(children(part)[:max_parts]))
    return " ".join(texts)


def _word(value: object) -> str:
    return type_name(value) if isinstance(value, (Object, Persistent, SetBy)) else str(value)


def children(value: object) -> list[object]:
    """Everything directly in a value: items, keys and values, arguments, state."""
    if isinstance(value, Object):
        found: list[object] = [] if isinstance(value.callable, Global) else [value.callable]
        found += [*value.args, *value.kwargs.keys(), *value.kwargs.values(), *value.items]
        found += [x for pair in value.pairs for x in pair]
        state = value.state
        return found if state is NO_STATE else [*found, *((state.setter, state.state) if isinstance(state, SetBy) else (state,))]
    if isinstance(value, dict):
        return [x for pair in value.items() for x in pair]
    if isinstance(value, _CONTAINERS):
        return list(value)
    return [value.pid] if isinstance(value, Persistent) else []


def reachable(value: object) -> Iterator[object]:
    """Every container and record below `value` (itself too), each once, however often and deeply it is shared."""
    todo, seen = [value], set()
    while todo:
        part = todo.pop()
        if not isinstance(part, (Object, Persistent, *_CONTAINERS)) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        todo.extend(children(part))


def walk(
    value: object, is_leaf: Callable[[object], bool], *, max_nodes: int = 50_000_000, max_depth: int = 500
) -> Iterator[tuple[Path, object]]:
    """The leaves of nested mappings and sequences in order, each with the typed keys that lead to it.

    Shared parts are walked once per way to them, so a small pickle can stand for more leaves than there are atoms;
    hence the limits. What is no mapping or sequence is a leaf, and so is an empty one, and what `is_leaf` says.

    Raises: PickleError: `pickle-limit`, for more nodes or levels than the limits, and for a value that contains itself.
    """
    todo: list[tuple[Path, object, tuple[int, ...]]] = [((), value, ())]
    nodes = 0
    while todo:
        path, part, above = todo.pop()
        nodes += 1
        if nodes > max_nodes or len(above) > max_depth:
            raise over_limit(f"a value of more than {max_nodes} parts or {max_depth} levels")
        pairs = None if is_leaf(part) else _keyed(part)
        if not pairs:
            yield path, part
            continue
        if id(part) in above:
            raise over_limit("a value that contains itself")
        below = (*above, id(part))
        todo.extend(((*path, path_key(key)), child, below) for key, child in reversed(pairs))


def _keyed(value: object) -> list[tuple[object, object]] | None:
    pairs = mapping_items(value)
    items = sequence_items(value) if pairs is None else None
    return pairs if items is None else list(enumerate(items))


def path_key(key: object) -> str | int | float | bool | bytes | tuple[object, ...] | None:
    """A key as paths have it: plain keys as they are, records by their name."""
    if key is None or isinstance(key, (str, int, float, bytes)):
        return key
    if isinstance(key, tuple):
        return tuple(path_key(k) for k in key)
    return str(key)


def kind_of(value: object) -> str:
    """What a value is, for people and JSON: `int`, `argparse.Namespace`, `numpy.ndarray float64 [3]`."""
    described = describe_array(value)
    if described:
        return described
    cls = class_of(value)
    if cls is None or not isinstance(value, Object):
        return type_name(value)
    module, name = modern(cls.module, cls.name)
    if (module, name) == ("builtins", "getattr") and len(value.args) == 2 and isinstance(value.args[0], Global):
        return f"{value.args[0]}.{str(path_key(value.args[1]))[:80]}"
    return f"{module}.{name}"
