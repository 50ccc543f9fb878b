"""The newest snapshot that passes, over one run directory or several tiers of it (local disk, shared storage)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttools.snapshots.candidate import Snapshot
from ckpttools.snapshots.facts import Prover
from ckpttools.snapshots.policy import COMMITTED, FOREIGN
from ckpttools.snapshots.runs import Run


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer snapshot that did not pass."""

    location: str
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest snapshot that passes; no location when there is none."""

    passed_over: tuple[PassedOver, ...]
    location: str = ""
    run: str = ""
    step: int = -1


def find_latest(runs: Sequence[Run], *, depth: str = "structure", jobs: int = 1) -> Latest:
    """Go back from the highest step until a snapshot passes; of one step in several tiers, the tier named first goes first.

    Raises: StorageError.
    """
    provers = [Prover(run, depth=depth, jobs=jobs) for run in runs]
    places = [(i, s) for i, run in enumerate(runs) for s in run.snapshots if s.step is not None]
    places.sort(key=lambda place: (-(place[1].step or 0), place[0], -(place[1].time_s or 0)))
    passed_over: list[PassedOver] = []
    for i, snapshot in places:
        location, step = runs[i].place(snapshot), snapshot.step or 0
        why = _told(snapshot)
        if not why and provers[i].state(snapshot.path) != COMMITTED:
            why = provers[i].why.get(snapshot.path, "it does not pass")
        if not why:
            return Latest(tuple(passed_over), location, runs[i].location, step)
        passed_over.append(PassedOver(location, step, why))
    return Latest(tuple(passed_over))


def _told(snapshot: Snapshot) -> str:
    """What names alone say against a snapshot; what is only not recognised by its neighbours is opened."""
    if snapshot.state in (COMMITTED, FOREIGN):
        return ""
    return f"{snapshot.state}: {render_progress(snapshot)}"


def render_progress(snapshot: Snapshot) -> str:
    """What is missing of a snapshot, and how much of it is there. Pure."""
    if snapshot.done is None:
        return snapshot.why
    count = f"{snapshot.done} of {snapshot.expected}" if snapshot.expected is not None else str(snapshot.done)
    return f"{snapshot.why} ({count} there)"
