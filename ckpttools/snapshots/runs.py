"""A run directory: its snapshots in order, each with its state, and what trackers claim about them.

One listing of names; then one stat per snapshot where a record tells the time of its commit. A snapshot is opened only when
its names do not fit those of its neighbours. Modification times decide nothing by themselves: the order is by step, and a
time that disagrees is a finding. Read `read_run` first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ckpttools.errors import StorageError
from ckpttools.findings import Finding
from ckpttools.snapshots.candidate import Snapshot
from ckpttools.snapshots.completeness import Completeness, judge
from ckpttools.snapshots.local_files import local_folders, local_snapshots
from ckpttools.snapshots.names import FILE_SUFFIXES, is_temporary, looks_like_snapshot, next_rank, parse_mark, parse_step
from ckpttools.snapshots.neighbours import compare_neighbours
from ckpttools.snapshots.policy import COMMITTED, DAMAGED, FOREIGN, UNFINISHED
from ckpttools.snapshots.trackers import MEGATRON, RELEASE, Claim, find_claims, read_tracker
from ckpttools.storage.object_trash import read_half_deleted
from ckpttools.storage.tree import Measure, Tree, read_tree

NESTS = ("", "checkpoint", "checkpoints", "ckpt")
"""Directories of a run in which trainers put their snapshots; torchtitan uses `checkpoint`."""
STAGE = "._dlrover_ckpt_stage"
"""Where DLRover counts the ranks that are done."""
_HOLDS_OTHERS = re.compile(r"\d+|epoch[-_]\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """A run directory, as listed."""

    tree: Tree
    snapshots: tuple[Snapshot, ...]
    """By step, then by time: the newest last. Foreign ones first."""
    claims: tuple[Claim, ...] = ()
    ranks: int = 0
    """How many ranks there are, as told; 0 when it was not. Only what is a file per rank needs to be told."""

    @property
    def location(self) -> str:
        """Where it is."""
        return self.tree.location

    @property
    def committed(self) -> list[Snapshot]:
        """The committed ones, the newest last."""
        return [s for s in self.snapshots if s.state == COMMITTED]

    @cached_property
    def states(self) -> dict[str, str]:
        """State by path."""
        return {s.path: s.state for s in self.snapshots}

    @cached_property
    def steps(self) -> dict[str, int]:
        """Step by path, of those that have one."""
        return {s.path: s.step for s in self.snapshots if s.step is not None}

    def place(self, snapshot: Snapshot) -> str:
        """The location of a snapshot."""
        return self.place_of(snapshot.path)

    def place_of(self, path: str) -> str:
        """The location of something in the run directory."""
        return f"{self.location.rstrip('/')}/{path}"

    def claims_on(self, path: str) -> tuple[str, ...]:
        """The trackers and links that name a snapshot."""
        return tuple(c.tracker for c in self.claims if c.path == path)

    def findings(self) -> list[Finding]:
        """Trackers that name nothing good, and orders that disagree. Pure."""
        states = self.states
        found = [c.finding(states.get(c.path, "")) for c in self.claims if not c.is_met]
        found += [
            Finding("unreadable-file", s.path, "a directory that can be looked at", s.why)
            for s in self.snapshots
            if s.is_unreadable
        ]
        for older, newer in _out_of_order(self.committed):
            expected = f"committed after {older.path}, which is of step {older.step}"
            found.append(Finding("order-disagrees", newer.path, expected, "committed before it"))
        return found


def _out_of_order(committed: list[Snapshot]) -> Iterator[tuple[Snapshot, Snapshot]]:
    """Neighbours by step whose times are the other way round."""
    for older, newer in pairwise(committed):
        if older.time_s is not None and newer.time_s is not None and newer.time_s < older.time_s and newer.step != older.step:
            yield older, newer


def read_run(location: str, *, pattern: re.Pattern[str] | None = None) -> Run:
    """A run directory. Raises NotFoundError, StorageError."""
    return run_of(read_tree(location), pattern=pattern)


def run_of(tree: Tree, *, pattern: re.Pattern[str] | None = None, ranks: int = 0) -> Run:
    """The snapshots of a listed run directory. Raises StorageError."""
    refused = next((d for d in tree.unreadable if d in NESTS or STAGE in d.split("/")), "")  # what tells of every snapshot
    if refused:
        raise StorageError(tree.unreadable[refused], where=f"{tree.location}/{refused}")
    found = [_judge(tree, path, step) for path, step in candidates(tree, pattern)]
    local = list(local_snapshots(tree, ranks))
    parts, folders = {part for s in local for part in s.parts}, local_folders(tree)
    found = [s for s in found if s.path not in parts and s.path not in folders]
    found = [_dated_if_readable(tree, s) for s in (*_mark_unfinished(tree, found), *local)]
    committed = {s.path for s in found if s.state == COMMITTED}
    found = list(compare_neighbours(tree, sorted(found, key=lambda s: s.order)))
    found = [_dated_if_readable(tree, s) if s.path in committed and s.state != COMMITTED else s for s in found]
    found += list(_strangers(tree, {s.path for s in found} | folders))
    run = Run(tree, tuple(sorted(found, key=lambda s: s.order)), ranks=ranks)
    return replace(run, claims=tuple(find_claims(tree, nests_of(tree), run.states, run.steps)))


def candidates(tree: Tree, pattern: re.Pattern[str] | None = None) -> Iterator[tuple[str, int]]:
    """Path and step of what is named like a snapshot; a link to another one in the same run is none, nor one to nothing."""
    for nest in nests_of(tree):
        prefix = f"{nest}/" if nest else ""
        names = [*tree.subdirectories(nest)]
        names += [n for n in tree.files[nest] if n.endswith(FILE_SUFFIXES) or pattern is not None]
        for name in names:
            step = _step_of(tree, prefix, name, pattern)
            if step is None or name.startswith(".") or read_half_deleted(tree, prefix + name) is not None:
                continue
            if next_rank(name) and next_rank(name) in names:  # one of several files, of which none is the snapshot
                continue
            if prefix + name not in tree.links or _is_only_name(tree, prefix + name, pattern):
                yield prefix + name, step


def nests_of(tree: Tree) -> list[str]:
    """Where in a run its snapshots are, each place once. Pure."""
    return [n for n in NESTS if tree.is_directory(n) and not (n in tree.links and tree.linked(n) in NESTS[1:])]


def _step_of(tree: Tree, prefix: str, name: str, pattern: re.Pattern[str] | None) -> int | None:
    """The step in a name, or in what a directory is to be called when it is done; 0 for what Megatron converted."""
    if name == RELEASE and tree.is_directory(prefix + name) and read_tracker(tree, prefix + MEGATRON) == RELEASE:
        return 0
    marked = parse_mark(name) if tree.is_directory(prefix + name) else None
    if marked is not None and (is_temporary(name) or not (tree.is_directory(prefix + marked) or tree.is_file(prefix + marked))):
        return parse_step(marked, pattern)
    return parse_step(name, pattern)


def _is_only_name(tree: Tree, link: str, pattern: re.Pattern[str] | None) -> bool:
    """Whether a link leads to something that has no name as a snapshot of its own in this run."""
    directory, _, name = tree.linked(link).rpartition("/")
    is_another = bool(name) and directory in NESTS and parse_step(name, pattern) is not None
    return not is_another and tree.status(link) is not None


def _judge(tree: Tree, path: str, step: int) -> Snapshot:
    name = path.rpartition("/")[2]
    outside = any(p in tree.links for p in (path, path.rpartition("/")[0]))
    if not tree.is_directory(path):
        return Snapshot(path, step, COMMITTED, is_outside=outside)
    refusal = tree.refusal(path)
    if refusal:
        return Snapshot(path, step, FOREIGN, refusal, is_outside=outside, is_unreadable=True)
    if _HOLDS_OTHERS.fullmatch(name):
        inner = (*tree.subdirectories(path), *(n for n in tree.files[path] if n.endswith(FILE_SUFFIXES)))
        if any(parse_step(n) is not None and not n.isdigit() for n in inner):
            return Snapshot(path, None, FOREIGN, "holds snapshots itself", is_outside=outside)
    found = judge(list(tree.below(path)))
    if parse_mark(name) is not None and found.state == COMMITTED:
        found = Completeness(UNFINISHED, "its name says that it is not finished")
    return _with(Snapshot(path, step, found.state, is_outside=outside), found)


def _with(snapshot: Snapshot, found: Completeness) -> Snapshot:
    return replace(snapshot, state=found.state, why=found.why, done=found.done, expected=found.expected, record=found.record)


def _mark_unfinished(tree: Tree, found: Iterable[Snapshot]) -> Iterator[Snapshot]:
    """Marks beside a snapshot say that its save is going on or has died: NeMo's, ML Flashpoint's, DLRover's."""
    marks: dict[str, list[str]] = defaultdict(list)
    stages: dict[int, list[str]] = defaultdict(list)
    for nest in nests_of(tree):
        prefix = f"{nest}/" if nest else ""
        for name in (*tree.files[nest], *tree.subdirectories(nest)):
            base = parse_mark(name)
            if base is not None and not (is_temporary(name) and tree.is_directory(prefix + name)):
                marks[prefix + base].append(prefix + name)
        for name in tree.subdirectories(prefix + STAGE):
            step = name.partition(".")[0]
            if step.isascii() and step.isdigit():
                stages[int(step)].append(f"{prefix}{STAGE}/{name}")
    for s in found:
        own = [m for m in marks[s.path] if not is_temporary(m.rpartition("/")[2]) or tree.is_directory(s.path)]
        stage = stages[s.step] if s.step is not None and s.state != FOREIGN else []
        if stage:
            done = sum(1 for m in stage for _ in tree.below(m))
            s = replace(s, state=UNFINISHED, why=f"{STAGE} is there", done=done)
        elif own and s.state == COMMITTED:
            s = replace(s, state=UNFINISHED, why=f"{own[0].rpartition('/')[2]} is there")
        yield replace(s, marks=(*own, *stage))


def _dated_if_readable(tree: Tree, snapshot: Snapshot) -> Snapshot:
    try:
        return dated(tree, snapshot)
    except StorageError as e:
        return replace(snapshot, state=FOREIGN, why=e.message, is_unreadable=True)


def dated(tree: Tree, snapshot: Snapshot) -> Snapshot:
    """With its time; the record of the commit has it, and without one the last file that was written to, or its mark.

    Raises: StorageError.
    """
    found = _dated(tree, snapshot)
    times = [found.time_s, *(_last_written(tree, mark, tree.measure(mark)) for mark in snapshot.marks)]
    return replace(found, time_s=max((t for t in times if t is not None), default=None))


def _dated(tree: Tree, snapshot: Snapshot) -> Snapshot:
    if snapshot.state == COMMITTED and not snapshot.parts and (snapshot.record or not tree.is_directory(snapshot.path)):
        found = tree.status(f"{snapshot.path}/{snapshot.record}".rstrip("/"))
        if found is None or not found.is_regular:
            return replace(snapshot, state=UNFINISHED, why="it went away while it was looked at")
        if not found.length_bytes:
            why = f"{snapshot.record or 'the file'} is empty"
            return replace(snapshot, state=UNFINISHED, why=why, time_s=found.modified_s)
        return replace(snapshot, time_s=found.modified_s)
    measure = tree.measure(*snapshot.paths)
    time_s = _last_written(tree, snapshot.path, measure)
    if snapshot.state == COMMITTED and measure.empty and any(n.endswith(FILE_SUFFIXES) for n in measure.empty):
        return replace(snapshot, state=DAMAGED, why=f"{measure.empty[0]} is empty", time_s=time_s)
    return replace(snapshot, time_s=time_s)


def _last_written(tree: Tree, path: str, measure: Measure) -> float | None:
    """When the last of its files was written to; without files, when it was made."""
    if measure.last_s is not None:
        return measure.last_s
    own = tree.status(path)
    return own.modified_s if own else None


def _strangers(tree: Tree, known: set[str]) -> Iterator[Snapshot]:
    """What has a step in its name and is no snapshot by the rules, so that people hear that it is left alone."""
    for nest in nests_of(tree):
        prefix = f"{nest}/" if nest else ""
        for name in tree.subdirectories(nest):
            path = prefix + name
            if path in known or path in tree.links or name.startswith(".") or not looks_like_snapshot(name):
                continue
            if read_half_deleted(tree, path) is None:
                yield Snapshot(path, None, FOREIGN, "not a name of a snapshot")
