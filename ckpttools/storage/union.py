"""Several roots as one source: a snapshot whose files lie on the disks of several nodes.

A file that one root holds has its path relative to that root, as if all lay in one directory. What several roots hold under
one path is copies: the longest of them (of equal ones that of the root named first) has the relative path, the others have
the path with their root in front (`/nodes/b/step-100/.metadata`), which no relative path looks like. Nothing here compares
them. Read `open_roots` and `UnionSource` first.
"""

from __future__ import annotations

import glob
import os
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from ckpttools.errors import NotFoundError, StorageError, UsageError
from ckpttools.storage.source import (
    ListedFile,
    Listing,
    Source,
    exists,
    filesystem,
    is_url,
    local_path,
    open_source,
    storage_error,
)

_MAGIC = re.compile(r"[*?\[]")


def open_roots(locations: Sequence[str]) -> tuple[Source, str]:
    """`open_source` of one location; of several, one source over all of them ("" for the file that is named).

    Raises: NotFoundError: when nothing is at one of them. StorageError: when one cannot be listed.
    """
    if len(locations) == 1:
        return open_source(locations[0])
    return UnionSource([open_source(location)[0] for location in locations]), ""


class UnionSource:
    """The files of several sources. A file is only read under a path that the listing has."""

    def __init__(self, sources: Sequence[Source], *, passed_over: Collection[tuple[str, str]] = ()) -> None:
        """Several sources as one.

        Args: passed_over: (root, path) of copies that do not read, so that another copy is the file if there is one.
        """
        self.location = sources[0].location
        self._places: dict[str, tuple[Source, str]] = {}
        self._passed_over = frozenset(passed_over)
        self._listing = self._unite(sources)

    def listing(self) -> Listing:
        """The files of all roots, as they were when the source was opened."""
        return self._listing

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """See `Source.read_into`."""
        place = self._places.get(file)
        if place is None:
            raise StorageError("no root holds this file", where=file)
        place[0].read_into(place[1], offset, buffer)

    def _unite(self, sources: Sequence[Source]) -> Listing:
        held: dict[str, list[tuple[ListedFile, Source]]] = defaultdict(list)
        directories: set[str] = set()
        for source in sources:
            root = root_name(source.location)
            listing = source.listing()
            directories.update(listing.directories)
            for file in listing:
                held[file.path].append((replace(file, root=root), source))
        files: list[ListedFile] = []
        copies: dict[str, tuple[ListedFile, ...]] = {}
        for path, places in held.items():
            places.sort(key=self._order)  # stable: the first root first
            (first, source), *others = places
            files.append(first)
            self._places[path] = (source, path)
            further = [replace(file, path=f"{file.root}/{path}") for file, _ in others]
            self._places |= {file.path: (source, path) for file, (_, source) in zip(further, others, strict=True)}
            if further:
                copies[path] = tuple(further)
        return Listing(files, directories=tuple(sorted(directories)), copies=copies)

    def _order(self, place: tuple[ListedFile, Source]) -> tuple[bool, bool, int]:
        file, _ = place
        return not file.is_regular, (file.root, file.path) in self._passed_over, -file.length_bytes


def require_apart(locations: Sequence[str]) -> None:
    """Refuse a place that is named twice, or lies in another: then one file would look like two copies.

    Raises: UsageError.
    """
    named: dict[str, str] = {}
    for one in locations:
        real = (one if is_url(one) else os.path.realpath(local_path(one))).rstrip("/")
        if real in named:
            raise UsageError(f"one place is named twice: {one}", hints=["name each place once"])
        named[real] = one
    for real, one in named.items():
        above = next((a for a in named if a != real and real.startswith(f"{a}/")), None)
        if above is not None:
            raise UsageError(f"one place lies in another: {one}", found=named[above], hints=["name each place once"])


def root_name(location: str) -> str:
    """How a root stands in front of the paths of its files: a URL, an absolute path, or one that starts with a dot. Pure."""
    if is_url(location):
        return location.rstrip("/")
    path = os.path.normpath(local_path(location))
    return path if path.startswith(("/", "./", "../")) or path in (".", "..") else f"./{path}"


def expand(locations: Sequence[str]) -> list[str]:
    """The locations that paths, URLs and globs stand for, each place once; `node2` before `node10`.

    Something that is there under a name with `*` in it is that, not a glob.

    Raises: NotFoundError: when a glob matches nothing. StorageError: when it cannot be looked for.
    """
    found: dict[str, str] = {}
    for location in locations:
        for one in _matches(location):
            found.setdefault(one.rstrip("/") if is_url(one) else os.path.realpath(local_path(one)), one)
    return list(found.values())


def _matches(location: str) -> list[str]:
    if not _MAGIC.search(location) or exists(location):
        return [location]
    if not is_url(location):
        matches = glob.glob(local_path(location))
    else:
        fs, pattern = filesystem(location)
        scheme = location.partition("://")[0]
        try:
            matches = [f"{scheme}://{str(path).lstrip('/') if scheme == 'memory' else path}" for path in fs.glob(pattern)]
        except (OSError, ValueError) as e:
            raise storage_error(e, location) from e
    if not matches:
        raise NotFoundError(f"nothing matches: {location}")
    return sorted(matches, key=_natural)


def _natural(text: str) -> list[tuple[int, str]]:
    """Sorts runs of digits as numbers."""
    return [(int(part), "") if part.isdigit() and part.isascii() else (-1, part) for part in re.split(r"([0-9]+)", text)]
