"""What must hold of every checkpoint, whatever its layout: names are unique, pieces tile their tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ckpttools.findings import Finding
from ckpttools.geometry import cover
from ckpttools.layouts.base import Contents
from ckpttools.layouts.families import MODEL
from ckpttools.model import Box, TensorEntry

_GATHER = "if the run partitioned its parameters, gather them before saving, or consolidate its own checkpoint"
_MAX_NAMED_TENSORS = 8
_MAX_NAMED_PIECES = 16
"""Of one tensor; who reads a thousand lines about it?"""


_FEW = 16


def check_names(tensors: Iterable[TensorEntry]) -> Iterator[Finding]:
    """Different keys that have the same dotted name, so that a list of names would hold one of them only."""
    paths: dict[str, TensorEntry] = {}
    for entry in tensors:
        other = paths.setdefault(entry.name, entry)
        if other is not entry:
            found = f"{list(other.path)} and {list(entry.path)}"
            yield Finding("name-collision", entry.name, "one entry of this name", found)


def check_data(tensors: Sequence[TensorEntry], model: Contents) -> Iterator[Finding]:
    """Weights that have no elements, and a model with nothing in it: what saving leaves of parameters that were never gathered.

    ZeRO-3 and FSDP keep a placeholder of shape [0] where a parameter is partitioned, and PEFT, Trainer and `torch.save` save it.
    """
    empty = [t for t in tensors if t.family == MODEL and t.spec.shape == (0,)]
    for entry in empty[:_MAX_NAMED_TENSORS]:
        yield Finding("no-data", entry.name, "a weight with elements", "shape [0], as a partitioned parameter has", _GATHER)
    if len(empty) > _MAX_NAMED_TENSORS:
        yield Finding("no-data", empty[0].name, "weights with elements", f"{len(empty)} of shape [0]", _GATHER)
    data = next((f.path for f in model.files if f.role == "data"), "")
    if data and not (tensors or model.objects or any(f.is_error for f in model.findings)):
        yield Finding("no-data", data, "tensors", "none", _GATHER)


def check_covers(tensors: Iterable[TensorEntry]) -> Iterator[Finding]:
    """Whether the pieces of each tensor tile its shape exactly.

    A weight, its master and its states mostly lie in the same boxes, one after the other, so what held of the last is not
    computed again.
    """
    last: tuple[tuple[int, ...], list[Box]] | None = None
    for entry in tensors:
        boxes = [p.box for p in entry.pieces]
        if (entry.spec.shape, boxes) != last:
            found = list(check_cover(entry))
            yield from found
            last = None if found else (entry.spec.shape, boxes)


def check_cover(entry: TensorEntry) -> Iterator[Finding]:
    """Whether the pieces of a tensor tile its shape exactly."""
    if len(entry.pieces) == 1 and entry.pieces[0].box == entry.spec.box:
        return
    covered = cover(entry.spec.shape, [p.box for p in entry.pieces])
    for i in covered.out_of_bounds[:_MAX_NAMED_PIECES]:
        piece = entry.pieces[i]
        found = f"offsets {list(piece.box.offsets)}, sizes {list(piece.box.sizes)}"
        yield Finding(
            "piece-out-of-bounds", f"{entry.name} in {piece.extent.file}", f"a box inside {list(entry.spec.shape)}", found
        )
    for i, j in covered.overlaps:
        one, other = entry.pieces[i], entry.pieces[j]
        where = f"{entry.name} in {one.extent.file} and {other.extent.file}"
        found = f"boxes at {list(one.box.offsets)} and {list(other.box.offsets)}"
        yield Finding("pieces-overlap", where, "each element in one piece", found)
    if covered.missing:
        hole = f" such as those at {list(covered.hole.offsets)}, sizes {list(covered.hole.sizes)}" if covered.hole else ""
        found = f"{covered.missing} in no piece{hole}"
        yield Finding("uncovered", entry.name, f"all {entry.spec.volume} elements", found)


def find_aliases(tensors: Iterable[TensorEntry]) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one stored tensor: same bytes, seen in the same way.

    One number that many parameters share, such as an optimizer's step, ties nothing.
    """
    stored = [t for t in tensors if t.spec.volume and t.spec.shape != () and t.pieces]
    begin = [(t.pieces[0].extent.file, t.pieces[0].extent.offset) for t in stored]
    count = Counter(begin)  # where a tensor begins is quick to look up, and mostly tells it apart
    groups: dict[object, list[tuple[TensorEntry, list[str]]]] = defaultdict(list)
    for entry, place in zip(stored, begin, strict=True):
        if count[place] > 1:  # comparing few is faster than a hash of all pieces, and many is not
            alike = groups[entry.spec.dtype, entry.spec.shape, place, entry.pieces if count[place] > _FEW else ()]
            names = next((names for other, names in alike if other.pieces == entry.pieces), None)
            if names is None:
                names = []
                alike.append((entry, names))
            names.append(entry.name)
    return tuple(tuple(names) for alike in groups.values() for _, names in alike if len(names) > 1)
