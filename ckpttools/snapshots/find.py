"""Resolves a path that is a run directory to one of its snapshots, or tells that it is one itself.

A name tells a step; whether a snapshot is committed is told by its layout. Modification times decide nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpttools.errors import FindingsError, NotRecognisedError, RefusedError
from ckpttools.layouts import open_snapshot, sniff
from ckpttools.snapshots.names import is_number, parse_step
from ckpttools.snapshots.runs import Run, candidates, run_of
from ckpttools.snapshots.trackers import LAST
from ckpttools.storage.source import Listing, open_source
from ckpttools.storage.tree import Tree, read_tree


@dataclass(frozen=True, slots=True)
class Resolved:
    """A location of a snapshot, and what was decided on the way to it."""

    location: str
    notes: tuple[str, ...] = ()


def resolve(location: str) -> Resolved:
    """The location itself when it is a snapshot; for a run directory its newest committed snapshot.

    Raises: NotFoundError, StorageError. FindingsError: for a run in which no snapshot is committed.
    """
    _, file = open_source(location)
    if file:
        return Resolved(location)
    tree = read_tree(location)
    found = sorted(candidates(tree), key=lambda c: (-c[1], c[0]))
    if not found or is_snapshot(tree, [path for path, _ in found]):
        return Resolved(location)
    notes: list[str] = []
    last: NotRecognisedError | FindingsError | None = None
    for path, _ in found:
        inner = f"{location.rstrip('/')}/{path}"
        try:
            checkpoint = open_snapshot(inner).checkpoint
        except NotRecognisedError as e:
            notes.append(f"passed over {path}: {e.message}")
            last = e
            continue
        absent = [f for f in checkpoint.findings if f.is_error and f.is_incompleteness]
        if checkpoint.commit.is_committed and not absent:
            notes.append(f"{location} is a run directory; took its newest committed snapshot, {path}")
            return Resolved(inner, tuple(notes))
        notes.append(f"passed over {path}: not committed")
        last = FindingsError(f"no committed snapshot in run directory: {location}", absent or checkpoint.findings)
    raise last if last is not None else NotRecognisedError(f"no snapshot in run directory: {location}")


def require_run(location: str, *, pattern: re.Pattern[str] | None = None) -> Run:
    """The run directory at a location. HF Trainer's, with the final model beside the snapshots, is one.

    Raises: NotFoundError, StorageError. RefusedError: when the location is a snapshot itself.
    """
    tree = read_tree(location)
    found = [path for path, _ in candidates(tree, pattern)]
    if (not found or _step_of(tree) is not None) and is_snapshot(tree, found):
        raise RefusedError(
            f"a snapshot, not a run directory: {location}", hints=["name the directory that holds the snapshots of the run"]
        )
    return run_of(tree, pattern=pattern)


def is_snapshot(tree: Tree, found: list[str]) -> bool:
    """Whether a directory is a snapshot itself, step-like names in it or not: some other file of it is recognised.

    Directories that are only numbers, in one that is named like a snapshot, are its ranks.
    """
    if found and _step_of(tree) is not None and all(is_number(path) for path in found):
        return True
    rest = [n for n in tree.files[""] if n not in found and n != LAST] if found else tree.below("")
    files = [f for f in map(tree.status, rest) if f is not None]
    source, _ = open_source(tree.location)
    return bool(files) and any(p.family == "model" for p in sniff(source, Listing(files)))


def _step_of(tree: Tree) -> int | None:
    return parse_step((tree.real or tree.location).rstrip("/").rpartition("/")[2])
