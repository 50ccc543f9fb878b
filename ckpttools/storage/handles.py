"""File descriptors that stay open while they are used; the least recently used ones are closed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_OPEN_FILES = 128


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
