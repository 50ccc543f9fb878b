"""What every command does first: resolve the path, say which snapshot was taken, ask for progress."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.cli import render
from ckpttools.snapshots.find import Resolved, resolve


def take_snapshot(path: str) -> str:
    """The snapshot that a path stands for; what was decided is said on standard error."""
    return _say(resolve(path)).location


def take_roots(path: str, roots: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """(location, further roots) of the snapshot that several paths or globs stand for together."""
    from ckpttools.storage.union import expand

    first, *further = expand((path, *roots))
    resolved = _say(resolve(first, further))
    return resolved.location, resolved.roots


def _say(resolved: Resolved) -> Resolved:
    for note in resolved.notes:
        render.write_line(f"ckpttools: {note}")
    return resolved


def snapshot_bytes(path: str, roots: Sequence[str] = ()) -> int:
    """Bytes of all files of a snapshot, for a progress bar."""
    from ckpttools.storage.source import open_source

    return sum(f.length_bytes for location in (path, *roots) for f in open_source(location)[0].listing())
