"""A snapshot in a run directory, as far as names and lengths tell. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot in a run directory, as far as names and lengths tell."""

    path: str
    """Relative to the run directory."""
    step: int | None
    state: str
    why: str = ""
    """What speaks against it, for people."""
    done: int | None = None
    expected: int | None = None
    time_s: float | None = None
    """When it was committed, or last written to."""
    record: str = ""
    is_outside: bool = False
    """Whether it is reached through a link, so that it lies elsewhere."""
    marks: tuple[str, ...] = ()
    """Files or directories beside it that mark its save as not finished; they go after it."""
    parts: tuple[str, ...] = ()
    """Its files, where it is no directory and no single file; then `path` is a pattern that they match."""
    is_unreadable: bool = False
    """Whether the storage refuses to show it; then it is foreign."""

    @property
    def paths(self) -> tuple[str, ...]:
        """What lies in the run directory of it."""
        return self.parts or (self.path,)

    @property
    def order(self) -> tuple[int, float, str]:
        """Sorts by step, then by time."""
        return (-1 if self.step is None else self.step, self.time_s or 0, self.path)


def render_progress(snapshot: Snapshot) -> str:
    """What is missing of a snapshot, and how much of it is there. Pure."""
    if snapshot.done is None:
        return snapshot.why
    count = f"{snapshot.done} of {snapshot.expected}" if snapshot.expected is not None else str(snapshot.done)
    return f"{snapshot.why} ({count} there)"
