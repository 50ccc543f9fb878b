"""How the entries of a checkpoint were nested: what a writer of nested values needs beside their paths."""

from __future__ import annotations

from ckpttools.containers.trees import sequence_branches
from ckpttools.model import Checkpoint, Path


def sequences_of(checkpoint: Checkpoint) -> dict[Path, str]:
    """Which branches of the source's nested values are lists and tuples."""
    found: dict[Path, str] = {}
    if checkpoint.layout == "dcp":  # its planner makes dict keys text, so an integer is the place in a list
        paths = [*(t.path for t in checkpoint.tensors), *(o.path for o in checkpoint.objects)]
        for path in paths:
            found |= {path[:i]: "list" for i, key in enumerate(path) if type(key) is int}
    for path, value in checkpoint.trees.items():
        found = {p: kind for p, kind in found.items() if p[: len(path)] != path or not path} | sequence_branches(value, path)
    return found
