"""Writes one small document (a seal, a hash list, a pointer) whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from ckpttools.errors import DestinationError
from ckpttools.storage.source import filesystem, is_url, local_path, storage_error
from ckpttools.storage.store_errors import store_error_types


def write_document(location: str, data: Iterable[bytes], *, is_overwriting: bool = False) -> None:
    """Put stretches of data at a location: built beside it, on disk before it gets its name. Mode as the umask says.

    Raises: DestinationError: when something is there and may not be replaced. StorageError: when it cannot be written.
    """
    if is_url(location):
        _put_object(location, data, is_overwriting=is_overwriting)
        return
    location = local_path(location)
    if os.path.isdir(location) or (os.path.lexists(location) and not is_overwriting):
        raise DestinationError("a file is there already", where=location, hints=["pass --overwrite to replace it"])
    partial = f"{location}.{os.getpid()}.partial"
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.ExitStack() as undo:
            undo.callback(_remove, partial)
            with open(fd, "wb") as file:
                file.writelines(data)
                file.flush()
                os.fsync(fd)
            os.replace(partial, location)
            undo.pop_all()
        directory = os.open(os.path.dirname(location) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as e:
        raise storage_error(e, location) from e


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _put_object(location: str, data: Iterable[bytes], *, is_overwriting: bool) -> None:
    """An object store shows an object when it is whole."""
    fs, path = filesystem(location)
    try:
        if not is_overwriting and fs.exists(path):
            raise DestinationError("an object is there already", where=location, hints=["pass --overwrite to replace it"])
        fs.pipe_file(path, b"".join(data))
    except store_error_types() as e:
        raise storage_error(e, location) from e
