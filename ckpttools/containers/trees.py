"""Walks a nested value of a torch file: its leaves with the keys that lead to them.

Dicts, lists and tuples are branches where a tensor or a dict lies below them; a list of plain numbers is one object, as
torch's own flattening has it. An opaque object is a branch where tensors lie in its attributes, so a pickled module
gives its tensors under the names that its state dict has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpttools.model import Path, PathKey
from ckpttools.pickles.records import Global, Object, Persistent
from ckpttools.pickles.views import attributes, mapping_items, sequence_items

MAX_NODES = 50_000_000
MAX_DEPTH = 500
MAX_REPEATED, MAX_REPEATED_RATIO = 50_000, 8
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


class TreeLimitError(Exception):
    """A value that is deeper or larger (by sharing, exponentially) than any checkpoint is, or contains itself."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An entry of a nested value."""

    path: Path
    record: object


def is_tensor_record(record: object) -> bool:
    """Whether a record is a call of one of torch's rebuild functions."""
    if not isinstance(record, Object) or not isinstance(record.callable, Global):
        return False
    name = record.callable
    return name.name.startswith("_rebuild_") and name.module.startswith("torch")


def leaves(value: object) -> Iterator[Leaf]:
    """Every leaf in order. Raises TreeLimitError for a bomb or a cycle."""
    holds, sharing = _TensorSearch(), _Sharing()
    count = 0
    stack: list[tuple[Path, object, tuple[int, ...]]] = [((), value, ())]
    while stack:
        path, record, above = stack.pop()
        count += 1
        if count > MAX_NODES or len(above) > MAX_DEPTH:
            raise TreeLimitError(f"more than {MAX_NODES} entries or {MAX_DEPTH} levels")
        branches = _branches(record, holds)
        if branches is None:
            yield Leaf(path, record)
            continue
        if id(record) in above:
            raise TreeLimitError("a value that contains itself")
        sharing.visit(record, len(branches))
        below = (*above, id(record))
        stack.extend(((*path, *keys), child, below) for keys, child in reversed(branches))


def sequence_branches(value: object, prefix: Path = ()) -> dict[Path, str]:
    """The paths of the branches of a nested value that are a `list` or a `tuple`; the others are dicts.

    Raises: TreeLimitError: for a bomb.
    """
    records = branch_records(value, prefix)
    return {path: "tuple" if isinstance(r, tuple) else "list" for path, r in records if isinstance(r, (list, tuple))}


def branch_records(value: object, prefix: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every branch of a nested value, with the path that leads to it. Raises TreeLimitError for a bomb."""
    holds, sharing = _TensorSearch(), _Sharing()
    stack: list[tuple[Path, object]] = [(prefix, value)]
    while stack:
        path, record = stack.pop()
        branches = _branches(record, holds) if len(path) < MAX_DEPTH else None
        if branches is None:
            continue
        sharing.visit(record, len(branches))
        yield path, record
        stack.extend(((*path, *keys), child) for keys, child in branches)


class _Sharing:
    """Counts what is walked again because it is shared: forty lists, each twice in the next, have a billion entries."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._first = 0
        self._repeated = 0

    def visit(self, record: object, entries: int) -> None:
        """Raises TreeLimitError when more was walked again than any checkpoint shares."""
        if id(record) in self._seen:
            self._repeated += entries
        else:
            self._seen.add(id(record))
            self._first += entries
        if self._repeated > MAX_REPEATED + MAX_REPEATED_RATIO * self._first:
            raise TreeLimitError(f"{self._repeated} entries that are shared, of {self._first} in all")


def _branches(record: object, holds: _TensorSearch) -> list[tuple[Path, object]] | None:
    """(keys, child) of a branch; None for a leaf."""
    if is_tensor_record(record):
        return None
    pairs = mapping_items(record)
    if pairs is not None:
        return [((_key(k),), v) for k, v in pairs] if pairs else None
    items = sequence_items(record)
    if items is not None:
        return [((i,), v) for i, v in enumerate(items)] if holds.branching(items) else None
    members = attributes(record) if isinstance(record, Object) else None
    if members is None or not holds.tensors(record):
        return None
    if any(t in members for t in _MODULE_TABLES):  # a torch.nn.Module: its tables are not part of the names
        tables = [p for t in _MODULE_TABLES for p in mapping_items(members.get(t)) or []]
        return [((_key(k),), v) for k, v in tables if v is not None]
    return [((_key(k),), v) for k, v in members.items()]


def _key(key: object) -> PathKey:
    """A dict key as a path has it; records (dtypes and the like) by their name."""
    if key is None or isinstance(key, (str, int, float, bytes)):
        return key
    if isinstance(key, tuple):
        return tuple(_key(k) for k in key)
    return str(key)


class _TensorSearch:
    """Remembers, per container, whether tensors (or dicts) lie below it, so that sharing costs nothing."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, bool]] = {}

    def branching(self, items: list[object]) -> bool:
        """Whether a sequence is a branch: a tensor or a dict lies directly in it, or a tensor deeper."""
        return any(mapping_items(i) is not None or self.tensors(i) for i in items)

    def tensors(self, value: object) -> bool:
        """Whether a tensor lies anywhere below `value`."""
        stack = [value]
        seen: dict[int, object] = {}
        while stack:
            record = stack.pop()
            if is_tensor_record(record):
                return self._remember(value, True)
            if id(record) in seen or not isinstance(record, (dict, list, tuple, set, frozenset, Object)):
                continue
            known = self._known.get(id(record))
            if known is not None and known[1]:
                return self._remember(value, True)
            if known is None:
                seen[id(record)] = record
                stack.extend(children(record))
        for record in seen.values():
            self._remember(record, False)
        return False

    def _remember(self, value: object, found: bool) -> bool:
        self._known[id(value)] = (value, found)  # the value is kept, so that its id is not used again
        return found


def children(record: object) -> Iterator[object]:
    """Everything directly in a record: arguments, state, items, keys and values."""
    if isinstance(record, Object):
        yield record.callable
        yield from record.args
        yield from record.items
        yield from (x for pair in record.pairs for x in pair)
        yield from record.kwargs.values()
        yield record.state
    elif isinstance(record, dict):
        yield from (x for pair in record.items() for x in pair)
    elif isinstance(record, (list, tuple, set, frozenset)):
        yield from record


def persistent_ids(value: object) -> Iterator[Persistent]:
    """Every persistent id in a value, each once."""
    stack, seen = [value], set()
    while stack:
        record = stack.pop()
        if id(record) in seen:
            continue
        if isinstance(record, Persistent):
            seen.add(id(record))
            yield record
        elif isinstance(record, (Object, dict, list, tuple, set, frozenset)):
            seen.add(id(record))
            stack.extend(children(record))
