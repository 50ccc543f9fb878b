"""Snapshots of one run have the same files; one with fewer than its neighbours is looked at more closely.

Opening every snapshot of a long run takes hours, and names alone do not say that the last rank's file is missing. So only
the odd ones are opened: a run that went on with fewer ranks costs one opening, and a lost file is found.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckpttools.errors import NotFoundError, NotRecognisedError, StorageError
from ckpttools.layouts import open_snapshot
from ckpttools.snapshots.candidate import Snapshot
from ckpttools.snapshots.policy import COMMITTED, DAMAGED, FOREIGN, UNFINISHED
from ckpttools.storage.tree import Tree

_LAST_WRITTEN = ("metadata.json", "metadata.pth", "trainer_state.json", "meta.pt")
"""Megatron-core's, fms-fsdp's, HF Trainer's and Lightning's: where the neighbours have one, so must this."""
_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")
Names = frozenset[str]


def compare_neighbours(tree: Tree, found: Sequence[Snapshot]) -> Iterator[Snapshot]:
    """The snapshots in order, each held against the committed ones before and after it. Raises StorageError."""
    names = [frozenset(tree.below(s.path)) if s.state != FOREIGN and tree.is_directory(s.path) else None for s in found]
    committed = [i for i, s in enumerate(found) if s.state == COMMITTED and names[i]]
    for i, snapshot in enumerate(found):
        own = names[i]
        if own is None or snapshot.state not in (COMMITTED, UNFINISHED):
            yield snapshot
            continue
        place = bisect_left(committed, i)
        beside = committed[max(0, place - 1) : place] + committed[place : place + 2]
        near = [n for j in beside if j != i and (n := names[j])]
        if snapshot.state == COMMITTED:
            fuller = next((n for n in near if own < n), None)
            yield snapshot if fuller is None else _looked_at(tree, snapshot, own, fuller)
        elif snapshot.expected is None and snapshot.done is not None and near:
            yield replace(snapshot, expected=_ranks(near[0]))
        else:
            yield snapshot


def _ranks(names: Names) -> int | None:
    """How many ranks wrote a committed snapshot, where the names tell."""
    return len({m[1] for n in names if (m := _RANK.fullmatch(n))}) or None


def _looked_at(tree: Tree, snapshot: Snapshot, own: Names, fuller: Names) -> Snapshot:
    """A snapshot that has fewer files than a neighbour, after opening it."""
    missing = sorted(fuller - own)
    last = next((n for n in _LAST_WRITTEN if n in missing), "")
    state, why = (UNFINISHED, f"no {last}, which its neighbours have") if last else verdict(_place(tree, snapshot))
    if state == COMMITTED:
        return snapshot
    return replace(snapshot, state=state, why=why, done=len(own), expected=len(fuller))


def _place(tree: Tree, snapshot: Snapshot) -> str:
    return f"{tree.location.rstrip('/')}/{snapshot.path}"


def verdict(location: str) -> tuple[str, str]:
    """State of a snapshot by its manifests and headers, and what speaks against it."""
    try:
        checkpoint = open_snapshot(location).checkpoint
    except NotRecognisedError as e:
        return FOREIGN, e.message
    except (NotFoundError, StorageError) as e:
        return DAMAGED, e.message
    errors = sorted((f for f in checkpoint.findings if f.is_error), key=lambda f: f.is_incompleteness)
    if errors:
        return (UNFINISHED if errors[0].is_incompleteness else DAMAGED), f"{errors[0].code}: {errors[0].where}"
    return (COMMITTED, "") if checkpoint.commit.is_committed else (UNFINISHED, f"no {checkpoint.commit.record}")
