"""What every command does first: resolve the path, say which snapshot was taken, ask for progress."""

from __future__ import annotations

from ckpttools.cli import render
from ckpttools.snapshots.find import resolve


def take_snapshot(path: str) -> str:
    """The snapshot that a path stands for; what was decided is said on standard error."""
    resolved = resolve(path)
    for note in resolved.notes:
        render.write_line(f"ckpttools: {note}")
    return resolved.location


def snapshot_bytes(path: str) -> int:
    """Bytes of all files of a snapshot, for a progress bar."""
    from ckpttools.storage.source import open_source

    source, _ = open_source(path)
    return sum(f.length_bytes for f in source.listing())
