"""Resolves a path that is a run directory to one of its snapshots, or tells that it is one itself.

A name tells a step; whether a snapshot is committed is told by its layout. Modification times decide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckpttools.errors import FindingsError, NotRecognisedError, RefusedError, UsageError
from ckpttools.findings import WARNING, Finding
from ckpttools.layouts import open_snapshot, sniff
from ckpttools.snapshots.names import is_number, parse_step
from ckpttools.snapshots.runs import Run, candidates, read_run, run_of
from ckpttools.snapshots.trackers import LAST
from ckpttools.storage.source import Listing, open_source
from ckpttools.storage.tree import Tree, read_tree


@dataclass(frozen=True, slots=True)
class Resolved:
    """A location of a snapshot, and what was decided on the way to it."""

    location: str
    notes: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    """Further places that hold files of it."""
    findings: tuple[Finding, ...] = ()
    """What is wrong with the run directory that was named, whatever its snapshot is like."""


def resolve(location: str, roots: Sequence[str] = ()) -> Resolved:
    """The location itself when it is a snapshot; for a run directory its newest committed snapshot.

    With further roots each is a place of the same snapshot, or each a run directory; then it is the newest snapshot that is
    whole in all of them together.

    Raises: NotFoundError, StorageError. UsageError: when some roots are run directories and others snapshots.
        FindingsError: for a run in which no snapshot is committed.
    """
    locations = (location, *roots)
    runs = {place: found for place in locations if (found := _steps(place))}
    if not runs:
        return Resolved(location, (), tuple(roots))
    if len(locations) > 1:
        _require_runs([place for place in locations if place not in runs], next(iter(runs)))
    steps = {path: step for found in runs.values() for path, step in found}
    notes: list[str] = []
    last: NotRecognisedError | FindingsError | None = None
    for path in sorted(steps, key=lambda path: (-steps[path], path)):
        holders = [place for place in runs if any(path == known for known, _ in runs[place])]
        inner = [f"{place.rstrip('/')}/{path}" for place in holders]
        share = f" (in {len(holders)} of {len(locations)} roots)" if len(locations) > 1 else ""
        try:
            checkpoint = open_snapshot(inner[0], roots=inner[1:]).checkpoint
        except NotRecognisedError as e:
            notes.append(f"passed over {path}{share}: {e.message}")
            last = e
            continue
        absent = [f for f in checkpoint.findings if f.is_error and f.is_incompleteness]
        if checkpoint.commit.is_committed and not absent:
            kind = "is a run directory" if len(locations) == 1 else f"and {len(roots)} more are run directories"
            notes.append(f"{location} {kind}; took its newest committed snapshot, {path}{share}")
            dangling = [f for place in runs for f in _dangling(read_run(place), taken=path)]
            return Resolved(inner[0], tuple(notes), tuple(inner[1:]), tuple(dangling))
        why = f"not complete: {absent[0].where}: {absent[0].found}" if absent and share else "not committed"
        notes.append(f"passed over {path}{share}: {why}")
        last = FindingsError(f"no committed snapshot in run directory: {location}", absent or checkpoint.findings)
    raise last if last is not None else NotRecognisedError(f"no snapshot in run directory: {location}")


def _steps(location: str) -> list[tuple[str, int]]:
    """Path and step of the snapshots in a run directory; none for what is no run directory."""
    _, file = open_source(location)
    if file:
        return []
    tree = read_tree(location)
    found = sorted(candidates(tree), key=lambda c: (-c[1], c[0]))
    return [] if not found or is_snapshot(tree, [path for path, _ in found]) else found


def _dangling(run: Run, taken: str) -> Iterator[Finding]:
    """Trackers and links that name no snapshot; one that is not committed may be about to be, so naming it is a warning."""
    for claim in run.claims:
        if not claim.is_met and claim.path != taken:
            finding = replace(claim.finding(run.states.get(claim.path, "")), where=run.place_of(claim.tracker))
            yield replace(finding, severity=WARNING) if claim.path else finding


def _require_runs(others: Sequence[str], run: str) -> None:
    """Refuse a snapshot among run directories; a node that saved nothing is none."""
    for place in others:
        if open_source(place)[1] or is_snapshot(read_tree(place), []):
            hint = "name the same directory of every node: the run's, or that of one snapshot"
            raise UsageError(f"one root is a run directory and another a snapshot: {run} and {place}", hints=[hint])


def require_run(location: str, *, pattern: re.Pattern[str] | None = None, ranks: int = 0) -> Run:
    """The run directory at a location. HF Trainer's, with the final model beside the snapshots, is one.

    Args: ranks: how many there are, where snapshots are a file per rank and nothing else tells.

    Raises: NotFoundError, StorageError. RefusedError: when the location is a snapshot itself.
    """
    tree = read_tree(location)
    found = [path for path, _ in candidates(tree, pattern)]
    if (not found or _step_of(tree) is not None) and is_snapshot(tree, found):
        raise RefusedError(
            f"a snapshot, not a run directory: {location}", hints=["name the directory that holds the snapshots of the run"]
        )
    return run_of(tree, pattern=pattern, ranks=ranks)


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
