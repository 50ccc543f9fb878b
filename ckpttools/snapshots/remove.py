"""Deletes what was decided: checked once more, renamed to a trash name, removed in parallel, each with a line in the log.

A snapshot is whole under its name or not there under it; at no time is it half there. What fails is reported and the rest
goes on; what an interrupted run left under trash names is removed by the next. Hold the lock (`storage.runlock`) meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ckpttools.errors import StorageError
from ckpttools.snapshots.facts import PIN
from ckpttools.snapshots.policy import COMMITTED, Decision
from ckpttools.snapshots.runs import NESTS, Run, dated
from ckpttools.snapshots.trackers import read_tracker_claims
from ckpttools.storage.trash import append_line, find_trash, move_to_trash, name_in_trash, remove_tree

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of one snapshot that was to go."""

    path: str
    step: int | None
    length_bytes: int
    inodes: int
    reasons: tuple[str, ...]
    trash: str = ""
    """Its trash name; empty while it has its own."""
    error: str = ""
    """Why it is still there, in part or whole."""

    def line(self, now: float) -> str:
        """Its line in the audit log: one JSON object."""
        record = {
            "time": int(now),
            "path": self.path,
            "step": self.step,
            "bytes": self.length_bytes,
            "inodes": self.inodes,
            "reasons": list(self.reasons),
            "error": self.error or None,
        }
        return json.dumps(record)


def finish_interrupted(root: str, *, jobs: int, log: str, clock: Clock) -> list[Removal]:
    """Remove what earlier runs renamed and did not get to. Raises StorageError: the log cannot be written."""
    if log:
        append_line(log, "")  # before anything is gone
    found = [Removal(name_in_trash(t), None, 0, 0, ("left by an interrupted run",), t) for t in find_trash(root, NESTS)]
    return list(_empty_trash(root, found, jobs=jobs, log=log, clock=clock))


def remove(run: Run, decisions: Sequence[Decision], *, jobs: int, log: str, clock: Clock) -> Iterator[Removal]:
    """Delete the snapshots that are not to be kept, the oldest first; one answer each, as they are done.

    Raises: StorageError: the run directory or the log cannot be used; nothing more is deleted then.
    """
    if log:
        append_line(log, "")
    doomed = sorted((d for d in decisions if not d.keep), key=lambda d: d.snapshot.time_order)
    moved: list[Removal] = []
    guard = Guard(run, decisions)
    for decision in doomed:
        s = decision.snapshot
        removal = Removal(s.path, s.step, s.length_bytes, s.inodes, decision.reasons)
        try:
            changed = guard.what_changed(s.path)
            if changed:
                yield _logged(replace(removal, error=f"not deleted: {changed}"), log, clock)
            else:
                moved.append(replace(removal, trash=move_to_trash(run.location, s.path)))
        except StorageError as e:
            yield _logged(replace(removal, error=f"not deleted: {e.message}: {e.where}"), log, clock)
    yield from _empty_trash(run.location, moved, jobs=jobs, log=log, clock=clock)


class Guard:
    """Looks once more, right before a snapshot goes, whether the plan still holds.

    A few stats each, not another listing: the plan is as old as the renames before this one.
    """

    def __init__(self, run: Run, decisions: Sequence[Decision]) -> None:
        self._run = run
        self._snapshots = {s.path: s for s in run.snapshots}
        kept = [d.snapshot for d in decisions if d.keep and d.snapshot.state == COMMITTED]
        self._newest = max(kept, key=lambda s: s.order).path if kept else ""

    def what_changed(self, path: str) -> str:
        """What is other than when it was decided; empty when nothing is. Raises StorageError."""
        tree, snapshot = self._run.tree, self._snapshots[path]
        if tree.status(path) is None:
            return "it is gone already"
        if self._newest and tree.status(f"{self._newest}/{self._snapshots[self._newest].record}".rstrip("/")) is None:
            return f"{self._newest}, which was to stay, is gone"
        claims = read_tracker_claims(tree, NESTS, self._run.states, self._run.steps)
        naming = next((c.tracker for c in claims if c.path == path), "")
        if naming:
            return f"{naming} points to it now"
        if tree.status(f"{path}/{PIN}") is not None or tree.status(f"{path}{PIN}") is not None:
            return "it is pinned now"
        return "" if dated(tree, snapshot).time_s == snapshot.time_s else "it was written to since"


def _empty_trash(root: str, moved: Sequence[Removal], *, jobs: int, log: str, clock: Clock) -> Iterator[Removal]:
    with ThreadPoolExecutor(jobs) as pool:
        for removal, error in zip(moved, pool.map(lambda r: remove_tree(root, r.trash), moved), strict=True):
            yield _logged(replace(removal, error=error), log, clock)


def _logged(removal: Removal, log: str, clock: Clock) -> Removal:
    """With its line in the log; a full disk must not keep the rest from being freed."""
    if not log:
        return removal
    try:
        append_line(log, removal.line(clock()))
    except StorageError as e:
        return replace(removal, error=removal.error or f"deleted, but not logged: {e.message}: {e.where}")
    return removal
