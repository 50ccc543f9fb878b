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
from ckpttools.snapshots.names import parse_mark, parse_step
from ckpttools.snapshots.policy import COMMITTED, Decision
from ckpttools.snapshots.runs import NESTS, STAGE, Run, dated, nests_of
from ckpttools.snapshots.trackers import read_tracker_claims
from ckpttools.storage.object_trash import ObjectTrash, open_trash
from ckpttools.storage.source import ListedFile
from ckpttools.storage.trash import Hidden, append_line, require_log
from ckpttools.storage.tree import Tree, read_tree

Clock = Callable[[], float]
_RELIST_S = 60


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of one snapshot that was to go."""

    path: str
    step: int | None
    length_bytes: int
    inodes: int
    reasons: tuple[str, ...]
    error: str = ""
    """Why it is still there, in part or whole."""
    is_mark: bool = False
    """Whether it is no snapshot but what marked the save of one as not finished."""

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


def finish_interrupted(run: Run, *, jobs: int, log: str, clock: Clock, grace_s: float = 0) -> list[Removal]:
    """Remove what earlier runs hid and did not get to. Raises StorageError: the log cannot be written.

    Args: grace_s: younger marks may be those of a new save under the same name, and stay.
    """
    if log:
        require_log(log)  # before anything is gone
    trash = open_trash(run.location)
    if isinstance(trash, ObjectTrash):
        hidden = trash.leftovers(run.tree)
    else:
        nests = (*NESTS, *(f"{nest}/{STAGE}".lstrip("/") for nest in NESTS))
        found = trash.leftovers(nests)
        hidden = [replace(h, marks=tuple(_marks_left(run, h, clock() - grace_s))) for h in found]
    doomed = [(Removal(h.path, None, 0, 0, ("left by an interrupted run",)), h) for h in hidden]
    return list(_clear(run, doomed, jobs=jobs, log=log, clock=clock))


def _marks_left(run: Run, hidden: Hidden, before_s: float) -> Iterator[str]:
    """The marks of a snapshot that an interrupted run hid; not those of a save that has begun under its name since."""
    tree = run.tree
    directory, _, name = hidden.path.rpartition("/")
    if tree.is_directory(hidden.path) or tree.is_file(hidden.path) or not tree.is_directory(directory):
        return
    prefix = f"{directory}/" if directory else ""
    step = parse_step(name)
    there = [prefix + n for n in (*tree.files[directory], *tree.subdirectories(directory)) if parse_mark(n) == name]
    there += [f"{prefix}{STAGE}/{n}" for n in tree.subdirectories(prefix + STAGE) if n == f"{step}.done"]
    for mark in there:
        status = tree.status(mark)
        if status is not None and status.modified_s is not None and status.modified_s < min(hidden.hidden_s, before_s):
            yield mark


def remove(run: Run, decisions: Sequence[Decision], *, jobs: int, log: str, clock: Clock) -> Iterator[Removal]:
    """Delete the snapshots that are not to be kept, the oldest first; one answer each, as they are done.

    Raises: StorageError: the run directory or the log cannot be used; nothing more is deleted then.
    """
    if log:
        require_log(log)
    doomed = sorted((d for d in decisions if not d.keep), key=lambda d: d.snapshot.time_order)
    marks = {s.path: s.marks for s in run.snapshots}
    trash = open_trash(run.location)
    moved: list[tuple[Removal, Hidden]] = []
    guard = Guard(run, decisions, clock)
    for decision in doomed:
        s = decision.snapshot
        removal = Removal(s.path, s.step, s.length_bytes, s.inodes, decision.reasons)
        try:
            if guard.is_gone(s.path):  # a trainer deletes, too
                yield _logged(replace(removal, reasons=(*removal.reasons, "another process has deleted it")), log, clock)
                continue
            changed = guard.what_changed(s.path)
            if changed:
                yield _logged(replace(removal, error=f"not deleted: {changed}"), log, clock)
            else:
                moved.append((removal, trash.hide(s.path, marks[s.path])))
        except StorageError as e:
            yield _logged(replace(removal, error=f"not deleted: {e.message}: {e.where}"), log, clock)
    yield from _clear(run, moved, jobs=jobs, log=log, clock=clock)


class Guard:
    """Looks once more, right before a snapshot goes, whether the plan still holds.

    A few stats each, not another listing: the plan is as old as the renames before this one. An object store is listed again
    first, and now and then while deleting goes on.
    """

    def __init__(self, run: Run, decisions: Sequence[Decision], clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self._tree = run.tree if run.tree.is_local else read_tree(run.location)
        self._listed_s = clock()
        self._snapshots = {s.path: s for s in run.snapshots}
        kept = [d.snapshot for d in decisions if d.keep and d.snapshot.state == COMMITTED]
        self._newest = max(kept, key=lambda s: s.order).path if kept else ""

    def is_gone(self, path: str) -> bool:
        """Whether another process has deleted it. Raises StorageError."""
        if not self._tree.is_local and self._clock() - self._listed_s > _RELIST_S:
            self._tree = read_tree(self._run.location)
            self._listed_s = self._clock()
        return not self._is_there(path)

    def _is_there(self, path: str) -> bool:
        known = self._snapshots.get(path)
        if known is not None and known.parts:
            return all(self._tree.status(part) is not None for part in known.parts)
        return self._tree.status(path) is not None or (not self._tree.is_local and self._tree.is_directory(path))

    def what_changed(self, path: str) -> str:
        """What is other than when it was decided; empty when nothing is. Raises StorageError."""
        tree, snapshot = self._tree, self._snapshots[path]
        if self._newest and not self._is_there(f"{self._newest}/{self._snapshots[self._newest].record}".rstrip("/")):
            return f"{self._newest}, which was to stay, is gone"
        claims = read_tracker_claims(tree, nests_of(tree), self._run.states, self._run.steps)
        naming = next((c.tracker for c in claims if c.path == path), "")
        if naming:
            return f"{naming} points to it now"
        if tree.status(f"{path}/{PIN}") is not None or tree.status(f"{path}{PIN}") is not None:
            return "it is pinned now"
        is_as_listed = tree.is_local or _objects(tree, path) == _objects(self._run.tree, path)
        return "" if is_as_listed and dated(tree, snapshot).time_s == snapshot.time_s else "it was written to since"


def _objects(tree: Tree, path: str) -> dict[str, ListedFile | None]:
    return {name: tree.status(f"{path}/{name}".rstrip("/")) for name in tree.below(path)}


def _clear(run: Run, moved: Sequence[tuple[Removal, Hidden]], *, jobs: int, log: str, clock: Clock) -> Iterator[Removal]:
    trash = open_trash(run.location)
    with ThreadPoolExecutor(jobs) as pool:
        for (removal, _), cleared in zip(moved, pool.map(trash.clear, [hidden for _, hidden in moved]), strict=True):
            yield _logged(replace(removal, error=cleared.error), log, clock)
            for mark, error in cleared.marks.items():
                reasons = (f"marks {removal.path}, which is gone",)
                yield _logged(Removal(mark, removal.step, 0, 1, reasons, error, is_mark=True), log, clock)


def _logged(removal: Removal, log: str, clock: Clock) -> Removal:
    """With its line in the log; a full disk must not keep the rest from being freed."""
    if not log:
        return removal
    try:
        append_line(log, removal.line(clock()))
    except StorageError as e:
        return replace(removal, error=removal.error or f"deleted, but not logged: {e.message}: {e.where}")
    return removal
