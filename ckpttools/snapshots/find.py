"""Finds the snapshots in a run directory, newest first, and resolves a path that is a run to one of them.

A name tells a step; whether a snapshot is committed is told by its layout. Modification times decide nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpttools.errors import FindingsError, NotRecognisedError
from ckpttools.layouts import open_snapshot, sniff
from ckpttools.storage.source import Listing, Source, open_source

_STEP = re.compile(r"(?:step|iter(?:ation)?|checkpoint|ckpt|tag)s?[-_=]?0*(\d+)(?!.*(?:step|iter)[-_=]?\d)", re.IGNORECASE)
_NUMBER = re.compile(r"0*(\d+)")
_NESTS = ("", "checkpoint", "checkpoints", "ckpt")
"""Directories of a run in which trainers put their snapshots; torchtitan uses `checkpoint`."""
_FILE_SUFFIXES = (".ckpt", ".pt", ".pth", ".safetensors", ".bin")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something in a run directory that is named like a snapshot."""

    path: str
    """Relative to the run directory."""
    step: int


def parse_step(name: str) -> int | None:
    """The step in the name of a snapshot: `step-100`, `step_100_ckp`, `iter_0000100`, `epoch=1-step=100.ckpt`, `100`. Pure."""
    match = _STEP.search(name) or _NUMBER.fullmatch(name.partition(".")[0])
    return int(match.group(1)) if match else None


def candidates(listing: Listing) -> list[Candidate]:
    """What in a run directory is named like a snapshot, newest step first. Pure."""
    found: list[Candidate] = []
    for nest in _NESTS:
        prefix = f"{nest}/" if nest else ""
        names = [d[len(prefix) :] for d in listing.subdirectories(nest)]
        names += [f.path[len(prefix) :] for f in listing.in_directory(nest) if f.path.endswith(_FILE_SUFFIXES)]
        found += [Candidate(prefix + n, step) for n in names if (step := parse_step(n)) is not None]
    return sorted(found, key=lambda c: (-c.step, c.path))


@dataclass(frozen=True, slots=True)
class Resolved:
    """A location of a snapshot, and what was decided on the way to it."""

    location: str
    notes: tuple[str, ...] = ()


def resolve(location: str) -> Resolved:
    """The location itself when it is a snapshot; for a run directory its newest committed snapshot.

    Raises: NotFoundError, StorageError. FindingsError: for a run in which no snapshot is committed.
    """
    source, file = open_source(location)
    if file:
        return Resolved(location)
    listing = source.listing()
    found = candidates(listing)
    if not found or _is_snapshot(source, listing, found):
        return Resolved(location)
    notes: list[str] = []
    last: NotRecognisedError | FindingsError | None = None
    for candidate in found:
        inner = f"{location.rstrip('/')}/{candidate.path}"
        try:
            checkpoint = open_snapshot(inner).checkpoint
        except NotRecognisedError as e:
            notes.append(f"passed over {candidate.path}: {e.message}")
            last = e
            continue
        absent = [f for f in checkpoint.findings if f.is_error and f.is_incompleteness]
        if checkpoint.commit.is_committed and not absent:
            notes.append(f"{location} is a run directory; took its newest committed snapshot, {candidate.path}")
            return Resolved(inner, tuple(notes))
        notes.append(f"passed over {candidate.path}: not committed")
        last = FindingsError(f"no committed snapshot in run directory: {location}", absent or checkpoint.findings)
    raise last if last is not None else NotRecognisedError(f"no snapshot in run directory: {location}")


def _is_snapshot(source: Source, listing: Listing, found: list[Candidate]) -> bool:
    """Whether a directory with step-like names in it is a snapshot itself: something but those names is recognised."""
    names = tuple(c.path for c in found)
    rest = [f for f in listing if not any(f.path == n or f.path.startswith(n + "/") for n in names)]
    if not rest:
        return False
    return any(p.family == "model" for p in sniff(source, Listing(rest)))
