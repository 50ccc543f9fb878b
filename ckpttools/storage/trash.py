"""Deletes directories so that nothing half-deleted looks whole: renamed first, in the same directory, then removed.

The trash name starts with a dot and a word of ours, so no trainer and no command takes it for a snapshot, and the next run
finds and finishes what an interrupted one left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from ckpttools.errors import StorageError
from ckpttools.storage.source import is_url, storage_error

PREFIX = ".ckpttools-trash-"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""No space, bytes or inodes; which is when people prune."""
_TOKEN_BYTES = 4
_NAME_BYTES = 160
"""Of the old name; a name has at most 255."""
_TRIES = 3
"""How often a directory is emptied that another process writes into."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """A snapshot that is not there under its name any more, and not yet removed."""

    path: str
    """What it was called, relative to the run directory."""
    place: str
    """Where it is now."""
    marks: tuple[str, ...] = ()
    """What marked its save as not finished, to be removed before the last of it is."""
    hidden_s: float = 0
    """When it was hidden, seconds since the epoch, by the clock of the storage."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """What became of a hidden snapshot."""

    error: str = ""
    """What stands in the way of the rest of it; empty when all is gone."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Each mark, and what stands in its way."""


class LocalTrash:
    """Hides and removes the snapshots of a run directory on a file system."""

    def __init__(self, root: str) -> None:
        self._root = root

    def hide(self, path: str, marks: Iterable[str] = ()) -> Hidden:
        """Rename a snapshot to a trash name beside it.

        Raises: StorageError: it cannot be renamed or emptied, is a link, or lies outside the root. It is where it was, then.
        """
        full = os.path.join(self._root, path)
        directory, name = os.path.split(full)
        token = os.urandom(_TOKEN_BYTES).hex()
        trash = os.path.join(directory, f"{PREFIX}{token}-{os.fsdecode(os.fsencode(name)[:_NAME_BYTES])}")
        try:
            mode = os.lstat(full).st_mode
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise StorageError("a link or special file is not deleted", where=path)
            if os.path.realpath(full) != os.path.join(os.path.realpath(self._root), path):
                raise StorageError("it does not lie in the run directory", where=path)
            if stat.S_ISDIR(mode):
                _require_removable(full)
            os.rename(full, trash)
            _sync_directory(directory)
        except OSError as e:
            raise storage_error(e, path) from e
        return Hidden(path, os.path.relpath(trash, self._root), tuple(marks))

    def leftovers(self, directories: Iterable[str]) -> list[Hidden]:
        """What earlier runs renamed in these directories and did not remove. Raises StorageError."""
        found: list[Hidden] = []
        for directory in directories:
            full = os.path.join(self._root, directory)
            if directory and os.path.islink(full):  # it leads to where others delete
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(full) as entries:
                for entry in entries:
                    if entry.name.startswith(PREFIX) and not entry.is_symlink():
                        place = os.path.join(directory, entry.name)
                        found.append(Hidden(name_in_trash(place), place, (), entry.stat(follow_symlinks=False).st_ctime))
        return sorted(found, key=lambda h: h.place)

    def clear(self, hidden: Hidden) -> Cleared:
        """Remove what was hidden and its marks, as much as goes.

        The marks go while something of the snapshot is there, by which the next run knows of them.
        """
        marks = {mark: self._remove_mark(mark) for mark in hidden.marks}
        stuck = next((mark for mark, error in marks.items() if error), "")
        if stuck:
            return Cleared(f"not removed, since its mark is still there: {stuck}", marks)
        return Cleared(remove_tree(self._root, hidden.place), marks)

    def _remove_mark(self, path: str) -> str:
        try:
            if stat.S_ISDIR(os.lstat(os.path.join(self._root, path)).st_mode):
                return remove_tree(self._root, self.hide(path).place)
        except FileNotFoundError:
            return ""
        except OSError as e:
            return f"{storage_error(e, path).message}: {path}"
        except StorageError as e:
            return f"{e.message}: {e.where}"
        return remove_tree(self._root, path)


def _require_removable(directory: str) -> None:
    """Look before anything is renamed whether what is in a directory can be removed. Raises OSError, StorageError."""
    with os.scandir(directory) as entries:
        inner = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
    if inner and not os.access(directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise StorageError("permission denied to delete what is in it", where=directory)
    for path, is_directory in inner:
        if is_directory:
            _require_removable(path)


def name_in_trash(path: str) -> str:
    """What something in the trash was called, relative to the run directory. Pure."""
    directory, _, name = path.rpartition("/")
    old = name[len(PREFIX) + 2 * _TOKEN_BYTES + 1 :]
    return f"{directory}/{old}" if directory else old


def remove_tree(root: str, path: str) -> str:
    """Remove a directory or file, as much of it as goes; what stood in the way, or nothing. Links are not followed."""
    errors: list[str] = []
    full = os.path.join(root, path)

    def note(_function: Callable[..., object], where: str, info: tuple[type, BaseException, TracebackType]) -> None:
        error = info[1]
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            failure = storage_error(error, where)
            errors.append(f"{failure.message}: {where}")

    try:
        if stat.S_ISDIR(os.lstat(full).st_mode):
            for _ in range(_TRIES):
                shutil.rmtree(full, onerror=note)
                if errors or not os.path.lexists(full):
                    break
        else:
            os.unlink(full)
        if os.path.lexists(full) and not errors:
            errors.append(f"something is being written into it: {path}")
    except FileNotFoundError:
        pass
    except OSError as e:
        errors.append(f"{storage_error(e, path).message}: {path}")
    return errors[0] if errors else ""


def require_log(location: str) -> None:
    """Refuse to begin when a log cannot be written to. A full disk is no reason: what goes makes room. Raises StorageError."""
    try:
        append_line(location, "")
    except StorageError as e:
        if not isinstance(e.__cause__, OSError) or e.__cause__.errno not in FULL:
            raise


def append_line(location: str, line: str) -> None:
    """Add a line to a file that others may add to at the same time. Raises StorageError."""
    try:
        fd = os.open(location, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            os.write(fd, line.encode("utf-8", "surrogateescape") + b"\n" if line else b"")
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        raise storage_error(e, location) from e


def read_room(location: str) -> tuple[int | None, int | None]:
    """Free bytes and inodes for this user on the file system of a run; None where it does not tell."""
    if is_url(location):
        return None, None
    try:
        found = os.statvfs(location)
    except OSError as e:
        raise storage_error(e, location) from e
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some file systems have no such thing, and the rename is done
            os.fsync(fd)
    finally:
        os.close(fd)
