"""A destination that is there already, seen as a target: what would be written is held against it. Writes nothing.

So an interrupted run that had in fact finished, and was started again, can say so instead of refusing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckpttools.errors import NotFoundError
from ckpttools.storage.source import Source, open_source, read


class OtherwiseError(Exception):
    """What is there is not what would be written; the text says where."""


class StandingTarget:
    """Takes the bytes of every output file in order, and raises OtherwiseError where the destination has others."""

    def __init__(self, location: str, *, is_file: bool = False) -> None:
        self.location = location
        self.is_file = is_file
        self._seen: dict[str, tuple[Source, str]] = {}

    def begin(self, *, overwrite: bool, sources: Sequence[str] = ()) -> None:
        """See `Target.begin`; there is nothing to take."""

    def journal_lines(self) -> list[str]:
        """See `Target.journal_lines`; nothing of an earlier run is believed."""
        return []

    def start_journal(self, header: str) -> None:
        """See `Target.start_journal`."""

    def append_journal(self, line: str) -> None:
        """See `Target.append_journal`."""

    def reset_journal(self) -> None:
        """See `Target.reset_journal`."""

    def length_bytes(self, path: str) -> int | None:
        """See `Target.length_bytes`."""
        try:
            source, name = self._opened(path)
        except NotFoundError:
            return None
        return source.listing().length_bytes(name) if name else None

    @contextlib.contextmanager
    def append(self, path: str, length_bytes: int) -> Iterator[Callable[[memoryview], None]]:
        """A function that takes the bytes of a file in order, and compares them with those that are there."""
        found = self.length_bytes(path)
        if found != length_bytes:
            raise OtherwiseError(f"{path} has {found} bytes, not {length_bytes}" if found is not None else f"no {path}")
        offset = 0
        buffer = bytearray()

        def compare(view: memoryview) -> None:
            nonlocal offset, buffer
            if len(buffer) < len(view):
                buffer = bytearray(len(view))
            there = memoryview(buffer)[: len(view)]
            self.read_into(path, offset, there)
            if bytes(view) != there:
                raise OtherwiseError(f"{path} has other bytes at {offset} or after")
            offset += len(view)

        yield compare

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Target.read_into`."""
        source, name = self._opened(path)
        source.read_into(name, offset, buffer)

    def put(self, path: str, data: Iterable[bytes]) -> None:
        """See `Target.put`; a further file lies in the directory, or beside a single file."""
        location = self.location.rstrip("/").rpartition("/")[0] or "." if self.is_file else self.location
        try:
            source, name = self._seen.setdefault(path, open_source(f"{location}/{path}"))
        except NotFoundError as e:
            raise OtherwiseError(f"no {path}") from e
        length_bytes, done = source.listing().length_bytes(name) if name else -1, 0
        for stretch in data:
            if done + len(stretch) > length_bytes or read(source, name, done, len(stretch)) != stretch:
                raise OtherwiseError(f"{path} is another one")
            done += len(stretch)
        if done != length_bytes:
            raise OtherwiseError(f"{path} is another one")

    def commit(self) -> None:
        """See `Target.commit`; raises OtherwiseError for a file that would not be written."""
        further = [] if self.is_file else [f.path for f in open_source(self.location)[0].listing() if f.path not in self._seen]
        if further:
            raise OtherwiseError(f"{further[0]} would not be written")

    def close(self) -> None:
        """See `Target.close`."""

    def require_lengths(self, files: Iterable[tuple[str, int]]) -> None:
        """Raise OtherwiseError unless every output file is there with its length, which tells most others at once."""
        for path, length_bytes in files:
            with self.append(path, length_bytes):
                pass

    def _opened(self, path: str) -> tuple[Source, str]:
        """The source of an output file, and its name there; nothing else at the destination is looked at."""
        if path not in self._seen:
            self._seen[path] = open_source(self.location if self.is_file else f"{self.location}/{path}")
        return self._seen[path]
