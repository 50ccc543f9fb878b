"""The lock on a run directory of an object store: an object that says who has it, made only where there is none.

S3 and GCS refuse to make an object that is there already, so of two that begin at once one gets it. Stores without that (and
fsspec before 2024.10) are asked first, and of two within the same moment both may go on. Nothing tells that a holder on another
host is dead; one on this host is known to be by `flock` on a file in the temporary directory, and by its process number.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import json
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from ckpttools.errors import LockedError, StorageError
from ckpttools.storage.source import filesystem, open_source, store_errors
from ckpttools.storage.store_errors import store_error_types

_PAUSE_S = 1.0


@contextlib.contextmanager
def object_lock(location: str, name: str, *, now: float, wait_s: float = 0) -> Iterator[None]:
    """Hold the lock on a run directory of an object store.

    Args: name: of the object. now: seconds since the epoch, to be written into it. wait_s: how long to wait for another holder.

    Raises: LockedError: another run has it. NotFoundError: there is no such run. StorageError: it cannot be written to.
    """
    _, file = open_source(location)  # a lock must not make a run directory where there is none
    if file:
        raise StorageError(f"a file, not a run directory: {location}", hints=["name the directory that holds the snapshots"])
    fs, root = filesystem(location)
    key = f"{root.rstrip('/')}/{name}"
    record = {"host": os.uname().nodename, "pid": os.getpid(), "uid": os.getuid(), "time": int(now), "token": os.urandom(8).hex()}
    with contextlib.ExitStack() as stack:
        while True:
            is_ours_here = stack.enter_context(_host_lock(location))
            holder = (
                "a process on this host" if is_ours_here is False else _try_lock(fs, key, record, has_flock=bool(is_ours_here))
            )
            if not holder:
                break
            stack.close()
            if wait_s <= 0:
                raise LockedError(
                    f"another run holds the lock: {location}",
                    found=holder,
                    hints=["wait until it has finished, or pass --wait", f"if that host is gone, delete {name} in it"],
                )
            time.sleep(min(_PAUSE_S, wait_s))
            wait_s -= _PAUSE_S
        try:
            yield
        finally:
            with contextlib.suppress(*store_error_types()):
                if _read(fs, key).get("token") == record["token"]:
                    fs.rm_file(key)


@contextlib.contextmanager
def _host_lock(location: str) -> Iterator[bool | None]:
    """True: no other process of this user on this host is at this run; False: one is; None: it cannot be told."""
    digest = hashlib.sha256(location.rstrip("/").encode("utf-8", "surrogateescape")).hexdigest()[:16]
    path = os.path.join(tempfile.gettempdir(), f"ckpttools-{os.getuid()}-{digest}.lock")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours: bool | None = True
    except BlockingIOError:
        is_ours = False
    except OSError:
        is_ours = None
    try:
        yield is_ours
    finally:
        os.close(fd)


def _try_lock(fs: Any, key: str, record: dict[str, Any], *, has_flock: bool) -> str:
    """Empty when the lock was taken, else who has it. Raises StorageError."""
    for _ in range(2):
        if _create(fs, key, record):
            return ""
        holder = _read(fs, key)
        if holder and not _is_dead(holder, has_flock=has_flock):
            return json.dumps({k: holder.get(k) for k in ("host", "pid", "time")})
        with store_errors(key), contextlib.suppress(FileNotFoundError):
            fs.rm_file(key)
    return "a process that has just begun"


def _create(fs: Any, key: str, record: dict[str, Any]) -> bool:
    """Make the lock's object; False when there is one."""
    data = json.dumps(record).encode()
    has_create = "mode" in inspect.signature(getattr(fs, "_pipe_file", fs.pipe_file)).parameters
    try:
        if has_create:
            fs.pipe_file(key, data, mode="create")
            return True
        if fs.exists(key):
            return False
        fs.pipe_file(key, data)
    except store_error_types() as e:
        with store_errors(key):
            if fs.exists(key):
                return False
            raise e  # noqa: TRY201  # the store's own, not that of `exists`
    return bool(_read(fs, key).get("token") == record["token"])


def _read(fs: Any, key: str) -> dict[str, Any]:
    """Who has the lock; empty when nobody has, or it does not say. Raises StorageError."""
    with store_errors(key):
        try:
            found = json.loads(fs.cat_file(key))
        except (FileNotFoundError, ValueError):
            return {}
    return found if isinstance(found, dict) else {}


def _is_dead(holder: dict[str, Any], *, has_flock: bool) -> bool:
    """Whether whoever wrote the lock is known not to live any more."""
    if holder.get("host") != os.uname().nodename:
        return False
    if has_flock and holder.get("uid") == os.getuid():
        return True
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, KeyError, TypeError, ValueError):
        return False
    return bool(holder["pid"] == os.getpid())
