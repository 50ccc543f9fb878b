"""What targets share: the length of a write, what there is room for, open files, and what a failed write says."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from ckpttools.errors import StorageError
from ckpttools.storage.source import CANNOT, storage_error

WRITE_BYTES = 256 << 10
"""Longer writes were up to ten times slower: the kernel then looks for large folios and compacts memory for them."""
_MAX_OPEN_FILES = 128
_RESUMES = "then run the same command again: it goes on where this run stopped"


@dataclass(frozen=True, slots=True)
class Space:
    """What the file system of a destination has room for."""

    free_bytes: int | None
    """None where the file system does not tell."""
    free_inodes: int | None
    """None where the file system does not count them."""
    used_bytes: int
    """Bytes that an earlier run's partial output takes already."""
    where: str


@dataclass(slots=True)
class _Handle:
    fd: int
    users: int = 0


class Handles:
    """Open files by path, shared by threads."""

    def __init__(self, flags: int) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def borrow(self, path: str) -> Iterator[int]:
        """A descriptor of an existing file, for as long as the context lasts. Raises OSError."""
        with self._lock:
            handle = self._open.get(path)
            if handle is None:
                handle = self._open[path] = _Handle(os.open(path, self._flags))
            handle.users += 1
            self._open.move_to_end(path)
            self._close_idle()
        try:
            yield handle.fd
        finally:
            with self._lock:
                handle.users -= 1

    def _close_idle(self) -> None:
        excess = len(self._open) - _MAX_OPEN_FILES
        if excess > 0:
            idle = [path for path, handle in self._open.items() if handle.users == 0]
            for path in idle[:excess]:
                os.close(self._open.pop(path).fd)

    def close(self) -> None:
        """Close all. Raises OSError: some file systems tell only now that they have no room."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1].fd)


def write_error(e: Exception, where: str, offset: int | None = None) -> StorageError:
    """A failed write, with what to do: whatever it was, the next run goes on."""
    error = storage_error(e, where, offset)
    if getattr(e, "errno", None) in CANNOT:
        return error
    return StorageError(error.message, where=error.where, hints=(*error.hints, _RESUMES))
