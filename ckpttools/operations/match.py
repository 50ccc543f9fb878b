"""Which entry of one checkpoint is which of another: by name, after those of A were changed as asked. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from ckpttools.errors import ConversionError
from ckpttools.layouts.families import MODEL
from ckpttools.model import Checkpoint, ObjectEntry, TensorEntry
from ckpttools.operations.select import Choice

Entry = TypeVar("Entry", TensorEntry, ObjectEntry)


@dataclass(frozen=True, slots=True)
class TensorPair:
    """A name and the tensors that it means; None on a side that has none."""

    name: str
    a: TensorEntry | None
    b: TensorEntry | None


@dataclass(frozen=True, slots=True)
class ObjectPair:
    """The same for objects."""

    name: str
    a: ObjectEntry | None
    b: ObjectEntry | None


def match_tensors(a: Checkpoint, b: Checkpoint, choice: Choice) -> list[TensorPair]:
    """The tensors of two checkpoints that were chosen, in the order of A and then those that B alone has.

    Globs match names as they are compared. A name that one side lacks stands for the tensor that is the same by the aliases
    of either.

    Raises: ConversionError: when two tensors of A get one name.
    """
    here, there = _named(a.tensors, choice, is_renamed=True), _named(b.tensors, choice, is_renamed=False)
    groups = [[choice.renaming.apply(name) for name in group] for group in a.aliases] + [list(g) for g in b.aliases]
    names = list(dict.fromkeys((*here, *there)))
    return [
        TensorPair(n, here.get(n) or _under_alias(n, here, groups), there.get(n) or _under_alias(n, there, groups)) for n in names
    ]


def match_objects(a: Checkpoint, b: Checkpoint, choice: Choice) -> list[ObjectPair]:
    """The objects of two checkpoints that were chosen; those with the model's tensors alone are none."""
    if choice.is_weights_only:
        return []
    here, there = _named(a.objects, choice, is_renamed=True), _named(b.objects, choice, is_renamed=False)
    return [ObjectPair(name, here.get(name), there.get(name)) for name in dict.fromkeys((*here, *there))]


def _named(entries: Sequence[Entry], choice: Choice, *, is_renamed: bool) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in entries:
        name = choice.renaming.apply(entry.name) if is_renamed else entry.name
        if not _is_chosen(name, entry.family, choice):
            continue
        if name in found and found[name].name != entry.name:
            raise ConversionError(f"two entries of A get one name: {name}", found=f"{found[name].name} and {entry.name}")
        found[name] = entry
    return found


def _is_chosen(name: str, family: str, choice: Choice) -> bool:
    if any(fnmatchcase(name, glob) for glob in choice.exclude) or (choice.is_weights_only and family != MODEL):
        return False
    return not choice.include or any(fnmatchcase(name, glob) for glob in choice.include)


def _under_alias(name: str, side: Mapping[str, TensorEntry], groups: Sequence[Sequence[str]]) -> TensorEntry | None:
    """The tensor of a side that is declared to be the same one under another name."""
    return next((side[other] for group in groups if name in group for other in group if other in side), None)
