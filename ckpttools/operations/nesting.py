"""How the entries of a checkpoint were nested: what a writer of nested values needs beside their paths."""

from __future__ import annotations

from ckpttools.containers.trees import branch_records, leaves, persistent_ids, sequence_branches
from ckpttools.model import Checkpoint, Path
from ckpttools.pickles.records import NO_STATE, Global, Object
from ckpttools.pickles.views import class_of

_ORDERED_DICT = Global("collections", "OrderedDict")


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


def mappings_of(checkpoint: Checkpoint, *, has_attributes: bool) -> dict[Path, Object]:
    """Which branches of the source's nested values are OrderedDicts: each as an empty one, with the attributes of it.

    Attributes are such as the `_metadata` of a state dict, which names its modules and their versions. One that holds
    a tensor is left out.
    """
    found: dict[Path, Object] = {}
    for prefix, value in checkpoint.trees.items():
        for path, record in branch_records(value, prefix):
            if isinstance(record, Object) and class_of(record) == _ORDERED_DICT:
                is_kept = has_attributes and next(persistent_ids(record.state), None) is None
                found[path] = Object(_ORDERED_DICT, (), state=record.state if is_kept else NO_STATE)
    return found


def order_of(checkpoint: Checkpoint) -> dict[Path, int]:
    """The place of every entry among all, as the source's nested values have them."""
    paths = ((*prefix, *leaf.path) for prefix, value in checkpoint.trees.items() for leaf in leaves(value))
    return {path: place for place, path in enumerate(paths)}
