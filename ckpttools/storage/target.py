"""Target: the destination of a conversion; an output is complete or not there.

A destination on a local file system is built beside its place and renamed (`local_target`); on an object store each file
gets its final key and the commit record comes last (`upload`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ckpttools.storage.local_target import LocalTarget
from ckpttools.storage.source import is_url
from ckpttools.storage.upload import UrlTarget


class Target(Protocol):
    """Write access to one destination. Used by one run, from several threads."""

    location: str

    def begin(self, *, overwrite: bool, sources: Sequence[str]) -> None:
        """Take the destination, or refuse without touching anything.

        Raises: DestinationError: it exists, cannot be written, or overlaps a source. LockedError: another run has it.
        """
        ...

    def journal_lines(self) -> list[str]:
        """The complete lines of an earlier run's journal; empty when there was none."""
        ...

    def start_journal(self, header: str) -> None:
        """Throw away what an earlier run left, and start with one line."""
        ...

    def append_journal(self, line: str) -> None:
        """Record a line."""
        ...

    def reset_journal(self) -> None:
        """Forget all but the first line, so that the next run does all the work again."""
        ...

    def length_bytes(self, path: str) -> int | None:
        """Length of an output file as it is now; None when it is not there."""
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what was written to an output file. Raises StorageError when it has fewer bytes."""
        ...

    def put(self, path: str, data: Iterable[bytes]) -> None:
        """Write a further file, a stretch after the other."""
        ...

    def commit(self) -> None:
        """Make the output visible as a whole. Nothing is left of the work but the output."""
        ...

    def close(self) -> None:
        """Let go of the destination; what was written so far stays for the next run."""
        ...


def open_target(location: str, *, is_file: bool) -> LocalTarget | UrlTarget:
    """The target for a location that is to become one file, or a directory. Touches nothing."""
    if is_url(location):
        return UrlTarget(location, is_file=is_file)
    return LocalTarget(location, is_file=is_file)
