"""Pauses Python's cyclic garbage collector while many small records are made, none of them garbage.

Opening a DCP directory of 100,000 chunks makes a million tuples that all stay; the collector walked them again and again
and took a quarter of the time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pause:
    """Threads that want the collector to rest; the last one out switches it on again."""

    lock = threading.Lock()
    users = 0
    was_enabled = False


@contextmanager
def paused() -> Iterator[None]:
    """The collector rests until every thread has left this context; it stays off where it was off before."""
    with _Pause.lock:
        if _Pause.users == 0:
            _Pause.was_enabled = gc.isenabled()
            gc.disable()
        _Pause.users += 1
    try:
        yield
    finally:
        with _Pause.lock:
            _Pause.users -= 1
            if _Pause.users == 0 and _Pause.was_enabled:
                gc.enable()
