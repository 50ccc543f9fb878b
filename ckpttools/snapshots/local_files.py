"""Snapshots that are no directory but a file per rank, spread over folders of ranks: nvidia-resiliency-ext's local checkpoints.

`<root>/<session>/<rank>/iter_<7 digits>_<rank>_local.pt`; a rank's folder also has copies of other ranks' files. How many ranks
there are is written nowhere, so those count that any file or folder names, and all below the highest. Pure.

Source: NVIDIA/nvidia-resiliency-ext, src/nvidia_resiliency_ext/checkpointing/local/ckpt_managers/local_manager.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ckpttools.snapshots.candidate import Snapshot
from ckpttools.snapshots.policy import COMMITTED, UNFINISHED
from ckpttools.storage.tree import Tree

_FILE = re.compile(r"iter_(?P<step>\d{7,18})_(?P<rank>\d{1,9})_local(?P<dirty>\.dirty)?\.pt")
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    digits: str
    rank: int


def files_by_rank(parts: Iterable[str]) -> dict[int, list[str]]:
    """The files that are whole, by the rank whose state they hold; a rank may have several copies. Pure."""
    found: dict[int, list[str]] = {}
    for path in parts:
        match = _FILE.fullmatch(path.rpartition("/")[2])
        if match and match["dirty"] is None:
            found.setdefault(int(match["rank"]), []).append(path)
    return found


def local_folders(tree: Tree) -> set[str]:
    """The folders of ranks, and the directories of sessions that hold them. Pure."""
    folders = {f.path.rpartition("/")[0] for files in _sessions(tree).values() for f in files}
    return folders | {folder.rpartition("/")[0] for folder in folders}


def local_snapshots(tree: Tree, ranks: int = 0) -> Iterator[Snapshot]:
    """The snapshots that are a file per rank, each under a pattern that its files match. Pure.

    Args: ranks: how many there are at least, where that is told.
    """
    for session, files in _sessions(tree).items():
        groups: dict[str, list[_File]] = defaultdict(list)
        for file in files:
            groups[file.digits].append(file)
        inner = "" if all(f.path.rpartition("/")[0] == session for f in files) else "*/"
        for digits, group in groups.items():
            parts = tuple(f.path for f in sorted(group, key=lambda f: (f.rank, f.path)))
            path = f"{session}/{inner}iter_{digits}_*_local.pt".lstrip("/")
            found = Snapshot(path, int(digits), UNFINISHED, parts=parts)
            yield judge_ranks(found, max(ranks, known_ranks(tree, path)))


def judge_ranks(snapshot: Snapshot, expected: int, held: Iterable[int] | None = None) -> Snapshot:
    """The snapshot with the state that follows from the ranks that are held. Pure.

    Args: expected: how many ranks there are. held: the ranks; those of its own files unless told.
    """
    there = set(files_by_rank(snapshot.parts)) if held is None else set(held)
    if len(there) == expected:
        return replace(snapshot, state=COMMITTED, why="", done=None, expected=None)
    missing = list(islice((str(r) for r in range(expected) if r not in there), _MOST_NAMED + 1))
    named = ", ".join(missing[:_MOST_NAMED]) + (", ..." if len(missing) > _MOST_NAMED else "")
    return replace(snapshot, state=UNFINISHED, why=f"no file of rank {named}", done=len(there), expected=expected)


def known_ranks(tree: Tree, path: str) -> int:
    """How many ranks the session of a snapshot has, by the highest that a file or a folder of it names. Pure."""
    session = path.rpartition("/")[0].removesuffix("*").rstrip("/")
    return 1 + max(_ranks(tree, session, _sessions(tree).get(session, ())), default=-1)


def _ranks(tree: Tree, session: str, files: Sequence[_File]) -> Iterator[int]:
    for file in files:
        yield file.rank
        folder = file.path.rpartition("/")[0]
        if folder != session:
            yield int(folder.rpartition("/")[2])
    own = (tree.real or tree.location).rstrip("/").rpartition("/")[2]
    if session == "" and own.isascii() and own.isdigit() and len(own) < 10 and any("/" not in f.path for f in files):
        yield int(own)


def _sessions(tree: Tree) -> dict[str, list[_File]]:
    """The files of each session: of the run directory itself, or of a directory in it; or it is the folder of one rank."""
    found: dict[str, list[_File]] = defaultdict(list)
    for directory, names in tree.files.items():
        parent, _, name = directory.rpartition("/")
        is_folder = name.isascii() and name.isdigit() and len(name) < 10
        if (directory and not is_folder) or "/" in parent:
            continue
        for file in names:
            match = _FILE.fullmatch(file)
            if match is not None:
                path = f"{directory}/{file}".lstrip("/")
                found[parent].append(_File(path, match["step"], int(match["rank"])))
    return found
