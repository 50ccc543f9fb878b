"""The exceptions of ckpttools and the exit codes that go with them.

One tree: every error that a user can cause or meet is a `CkpttoolsError`, carries what a message needs
(where, expected, found, hint) and knows its exit code. Only `cli` turns them into text and a status.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from ckpttools.findings import Finding


class ExitCode(IntEnum):
    """What a command's exit status says; the same in every command."""

    OK = 0
    WRONG = 1
    USAGE = 2
    INCOMPLETE = 3
    FAILED = 4
    LOCKED = 5
    INTERRUPTED = 130


EXIT_CODE_MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "it is well",
    ExitCode.WRONG: "checked, and something is wrong: damage, a difference, an alert",
    ExitCode.USAGE: "wrong usage: an unknown option, a value that does not parse, options that exclude each other",
    ExitCode.INCOMPLETE: "not committed or not complete: a save that did not finish, a file or rank that is missing",
    ExitCode.FAILED: "could not be done: not found, nothing recognised, I/O error, no space, no permission, missing extra",
    ExitCode.LOCKED: "another run holds the lock",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C or SIGTERM); what was written so far can be resumed",
}


class CkpttoolsError(Exception):
    """Something a user can understand and act on; never a bug of ours."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        expected: str = "",
        found: str = "",
        hints: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.expected = expected
        self.found = found
        self.hints = tuple(hints)


class UsageError(CkpttoolsError):
    """The command was called in a way that cannot be meant."""

    exit_code = ExitCode.USAGE


class NotFoundError(CkpttoolsError):
    """There is nothing at the given location."""


class NotRecognisedError(CkpttoolsError):
    """Something is there, and no layout knows it (or several could be meant)."""


class StorageError(CkpttoolsError):
    """The storage refused or broke: I/O error, no permission, no space, a file that shrank while it was read."""

    finding_code: ClassVar[str] = "unreadable-file"
    """The code of the finding that a check makes of it when it goes on."""


class ShortReadError(StorageError):
    """A file ends before the bytes that were there when it was listed."""

    finding_code = "file-too-short"


class BadStreamError(StorageError):
    """A compressed stretch does not decode."""

    finding_code = "bad-container"


class MissingExtraError(CkpttoolsError):
    """An optional dependency is needed and not installed."""


class DestinationError(CkpttoolsError):
    """The destination exists, or cannot be written."""


class DestinationExistsError(DestinationError):
    """Something is at the destination, and nothing was said about replacing it."""


class LockedError(CkpttoolsError):
    """Another run is writing to the same destination."""

    exit_code = ExitCode.LOCKED


class RefusedError(CkpttoolsError):
    """A safety rule forbids what was asked, and nothing was touched: a plan that keeps nothing, a clock that is wrong."""


class NothingValidError(CkpttoolsError):
    """A run directory has no snapshot that passes."""

    exit_code = ExitCode.INCOMPLETE


class ConversionError(CkpttoolsError):
    """A conversion cannot be done as asked: a dtype the target lacks, names that collide, nothing selected."""


class FindingsError(CkpttoolsError):
    """The checkpoint has findings that stop the operation; they are carried along."""

    def __init__(self, message: str, findings: Sequence[Finding], *, hints: Sequence[str] = ()) -> None:
        super().__init__(message, hints=hints)
        self.findings = tuple(findings)

    @property
    def exit_status(self) -> ExitCode:
        """FAILED when something could not be read, INCOMPLETE when nothing but incompleteness was found, else WRONG."""
        errors = [f for f in self.findings if f.is_error]
        if any(f.code == "unreadable-file" for f in errors):
            return ExitCode.FAILED
        return ExitCode.INCOMPLETE if errors and all(f.is_incompleteness for f in errors) else ExitCode.WRONG
