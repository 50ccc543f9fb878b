"""The lock on a run directory: who has it, on which host, since when.

A lock file says so to people and to other hosts; `flock` on it (and on the directory, which also works on a full disk, where no
file can be made) ends with the process that holds it, so a dead holder on this host never blocks anyone. Whether a holder on
another host lives cannot be told from here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator

from ckpttools.errors import LockedError
from ckpttools.storage.object_lock import object_lock
from ckpttools.storage.source import is_url, local_path, storage_error
from ckpttools.storage.trash import FULL

LOCK_NAME = ".ckpttools-prune.lock"
_PAUSE_S = 0.5


@contextlib.contextmanager
def run_lock(directory: str, *, now: float, wait_s: float = 0) -> Iterator[None]:
    """Hold the lock on a run directory.

    Args: now: seconds since the epoch, to be written into the lock. wait_s: how long to wait for another holder.

    Raises: LockedError: another run has it. StorageError: the directory cannot be written to.
    """
    if is_url(directory):
        with object_lock(directory, LOCK_NAME, now=now, wait_s=wait_s):
            yield
        return
    directory = local_path(directory)
    fds: list[int] = []
    try:
        while True:
            holder = _try_lock(directory, now, fds)
            if holder is None:
                break
            _close(fds)
            if wait_s <= 0:
                raise LockedError(
                    f"another run holds the lock: {directory}",
                    found=holder,
                    hints=["wait until it has finished, or pass --wait", f"if that host is gone, delete {LOCK_NAME} in it"],
                )
            time.sleep(min(_PAUSE_S, wait_s))
            wait_s -= _PAUSE_S
        yield
    except OSError as e:
        raise storage_error(e, e.filename or directory) from e
    finally:
        if fds:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, LOCK_NAME))
            _close(fds)


def _try_lock(directory: str, now: float, fds: list[int]) -> str | None:
    """None when the lock was taken, else who has it. `fds` get the descriptors that hold it."""
    path = os.path.join(directory, LOCK_NAME)
    fds.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    if _flock(fds[0]) is False:
        return _read_holder(path) or "a process on this host"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as e:
        if e.errno in FULL:  # the lock on the directory has to do
            return None
        raise
    fds.append(fd)
    is_ours = _flock(fd)
    holder = os.pread(fd, 1000, 0).decode("utf-8", "replace")
    if is_ours is False or not _is_dead(holder, has_flock=bool(is_ours)):
        return holder or "a process on this host"
    if not _is_same_file(fd, path):
        return "a process that has just finished"
    record = json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "time": int(now)})
    with contextlib.suppress(OSError):  # no space for a line: the lock holds without it
        os.ftruncate(fd, 0)
        os.pwrite(fd, record.encode(), 0)
    return None


def _flock(fd: int) -> bool | None:
    """True: ours; False: another process has it; None: the file system has no such locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_dead(holder: str, *, has_flock: bool) -> bool:
    """Whether whoever wrote the lock is known not to live any more."""
    try:
        record = json.loads(holder)
        host, pid = str(record["host"]), int(record["pid"])
    except (ValueError, KeyError, TypeError):
        return has_flock or not holder
    if host != os.uname().nodename:
        return False
    if has_flock:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return pid == os.getpid()


def _read_holder(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1000)
    except OSError:
        return ""


def _is_same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _close(fds: list[int]) -> None:
    for fd in reversed(fds):
        os.close(fd)
    fds.clear()
