"""Deletes snapshots from an object store, which cannot rename: a tombstone first, then the commit record, then the rest.

The tombstone lies in the snapshot and lists its objects with lengths and times. While it is there and any of them is missing,
nothing takes the rest for a snapshot, and the next run finishes; objects that are none of those listed are those of a new save
under the same name, and then the tombstone goes instead.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ckpttools.errors import StorageError
from ckpttools.storage.source import ListedFile, filesystem, is_url, modified_s, storage_error, store_errors
from ckpttools.storage.store_errors import store_error_types
from ckpttools.storage.trash import Cleared, Hidden, LocalTrash
from ckpttools.storage.tree import TOMBSTONE, Tree

_THREADS = 16
"""Deleting an object is one round trip."""
_RECORD = re.compile(
    r"(?:.*/)?(?:(?:__\d+)?\.metadata|metadata\.(?:json|pth)|trainer_state\.json|meta\.pt|.*\.index(?:\..+)?\.json)"
)
"""What makes a snapshot readable: goes first."""
Objects = dict[str, list[float | None]]
"""Objects by their path -> length in bytes and time of the last write."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What was to be deleted."""

    objects: Objects = field(default_factory=dict)
    """By path relative to the snapshot."""
    marks: Mapping[str, Objects] = field(default_factory=dict)
    """Marks by path relative to the run directory; their objects too."""

    def render(self) -> bytes:
        """As it is stored."""
        return json.dumps({"objects": self.objects, "marks": self.marks}).encode("utf-8", "surrogateescape")


def parse_tombstone(text: str) -> Tombstone | None:
    """A tombstone; None for what is none. Pure."""
    try:
        found = json.loads(text)
        return Tombstone(dict(found["objects"]), {m: dict(o) for m, o in found["marks"].items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read_half_deleted(tree: Tree, path: str) -> Tombstone | None:
    """The tombstone of a snapshot of which something was deleted, and nothing written since; None for others.

    Raises: StorageError.
    """
    if tree.listing is None or not tree.is_file(f"{path}/{TOMBSTONE}"):
        return None
    stone = parse_tombstone(tree.read_text(f"{path}/{TOMBSTONE}"))
    if stone is None:
        return None
    there = {n: _identity(tree.listing.files[f"{path}/{n}"]) for n in tree.below(path)}
    is_reused = any(stone.objects.get(name) != identity for name, identity in there.items())
    return None if is_reused or len(there) == len(stone.objects) else stone


def _identity(file: ListedFile) -> list[float | None]:
    return [file.length_bytes, file.modified_s]


class ObjectTrash:
    """Hides and removes the snapshots of a run directory on an object store."""

    def __init__(self, location: str) -> None:
        self._location = location.rstrip("/")
        self._fs, root = filesystem(location)
        self._root = root.rstrip("/")

    def hide(self, path: str, marks: Iterable[str] = ()) -> Hidden:
        """Put the tombstone of a snapshot and delete its commit record; a snapshot that is one object is deleted.

        Raises: StorageError: it cannot be deleted. It is what it was, then, unless the message says what hides it.
        """
        objects = self._objects(path)
        stone = Tombstone(objects, {mark: self._objects(mark) for mark in marks})
        if set(objects) <= {""}:
            with store_errors(path):
                self._delete(path)
            return Hidden(path, "", tuple(stone.marks))
        with store_errors(path):
            self._fs.pipe_file(self._key(f"{path}/{TOMBSTONE}"), stone.render())
        records = [name for name in objects if _RECORD.fullmatch(name)] or list(objects)[:1]
        for i, name in enumerate(records):
            try:
                self._delete(f"{path}/{name}")
            except store_error_types() as e:
                if i == 0:
                    self._undo(path)
                raise storage_error(e, f"{path}/{name}") from e
        return Hidden(path, path, tuple(stone.marks))

    def _undo(self, path: str) -> None:
        with contextlib.suppress(*store_error_types()):  # it says nothing while all that it lists is there
            self._delete(f"{path}/{TOMBSTONE}")

    def leftovers(self, tree: Tree) -> list[Hidden]:
        """What earlier runs began to delete. A tombstone of which nothing came, or over a new save, goes."""
        found: list[Hidden] = []
        for directory in sorted(d for d, names in tree.files.items() if d and TOMBSTONE in names):
            stone = read_half_deleted(tree, directory)
            if stone is None:
                self._undo(directory)
                continue
            marks = [mark for mark, objects in stone.marks.items() if objects and self._are_there(tree, mark, objects)]
            found.append(Hidden(directory, directory, tuple(marks)))
        return found

    @staticmethod
    def _are_there(tree: Tree, mark: str, objects: Objects) -> bool:
        """Whether a mark is what it was: one that was written since is that of a new save."""
        there = {n: tree.status(f"{mark}/{n}".rstrip("/")) for n in tree.below(mark)}
        present = {n: _identity(f) for n, f in there.items() if f is not None}
        return bool(present) and all(objects.get(name) == identity for name, identity in present.items())

    def clear(self, hidden: Hidden) -> Cleared:
        """Remove the objects of what was hidden, then its marks, then its tombstone, as much as goes."""
        error = ""
        if hidden.place:
            try:
                error = self._delete_all(hidden.place, keep=TOMBSTONE)
            except StorageError as e:
                error = f"{e.message}: {e.where}"
        marks: dict[str, str] = {}
        for mark in () if error else hidden.marks:
            try:
                marks[mark] = self._delete_all(mark)
            except StorageError as e:
                marks[mark] = f"{e.message}: {e.where}"
        if hidden.place and not error and not any(marks.values()):
            error = self._delete_all(hidden.place)
        return Cleared(error, marks)

    def _delete_all(self, path: str, keep: str = "") -> str:
        """Delete every object under a path; what stood in the way of the first that stays. Raises StorageError."""
        names = [name for name in self._objects(path, has_tombstone=not keep) if not keep or name != keep]

        def delete(name: str) -> str:
            where = f"{path}/{name}".rstrip("/")
            try:
                self._delete(where)
            except store_error_types() as e:
                return f"{storage_error(e, where).message}: {where}"
            return ""

        with ThreadPoolExecutor(_THREADS) as pool:
            errors = [e for e in pool.map(delete, names) if e]
        if not errors and not keep:
            self._remove_directories(path)
        return errors[0] if errors else ""

    def _remove_directories(self, path: str) -> None:
        """Where directories are real, they are left empty."""
        with contextlib.suppress(*store_error_types()):
            if self._fs.isdir(self._key(path)):
                below = [d for d in self._fs.find(self._key(path), withdirs=True) if d != self._key(path)]
                for directory in (*sorted(below, reverse=True), self._key(path)):
                    self._fs.rmdir(directory)

    def _objects(self, path: str, *, has_tombstone: bool = False) -> Objects:
        """The objects under a path by their path relative to it (`""` for one that is at it), as the store lists them now."""
        key = self._key(path)
        with store_errors(path):
            found = self._fs.find(key, detail=True)
            if not found and self._fs.exists(key):
                found = {key: self._fs.info(key)}
        prefix = self._fs._strip_protocol(key).rstrip("/")
        objects: Objects = {}
        for name, info in found.items():
            inner = name[len(prefix) :].lstrip("/")
            if info.get("type") != "directory" and (has_tombstone or inner != TOMBSTONE):
                objects[inner] = [int(info["size"] or 0), modified_s(info)]
        return objects

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._key(path))

    def _key(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")


def open_trash(location: str) -> LocalTrash | ObjectTrash:
    """What deletes the snapshots of a run directory."""
    return ObjectTrash(location) if is_url(location) else LocalTrash(location)
