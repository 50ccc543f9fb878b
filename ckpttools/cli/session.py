"""What every command does first: resolve the path, say which snapshot was taken, ask for progress."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttools.cli import render
from ckpttools.findings import Finding
from ckpttools.snapshots.find import Resolved, resolve
from ckpttools.snapshots.trackers import describe_dangling


def take_snapshot(path: str) -> str:
    """The snapshot that a path stands for; what was decided, and what is wrong with its run, is said on standard error."""
    return _say(resolve(path), is_whole=True).location


def take_roots(path: str, roots: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """(location, further roots) of the snapshot that several paths or globs stand for together; says the same."""
    resolved = _say(_resolve_roots(path, roots), is_whole=True)
    return resolved.location, resolved.roots


def take_with_findings(path: str, roots: Sequence[str]) -> tuple[str, tuple[str, ...], tuple[Finding, ...]]:
    """As `take_roots`, for a command that reports what is wrong with the run by itself: the third value."""
    resolved = _say(_resolve_roots(path, roots), is_whole=False)
    return resolved.location, resolved.roots, resolved.findings


def _resolve_roots(path: str, roots: Sequence[str]) -> Resolved:
    from ckpttools.storage.union import expand

    first, *further = expand((path, *roots))
    return resolve(first, further)


def _say(resolved: Resolved, *, is_whole: bool) -> Resolved:
    for note in resolved.notes:
        render.write_line(f"ckpttools: {note}")
    for finding in resolved.findings if is_whole else ():
        render.write_line(f"ckpttools: {describe_dangling(finding)}")
    return resolved


def snapshot_bytes(path: str, roots: Sequence[str] = ()) -> int:
    """Bytes of all files of a snapshot, for a progress bar."""
    from ckpttools.storage.source import open_source

    return sum(f.length_bytes for location in (path, *roots) for f in open_source(location)[0].listing())
