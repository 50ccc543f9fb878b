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
from collections.abc import Callable, Iterable
from types import TracebackType

from ckpttools.errors import StorageError
from ckpttools.storage.source import is_url, storage_error

PREFIX = ".ckpttools-trash-"
_TOKEN_BYTES = 4
_NAME_BYTES = 160
"""Of the old name; a name has at most 255."""


def require_writable(location: str) -> None:
    """Refuse to delete where snapshots cannot be renamed. Raises StorageError."""
    if is_url(location):
        raise StorageError(
            f"deleting is done on file systems only: {location}",
            hints=["mount the bucket, or use a lifecycle rule of the store; without --apply the decisions are shown"],
        )


def move_to_trash(root: str, path: str) -> str:
    """Rename a snapshot to a trash name beside it; the trash's path relative to `root`.

    Raises: StorageError: it cannot be renamed, is a link, or lies outside the root. It is where it was, then.
    """
    full = os.path.join(root, path)
    directory, name = os.path.split(full)
    token = os.urandom(_TOKEN_BYTES).hex()
    trash = os.path.join(directory, f"{PREFIX}{token}-{os.fsdecode(os.fsencode(name)[:_NAME_BYTES])}")
    try:
        mode = os.lstat(full).st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise StorageError("a link or special file is not deleted", where=path)
        if os.path.realpath(full) != os.path.join(os.path.realpath(root), path):
            raise StorageError("it does not lie in the run directory", where=path)
        os.rename(full, trash)
        _sync_directory(directory)
    except OSError as e:
        raise storage_error(e, path) from e
    return os.path.relpath(trash, root)


def name_in_trash(path: str) -> str:
    """What something in the trash was called, relative to the run directory. Pure."""
    directory, _, name = path.rpartition("/")
    old = name[len(PREFIX) + 2 * _TOKEN_BYTES + 1 :]
    return f"{directory}/{old}" if directory else old


def find_trash(root: str, directories: Iterable[str]) -> list[str]:
    """What earlier runs renamed and did not remove, relative to `root`."""
    found: list[str] = []
    for directory in directories:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(os.path.join(root, directory)) as entries:
            found += [os.path.join(directory, e.name) for e in entries if e.name.startswith(PREFIX) and not e.is_symlink()]
    return sorted(found)


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
            shutil.rmtree(full, onerror=note)
        else:
            os.unlink(full)
        if os.path.lexists(full) and not errors:
            errors.append(f"something was written into it: {path}")
    except FileNotFoundError:
        pass
    except OSError as e:
        errors.append(f"{storage_error(e, path).message}: {path}")
    return errors[0] if errors else ""


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
