"""The names below a run directory, listed once without a stat per file, and what a stat tells of those that matter.

A run of 5,000 snapshots has a few hundred thousand files; on a network file system a stat of each takes minutes and the
listing seconds. So `read_tree` takes names only, and `Tree.measure` asks for lengths and times where they are needed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpttools.errors import NotFoundError, StorageError
from ckpttools.storage.source import ListedFile, Listing, is_url, open_source, read, storage_error

TOMBSTONE = ".ckpttools-deleting"
"""In a snapshot on an object store of which the deletion was begun (`object_trash`); it is no part of the snapshot."""
_MAX_DEPTH = 6
_MAX_TEXT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Measure:
    """What a stat of every file of a snapshot tells."""

    length_bytes: int
    inodes: int
    first_s: float | None
    """When the first file was last written to, and the last one; None where the store does not tell."""
    last_s: float | None
    empty: tuple[str, ...] = ()
    """Files without a byte."""


@dataclass
class Tree:
    """A run directory as it was listed."""

    location: str
    files: dict[str, list[str]] = field(default_factory=dict)
    """Directory -> names of the files in it, sorted; every directory has an entry, `""` is the run directory."""
    links: dict[str, str] = field(default_factory=dict)
    """Symbolic links in the run directory or one below it -> what they lead to, as an absolute path."""
    real: str = ""
    """The run directory without symbolic links; empty for a URL."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Directories that the storage refuses to list -> why; they look empty."""
    listing: Listing | None = None
    """For a URL: what the store listed, with lengths."""
    _children: dict[str, list[str]] = field(default_factory=dict)
    _refusals: dict[str, str] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether it lies on a file system."""
        return self.listing is None

    def subdirectories(self, directory: str = "") -> list[str]:
        """Names of the directories in a directory."""
        if not self._children:
            for path in self.files:
                parent, _, name = path.rpartition("/")
                if path:
                    self._children.setdefault(parent, []).append(name)
        return self._children.get(directory, [])

    def is_directory(self, path: str) -> bool:
        """Whether a path is a directory that was listed."""
        return path in self.files

    def is_file(self, path: str) -> bool:
        """Whether a path is a file that was listed."""
        directory, _, name = path.rpartition("/")
        return name in self.files.get(directory, ())

    def below(self, path: str) -> Iterator[str]:
        """Every file below a directory, relative to it, but a tombstone; for a file the empty name."""
        if path not in self.files:
            yield ""
            return
        waiting = [""]
        while waiting:
            inner = waiting.pop()
            at = f"{path}/{inner}".strip("/") if inner else path
            yield from (f"{inner}/{name}" if inner else name for name in self.files[at] if name != TOMBSTONE)
            waiting += [f"{inner}/{name}" if inner else name for name in self.subdirectories(at)]

    def directories_below(self, path: str) -> int:
        """How many directories a snapshot has, itself among them."""
        if path not in self.files:
            return 0
        return 1 + sum(self.directories_below(f"{path}/{name}") for name in self.subdirectories(path))

    def measure(self, *paths: str) -> Measure:
        """Length, inodes and times of what a snapshot consists of; files that are gone by now do not count."""
        length_bytes, empty = 0, []
        times: list[float] = []
        inodes = sum(map(self.directories_below, paths))
        for path, name in ((top, name) for top in paths for name in self.below(top)):
            found = self.status(f"{path}/{name}".rstrip("/"))
            if found is None:
                continue
            inodes += 1
            length_bytes += found.length_bytes
            empty += [] if found.length_bytes else [name or path.rpartition("/")[2]]
            times += [] if found.modified_s is None else [found.modified_s]
        return Measure(length_bytes, inodes, min(times, default=None), max(times, default=None), tuple(empty))

    def status(self, path: str) -> ListedFile | None:
        """Length and time of a file or directory; None when it is gone, or a link to nothing. Raises StorageError."""
        if self.listing is not None:
            return self.listing.files.get(path)
        try:
            found = os.stat(os.path.join(self.location, path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            if e.errno == errno.ELOOP:
                return None
            raise storage_error(e, path) from e
        return ListedFile(path, found.st_size, found.st_mtime, is_regular=stat.S_ISREG(found.st_mode))

    def read_text(self, path: str) -> str:
        """A small text file (a tracker, a JSON of metrics); empty when it is gone, long or no text. Raises StorageError."""
        try:
            source, name = open_source(f"{self.location.rstrip('/')}/{path}")
            length_bytes = source.listing().length_bytes(name) if name else 0
            return read(source, name, 0, length_bytes).decode("utf-8") if 0 < length_bytes <= _MAX_TEXT_BYTES else ""
        except (NotFoundError, UnicodeDecodeError):
            return ""

    def refusal(self, path: str) -> str:
        """Why a snapshot, or a part of it, cannot be listed; empty when it can."""
        if self.unreadable and not self._refusals:
            for directory, why in self.unreadable.items():
                parts = directory.split("/")
                self._refusals |= {"/".join(parts[: i + 1]): why for i in range(len(parts))}
        return self._refusals.get(path, "")

    def linked(self, path: str) -> str:
        """The path in the run directory that a link leads to; empty when it leads elsewhere."""
        target = self.links.get(path, "")
        prefix = self.real.rstrip("/") + "/"
        return target[len(prefix) :] if target.startswith(prefix) else ""


def read_tree(location: str) -> Tree:
    """The names below a run directory. Raises NotFoundError, StorageError."""
    source, file = open_source(location)
    if file:
        raise StorageError(f"a file, not a run directory: {location}", hints=["name the directory that holds the snapshots"])
    if is_url(location) and not location.startswith("file://"):
        return _tree_of_listing(location, source.listing())
    root = source.location
    tree = Tree(root, real=os.path.realpath(root))
    try:
        _scan(tree, "", _MAX_DEPTH)
    except OSError as e:
        raise storage_error(e, e.filename or root) from e
    return tree


def _scan(tree: Tree, directory: str, depth: int) -> None:
    """List a directory and those below it. Links to directories are followed from the first two levels only."""
    tree.files[directory] = []
    below: list[str] = []
    with os.scandir(os.path.join(tree.location, directory)) as entries:
        for entry in entries:
            path = f"{directory}/{entry.name}" if directory else entry.name
            is_link = entry.is_symlink()
            if is_link and path.count("/") <= 1:
                tree.links[path] = os.path.realpath(entry.path)
            if not _is_directory(entry, follow_symlinks=path.count("/") <= 1):
                tree.files[directory].append(entry.name)
            elif depth > 1 and not (is_link and f"{tree.real}/".startswith(tree.links.get(path, "/") + "/")):
                below.append(path)
    tree.files[directory].sort()
    for path in sorted(below):
        try:
            _scan(tree, path, depth - 1)
        except (FileNotFoundError, NotADirectoryError):  # deleted while we were listing
            continue
        except OSError as e:  # `lost+found`, or another user's
            tree.unreadable[path] = storage_error(e, path).message


def _is_directory(entry: os.DirEntry[str], *, follow_symlinks: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=follow_symlinks)
    except OSError:  # a link to itself, or to where we may not look
        return False


def _tree_of_listing(location: str, listing: Listing) -> Tree:
    tree = Tree(location.rstrip("/"), listing=listing, files={"": []})
    for path in listing.files:
        parts = path.split("/")
        for i in range(1, len(parts)):
            tree.files.setdefault("/".join(parts[:i]), [])
        tree.files["/".join(parts[:-1])].append(parts[-1])
    return tree
