"""UrlTarget: the destination of a conversion on an object store or another fsspec file system.

There is no rename of many objects at once, so each file is uploaded under its final key, in order, and the commit record
last: until then the output is not readable as a checkpoint. A file in mid-upload is not there at all on an object store.
Finished files are recorded as small objects under `.<name>.ckpttools-partial/` beside the output (in it, where it is a
whole bucket), which a later run reads to go on and the last step removes. There are no locks on such stores.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ckpttools.errors import DestinationError, DestinationExistsError, StorageError
from ckpttools.storage.source import filesystem
from ckpttools.storage.store_errors import store_error_types
from ckpttools.storage.writing import write_error

_PART_BYTES = 16 << 20
"""One upload request carries this much; a multiple of 256 KiB, as Google's store asks."""
_MAX_PARTS = 9000
"""S3 takes 10,000 parts per object."""


class UrlTarget:
    """A key or a prefix of an fsspec file system."""

    def __init__(self, location: str, *, is_file: bool = False) -> None:
        self.location = location
        self.is_file = is_file
        self._fs, root = filesystem(location)
        self._root = root.rstrip("/")
        parent, _, name = self._root.rpartition("/")
        is_bucket = not parent and not root.startswith("/")
        self._journal = f"{self._root}/.ckpttools-partial" if is_bucket else f"{parent}/.{name}.ckpttools-partial"
        self._records = 0
        self._lock = threading.Lock()
        self._may_start = True

    def begin(self, *, overwrite: bool, sources: Sequence[str] = ()) -> None:
        """See `Target.begin`. What an earlier run has uploaded is told from a stranger's by its journal."""
        here = self.location.rstrip("/") + "/"
        for source in sources:
            there = source.rstrip("/") + "/"
            if here.startswith(there) or there.startswith(here):
                raise DestinationError(f"the destination and the source overlap: {self.location}", found=source)
        exists = self._has_output()
        self._may_start = not exists or (overwrite and self.is_file)
        if not self._may_start and not self.journal_lines():
            raise self._refusal(overwrite)

    def _has_output(self) -> bool:
        with _store_errors(self.location):
            if self.is_file or self._fs.isfile(self._root):
                return bool(self._fs.exists(self._root))
            found = self._fs.find(self._root) if self._fs.exists(self._root) else []
        return any(not path.startswith(self._journal) for path in found)

    def _refusal(self, overwrite: bool) -> DestinationError:
        message = f"the destination exists: {self.location}"
        if not overwrite:
            return DestinationExistsError(message, hints=["choose another name, or delete it first"])
        reason = "a store of objects cannot replace several of them in one step, and a half-replaced output must not exist"
        return DestinationError(message, found=reason, hints=["write to a new name, then delete the old output"])

    def journal_lines(self) -> list[str]:
        """See `Target.journal_lines`."""
        with _store_errors(self._journal):
            names = self._journal_names()
            records = [self._fs.cat_file(name).decode("utf-8", "surrogateescape") for name in names]
        self._records = len(names)
        return [line for record in records for line in record.splitlines()]

    def _journal_names(self) -> list[str]:
        return sorted(self._fs.find(self._journal)) if self._fs.exists(self._journal) else []

    def start_journal(self, header: str) -> None:
        """See `Target.start_journal`. Refuses where files of another conversion would mix with this one's."""
        if not self._may_start:
            raise DestinationError(
                f"unfinished output of another conversion is there: {self.location}",
                hints=[f"delete it and {self._journal}, or choose another name"],
            )
        self._delete_journal(keep=0)
        self._records = 0
        self.append_journal(header)

    def append_journal(self, line: str) -> None:
        """See `Target.append_journal`; an object of its own for each line, since objects cannot grow."""
        with self._lock:
            name = f"{self._journal}/{self._records:08d}"
            self._records += 1
        with _store_errors(name):
            self._fs.pipe_file(name, line.encode("utf-8", "surrogateescape"))

    def reset_journal(self) -> None:
        """See `Target.reset_journal`."""
        self._delete_journal(keep=1)
        self._records = 1

    def length_bytes(self, path: str) -> int | None:
        """See `Target.length_bytes`."""
        with _store_errors(self._named(path)):
            try:
                return int(self._fs.info(self._key(path))["size"])
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def append(self, path: str, length_bytes: int) -> Iterator[Callable[[memoryview], None]]:
        """A function that takes the bytes of a file in order. The file is there once the context has ended well."""
        key = self._key(path)
        part_bytes = max(_PART_BYTES, -(-length_bytes // _MAX_PARTS // _PART_BYTES) * _PART_BYTES)
        with _store_errors(self._named(path)):
            is_new = not self._fs.exists(key)
            file = self._fs.open(key, "wb", block_size=part_bytes)

        def write(view: memoryview) -> None:
            with _store_errors(self._named(path)):
                file.write(view)

        is_complete = False
        try:
            yield write
            with _store_errors(self._named(path)):
                file.close()
            is_complete = True
        finally:
            if not is_complete:
                self._abandon(file, key if is_new else "")
        found = self.length_bytes(path)
        if found != length_bytes:
            raise StorageError(
                "the store has another length than was uploaded",
                where=self._named(path),
                expected=f"{length_bytes} bytes",
                found=f"{found} bytes",
            )

    def _abandon(self, file: Any, key: str) -> None:
        """Give up an upload without completing it, which closing the file, or forgetting it, would do."""
        with contextlib.suppress(*store_error_types(), AttributeError):
            file.discard()
        with contextlib.suppress(AttributeError):
            file.closed = True
        if key:
            with contextlib.suppress(*store_error_types()):
                self._fs.rm_file(key)  # stores that are not object stores show a file from its first byte on

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Target.read_into`."""
        with _store_errors(self._named(path)):
            data = self._fs.cat_file(self._key(path), start=offset, end=offset + len(buffer)) if buffer else b""
        if len(data) != len(buffer):
            where = f"{self._named(path)} at byte {offset + len(data)}"
            raise StorageError("an output file is shorter than what was written to it", where=where)
        buffer[:] = data

    def put(self, path: str, data: Iterable[bytes]) -> None:
        """See `Target.put`. Beside a single file the further one goes under the same prefix."""
        key = f"{self._root.rpartition('/')[0]}/{path}" if self.is_file else self._key(path)
        with _store_errors(self._named(path)):
            self._fs.pipe_file(key, b"".join(data))

    def commit(self) -> None:
        """See `Target.commit`. All is in place already, the commit record last; the journal goes."""
        self._delete_journal(keep=0)

    def close(self) -> None:
        """See `Target.close`."""

    def _delete_journal(self, keep: int) -> None:
        """Delete all but the first objects; backwards, since without the header the rest would not be known as a journal."""
        with _store_errors(self._journal):
            for name in reversed(self._journal_names()[keep:]):
                self._fs.rm_file(name)
            if keep == 0 and self._fs.exists(self._journal):
                self._fs.rmdir(self._journal)  # where directories are real

    def _key(self, path: str) -> str:
        return self._root if self.is_file else f"{self._root}/{path}"

    def _named(self, path: str) -> str:
        return self.location if self.is_file else f"{self.location.rstrip('/')}/{path}"


@contextlib.contextmanager
def _store_errors(where: str) -> Iterator[None]:
    try:
        yield
    except store_error_types() as e:
        raise write_error(e, where) from e
