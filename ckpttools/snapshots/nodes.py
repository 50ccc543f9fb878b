"""Run directories on the disks of several nodes, each with some of the ranks' files: what they hold together.

A snapshot of one name in several of them is one snapshot when its files are not all in any of them. Where one run directory has
all of them, the others are tiers with copies of it. By names alone; `latest` then opens what it takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpttools.snapshots.candidate import Snapshot
from ckpttools.snapshots.completeness import judge
from ckpttools.snapshots.local_files import files_by_rank, judge_ranks, known_ranks
from ckpttools.snapshots.policy import COMMITTED, DAMAGED, FOREIGN
from ckpttools.snapshots.runs import Run

Shares = Mapping[int, Snapshot]
"""Number of the run directory -> what it has of a snapshot."""


def count_ranks(runs: Sequence[Run]) -> list[Run]:
    """The run directories with what is a file per rank held against the ranks that any of them knows of. Pure."""
    expected: dict[str, int] = defaultdict(int)
    for run in runs:
        for s in run.snapshots:
            if s.parts:
                session = s.path.rpartition("/")[0]
                expected[session] = max(expected[session], run.ranks, known_ranks(run.tree, s.path))

    def counted(s: Snapshot) -> Snapshot:
        return judge_ranks(s, expected[s.path.rpartition("/")[0]]) if s.parts and s.state != DAMAGED else s

    return [replace(run, snapshots=tuple(map(counted, run.snapshots))) if expected else run for run in runs]


def unite(runs: Sequence[Run]) -> list[Run]:
    """The run directories with each share of a snapshot that they have together as committed as the whole is. Pure."""
    runs = count_ranks(runs)
    states: list[dict[str, Snapshot]] = [{} for _ in runs]
    for shares in find_shares(runs):
        whole = judge_together(runs, shares)
        if whole.state == COMMITTED:
            for i, share in shares.items():
                states[i][share.path] = replace(share, state=COMMITTED, why="", done=None, expected=None)
    return [
        replace(run, snapshots=tuple(states[i].get(s.path, s) for s in run.snapshots)) if states[i] else run
        for i, run in enumerate(runs)
    ]


def find_shares(runs: Sequence[Run]) -> list[Shares]:
    """The snapshots of which several run directories have a share, and none has all. Pure."""
    places: dict[str, dict[int, Snapshot]] = defaultdict(dict)
    for i, run in enumerate(runs):
        for snapshot in run.snapshots:
            if snapshot.step is not None:
                places[snapshot.path][i] = snapshot
    return [shares for shares in places.values() if is_shared(runs, shares)]


def is_shared(runs: Sequence[Run], shares: Shares) -> bool:
    """Whether the files of a snapshot are spread over run directories, and none has all. Pure."""
    names = {i: _names(runs[i], s) for i, s in shares.items()}
    union = set().union(*names.values())
    return may_be_shared(shares) and all(own != union for own in names.values())


def may_be_shared(shares: Shares) -> bool:
    """Whether several have a share, and nothing says that one is damaged or still being saved. Pure."""
    return len(shares) > 1 and not any(s.marks or s.state == DAMAGED or s.is_unreadable for s in shares.values())


def judge_together(runs: Sequence[Run], shares: Shares) -> Snapshot:
    """What the shares are together, by their names. Pure."""
    first = next(iter(shares.values()))
    if first.parts:
        held = {rank for s in shares.values() for rank in files_by_rank(s.parts)}
        expected = max(max(runs[i].ranks, known_ranks(runs[i].tree, s.path)) for i, s in shares.items())
        return judge_ranks(first, expected, held)
    found = judge(sorted(set().union(*(_names(runs[i], s) for i, s in shares.items()))))
    state = found.state if any(s.state != FOREIGN for s in shares.values()) else FOREIGN
    return replace(first, state=state, why=found.why, done=found.done, expected=found.expected)


def _names(run: Run, snapshot: Snapshot) -> set[str]:
    """The files of a share; of a snapshot that is a file per rank, the ranks."""
    if snapshot.parts:
        return set(map(str, files_by_rank(snapshot.parts)))
    return set(run.tree.below(snapshot.path)) if run.tree.is_directory(snapshot.path) else {""}
