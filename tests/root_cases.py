"""Splits the files of a snapshot over several directories, as the disks of nodes hold them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

Where = Callable[[str], Iterable[int]]
"""From a file's path relative to the snapshot to the numbers of the roots that hold it."""


def spread(snapshot: Path, into: Path, count: int, where: Where) -> list[Path]:
    """`count` directories below `into`, each with its share of the files of a snapshot, named like it."""
    roots = [into / f"node{i}" / snapshot.name for i in range(count)]
    for root in roots:
        root.mkdir(parents=True)
    for file in sorted(p for p in snapshot.rglob("*") if p.is_file()):
        path = file.relative_to(snapshot)
        for i in where(path.as_posix()):
            (roots[i] / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, roots[i] / path)
    return roots


def by_rank(path: str) -> list[int]:
    """Node 0 for what is of rank 0 or of no rank, node 1 for rank 1, and so on: by the last number in the name but one."""
    name = path.rpartition("/")[2]
    for mark in ("__", "rank_", "rank", "random_states_"):
        _, found, rest = name.partition(mark)
        digits = rest[: next((i for i, c in enumerate(rest) if not c.isdigit()), len(rest))]
        if found and digits:
            return [int(digits)]
    return [0]
