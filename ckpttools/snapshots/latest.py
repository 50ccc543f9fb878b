"""The newest snapshot that passes, over one run directory or several tiers of it (local disk, shared storage)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ckpttools.snapshots.candidate import Snapshot, render_progress
from ckpttools.snapshots.facts import Prover, validate_places, validate_ranks
from ckpttools.snapshots.local_files import files_by_rank
from ckpttools.snapshots.nodes import Shares, count_ranks, is_shared, judge_together, may_be_shared
from ckpttools.snapshots.policy import COMMITTED, DAMAGED, FOREIGN
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
    further: tuple[str, ...] = ()
    """The other places of a snapshot that is spread over several run directories."""
    counted_ranks: int = 0
    """How many ranks have a file of it, where snapshots are a file per rank and do not say how many there were."""


def find_latest(runs: Sequence[Run], *, depth: str = "structure", jobs: int = 1) -> Latest:
    """Go back from the highest step until a snapshot passes.

    Of one step in several run directories (tiers) the one named first goes first. Where none of them is whole, and each has
    another share of the files (disks of nodes), it is what they have together.

    Raises: StorageError.
    """
    runs = count_ranks(runs)
    provers = [Prover(run, depth=depth, jobs=jobs) for run in runs]
    places = [(i, s) for i, run in enumerate(runs) for s in run.snapshots if s.step is not None]
    places.sort(key=lambda place: (-(place[1].step or 0), place[0], -(place[1].time_s or 0)))
    passed_over: list[PassedOver] = []
    for step, group in groupby(places, key=lambda place: place[1].step or 0):
        alike = list(group)
        failed: list[PassedOver] = []
        for i, snapshot in alike:
            location, why = runs[i].place(snapshot), _told(snapshot)
            if not why and provers[i].state(snapshot.path) != COMMITTED:
                why = provers[i].why.get(snapshot.path, "it does not pass")
            if not why:
                counted = len(files_by_rank(snapshot.parts))
                return Latest((*passed_over, *failed), location, runs[i].location, step, counted_ranks=counted)
            failed.append(PassedOver(location, step, why))
        for shares in _shares(provers, alike):
            locations = [runs[i].place(s) for i, s in shares.items()]
            why = _prove_together(runs, shares, depth=depth, jobs=jobs)
            if not why:
                run, further = runs[next(iter(shares))].location, tuple(locations[1:])
                counted = len({rank for s in shares.values() for rank in files_by_rank(s.parts)})
                return Latest(tuple(passed_over), locations[0], run, step, further, counted)
            if is_shared(runs, shares):
                failed.append(PassedOver(" + ".join(locations), step, f"not whole together: {why}"))
        passed_over += failed
    return Latest(tuple(passed_over))


def _shares(provers: Sequence[Prover], alike: Sequence[tuple[int, Snapshot]]) -> Iterator[Shares]:
    """The snapshots of a step of which several run directories may have a share; one that is damaged is not mended by others."""
    for path in dict.fromkeys(s.path for _, s in alike):
        shares = {i: s for i, s in alike if s.path == path}
        is_damaged = any(provers[i].is_proved(path) and provers[i].state(path) == DAMAGED for i in shares)
        if not is_damaged and may_be_shared(shares):
            yield shares


def _prove_together(runs: Sequence[Run], shares: Shares, *, depth: str, jobs: int) -> str:
    """What speaks against a snapshot that is spread over run directories; empty when nothing does."""
    whole = judge_together(runs, shares)
    if whole.state != COMMITTED:
        return _told(whole) or whole.why or "not recognised"
    if whole.parts:
        copies: dict[int, list[str]] = defaultdict(list)
        for i, share in shares.items():
            for rank, files in files_by_rank(share.parts).items():
                copies[rank] += map(runs[i].place_of, files)
        state, why = validate_ranks(copies, depth=depth, jobs=jobs)
    else:
        state, why = validate_places([runs[i].place(s) for i, s in shares.items()], depth=depth, jobs=jobs)
    return "" if state == COMMITTED else why or "it does not pass"


def _told(snapshot: Snapshot) -> str:
    """What names alone say against a snapshot; what is only not recognised by its neighbours is opened."""
    if snapshot.state in (COMMITTED, FOREIGN):
        return ""
    return f"{snapshot.state}: {render_progress(snapshot)}"
