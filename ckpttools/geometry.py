"""Arithmetic of boxes: intersect, split, flat ranges, strides, exact cover.

Everything that a layout does to a tensor (a tensor-parallel column shard, a ZeRO flat partition, a padded vocabulary)
is boxes and extents, so this file is where conversions are right or wrong. All functions are pure; the laws are
tested against a brute-force oracle. Read `intersect` and `cover` first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from math import prod
from operator import le, mul, sub
from typing import TYPE_CHECKING, Any

from ckpttools.model import Box

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.int_]]

_MAX_OVERLAPS = 16
_FEW_BOXES = 64
_MAX_COUNTED_BOXES = 300
"""Counting the elements that overlapping boxes leave out takes time that grows with the square of the boxes, or more."""


def intersect(a: Box, b: Box) -> Box | None:
    """The part that two boxes share; None when they are apart. Commutative, idempotent. Pure.

    Boxes that only touch share a box of volume 0; callers that want elements ask for `volume`.
    """
    offsets = tuple(map(max, a.offsets, b.offsets))
    sizes = tuple(map(sub, map(min, a.stops, b.stops), offsets))
    return Box(offsets, sizes) if min(sizes, default=0) >= 0 else None


def contains(outer: Box, inner: Box) -> bool:
    """Whether `inner` lies wholly in `outer`; never for boxes of different ranks. Pure."""
    is_of_rank = len(outer.offsets) == len(inner.offsets)
    return is_of_rank and all(map(le, outer.offsets, inner.offsets)) and all(map(le, inner.stops, outer.stops))


def split(length: int, parts: int) -> list[tuple[int, int]]:
    """(offset, size) of each of `parts` shards of a dimension, by the rule of `torch.chunk`. Pure.

    Each shard has ceil(length / parts) elements but the last with any, which may be shorter; shards past the end have
    size 0 at offset `length`, as torch records them.
    """
    return [shard_of(length, parts, i) for i in range(parts)]


def shard_of(length: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, size) of one of them. Pure."""
    step = -(-length // parts) if length else 0
    return min(index * step, length), min(step, max(0, length - index * step))


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each dimension of a dense row-major box. Pure."""
    strides, step = [0] * len(sizes), 1
    for axis in range(len(sizes) - 1, -1, -1):
        strides[axis] = step
        step *= max(sizes[axis], 1)
    return tuple(strides)


def is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a box with these strides is stored row-major without gaps. Pure.

    Dimensions of size 1 may have any stride, and a box without elements is dense whatever its strides say.
    """
    if prod(sizes) == 0:
        return True
    return all(n == 1 or s == d for n, s, d in zip(sizes, strides, row_major_strides(sizes), strict=True))


def span_elements(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a strided box, both included; 0 when it has none. Pure."""
    if prod(sizes) == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def flat_offset(index: Sequence[int], sizes: Sequence[int]) -> int:
    """Row-major position of `index` in a box with `sizes`. Pure."""
    return sum(i * s for i, s in zip(index, row_major_strides(sizes), strict=True))


def flat_range_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of a row-major tensor as boxes, in row-major order; at most 2 * rank - 1. Pure.

    Raises: ValueError: when the range is not inside the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"range [{start}, {stop}) is not inside a tensor of {prod(shape)} elements")
    return list(_range_boxes((), tuple(shape), start, stop))


def _range_boxes(prefix: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Boxes of [start, stop) in the sub-tensor that `prefix` fixes: a partial first row, whole rows, a partial last."""
    if start == stop:
        return
    if not shape:
        yield Box(prefix, (1,) * len(prefix))
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # both ends lie inside the same row
        yield from _range_boxes((*prefix, last), shape[1:], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _range_boxes((*prefix, first - 1), shape[1:], start - (first - 1) * row, row)
    if first < last:
        yield Box(
            (*prefix, first, *(0 for _ in shape[1:])),
            (*(1 for _ in prefix), last - first, *shape[1:]),
        )
    if last * row < stop:
        yield from _range_boxes((*prefix, last), shape[1:], 0, stop - last * row)


def factored(box: Box, factors: Sequence[tuple[int, ...]]) -> Iterator[tuple[Box, Box]]:
    """`box` in parts that are boxes, too, where dimensions are counted by several numbers: (the part, the same so counted). Pure.

    The numbers of a dimension multiply to it. Without any, the only part is the box itself; a dimension of k numbers is cut into
    at most 2 k - 1 runs.
    """
    if not factors:
        yield box, box
        return
    runs: list[list[tuple[int, Box]]] = []
    for start, size, own in zip(box.offsets, box.sizes, factors, strict=True):
        found = []
        for run in flat_range_to_boxes(own, start, start + size):
            found.append((start, run))
            start += run.volume
        runs.append(found)
    for chosen in product(*runs):
        part = Box(tuple(start for start, _ in chosen), tuple(run.volume for _, run in chosen))
        offsets = tuple(o for _, run in chosen for o in run.offsets)
        yield part, Box(offsets, tuple(n for _, run in chosen for n in run.sizes))


def tiles(box: Box, max_elements: int) -> Iterator[Box]:
    """`box` cut into row-major consecutive boxes of at most `max_elements`; concatenated they are the box. Pure.

    A tile fixes the leading dimensions, takes a run of one dimension and all of those after it. A box without
    elements has no tiles.
    """
    if box.volume == 0:
        return
    inner, axis = 1, len(box.sizes)
    while axis > 0 and inner * box.sizes[axis - 1] <= max_elements:
        axis -= 1
        inner *= box.sizes[axis]
    if axis == 0:
        yield box
        return
    axis -= 1  # the dimension that is cut; those after it are whole
    step = max(1, max_elements // inner)
    outer = Box(box.offsets[:axis], box.sizes[:axis])
    for index in indices(outer):
        for offset in range(0, box.sizes[axis], step):
            yield Box(
                (*index, box.offsets[axis] + offset, *box.offsets[axis + 1 :]),
                (*(1 for _ in index), min(step, box.sizes[axis] - offset), *box.sizes[axis + 1 :]),
            )


def indices(box: Box) -> Iterator[tuple[int, ...]]:
    """Every index of a box in row-major order; one empty index for rank 0. Pure."""
    if not box.sizes:
        yield ()
        return
    for head in range(box.offsets[0], box.offsets[0] + box.sizes[0]):
        for rest in indices(Box(box.offsets[1:], box.sizes[1:])):
            yield (head, *rest)


def contiguous_runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[Box, int]]:
    """`box` of a row-major tensor of `shape` cut into boxes that are one stretch of it each, with the flat place of each. Pure.

    In order of their places, and as few as can be had without joining rows of different indices: one where all dimensions
    but the first with more than one index are whole. A box without elements is one run.
    """
    whole_from = len(shape)
    while whole_from > 0 and box.sizes[whole_from - 1] == shape[whole_from - 1]:
        whole_from -= 1
    axis = max(whole_from - 1, 0) if box.volume else 0
    for index in indices(Box(box.offsets[:axis], box.sizes[:axis])):
        run = Box((*index, *box.offsets[axis:]), (*(1 for _ in index), *box.sizes[axis:]))
        yield run, flat_offset(run.offsets, shape)


@dataclass(frozen=True, slots=True)
class Cover:
    """How a set of boxes covers a shape."""

    out_of_bounds: tuple[int, ...]
    """Positions (in the input) of boxes that leave the shape."""
    overlaps: tuple[tuple[int, int], ...]
    """Pairs of positions of boxes that share elements: some pair whenever there is one, never more than a few."""
    missing: int
    """Elements that no box holds; 0 where more than a few hundred boxes overlap, which is reason enough."""
    hole: Box | None
    """A box of missing elements, to point at, that cannot be made larger; None when nothing is missing."""

    @property
    def is_exact(self) -> bool:
        """Whether every element is in exactly one box."""
        return not self.out_of_bounds and not self.overlaps and self.missing == 0


def cover(shape: Sequence[int], boxes: Sequence[Box]) -> Cover:
    """Whether `boxes` tile `shape`: in bounds, disjoint, every element held. Pure.

    A part of the shape that disjoint boxes fill in volume is filled in fact, so holes are looked for only where the
    volumes do not add up.
    """
    whole = Box((0,) * len(shape), tuple(shape))
    is_of_rank = all(len(b.offsets) == len(b.sizes) == len(shape) for b in boxes)
    if is_of_rank and (_is_grid(whole, boxes) or _are_flat_ranges(whole, boxes)):
        return Cover((), (), 0, None)
    outside = {i for i, b in enumerate(boxes) if not _is_in_bounds(whole, b)}
    inside = [(i, b) for i, b in enumerate(boxes) if i not in outside and b.volume > 0]
    held = [b for _, b in inside]
    if _is_grid(whole, held):
        return Cover(tuple(sorted(outside)), (), 0, None)
    overlaps = tuple(islice(_overlaps(whole, inside), _MAX_OVERLAPS))
    missing, hole = _missing(whole, held, are_disjoint=not overlaps)
    return Cover(tuple(sorted(outside)), overlaps, missing, None if hole is None else _grown(hole, whole, held))


def is_tiled(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether boxes inside `whole` hold each of its elements exactly once; a hole and an overlap do not cancel. Pure."""
    if _is_grid(whole, boxes):
        return True
    held = [b for b in boxes if b.volume]
    return sum(b.volume for b in held) == whole.volume and next(_overlaps(whole, list(enumerate(held))), None) is None


def _is_grid(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether the boxes are every cell of a grid over `whole`, as shards of a mesh are; most tensors, so told in one pass."""
    stops = whole.stops
    edges = [sorted({b.offsets[axis] for b in boxes} | {stops[axis]}) for axis in range(len(stops))]
    if whole.volume == 0 or prod(len(e) - 1 for e in edges) != len(boxes):
        return False
    size_at = [{low: high - low for low, high in pairwise(e)} for e in edges]
    return (
        len({b.offsets for b in boxes}) == len(boxes)
        and all(e[0] == start for e, start in zip(edges, whole.offsets, strict=True))
        and all(cells.get(b.offsets[axis]) == b.sizes[axis] for axis, cells in enumerate(size_at) for b in boxes)
    )


def _are_flat_ranges(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether the boxes are consecutive stretches of the row-major elements of `whole`, as flat partitions are; in one pass."""
    strides, at = row_major_strides(whole.sizes), 0
    for box in boxes:
        volume = box.volume
        if sum(map(mul, box.offsets, strides)) != at or min(box.offsets, default=0) < 0 or volume == 0:
            return False
        is_inside = True  # of the first dimension with more than one index; those after it must be whole
        for offset, size, full in zip(box.offsets, box.sizes, whole.sizes, strict=True):
            if (not is_inside and size != full) or size < 1 or offset + size > full:
                return False
            is_inside = is_inside and size == 1
        at += volume
    return at == whole.volume


def _is_in_bounds(whole: Box, box: Box) -> bool:
    """Whether a box from an untrusted manifest is a box of this rank at all, and lies in `whole`."""
    ranks_agree = len(box.offsets) == len(box.sizes) == len(whole.sizes)
    return ranks_agree and min((*box.offsets, *box.sizes), default=0) >= 0 and contains(whole, box)


class _Cells:
    """Boxes in the coordinates of their edges: an axis with n distinct edges is numbered 0 to n - 1.

    So arithmetic is on small numbers in arrays, whatever an untrusted manifest says, and halving a region at the middle
    edge ends after log n steps. In plain Python, 100,000 boxes one inside the other took minutes.
    """

    def __init__(self, boxes: Sequence[Box], whole: Box) -> None:
        import numpy as np

        self.edges = [
            sorted(
                {*(b.offsets[d] for b in boxes), *(b.offsets[d] + b.sizes[d] for b in boxes), whole.offsets[d], whole.stops[d]}
            )
            for d in range(len(whole.sizes))
        ]
        number = [{edge: i for i, edge in enumerate(edges)} for edges in self.edges]
        shape = (len(boxes), len(self.edges))
        self.lows = np.array([[n[o] for n, o in zip(number, b.offsets, strict=True)] for b in boxes], dtype=int).reshape(shape)
        self.highs = np.array([[n[o] for n, o in zip(number, b.stops, strict=True)] for b in boxes], dtype=int).reshape(shape)

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Pairs of positions of boxes that share elements; a pair may come again."""
        import numpy as np

        todo = [(np.zeros(len(self.edges), int), np.array([len(e) - 1 for e in self.edges], int), np.arange(len(self.lows)))]
        while todo:
            low, high, chosen = todo.pop()
            if len(chosen) <= _FEW_BOXES:
                yield from self._pairs_among(chosen)
                continue
            axis, at = self._cut(low, high, chosen)
            if axis < 0:  # each of them fills the region
                yield int(chosen[0]), int(chosen[1])
                continue
            todo.append((low, _with(high, axis, at), chosen[self.lows[chosen, axis] < at]))
            todo.append((_with(low, axis, at), high, chosen[self.highs[chosen, axis] > at]))

    def _cut(self, low: Numbers, high: Numbers, chosen: Numbers) -> tuple[int, int]:
        """Where to halve a region: the dimension in which most boxes begin or end inside it, and the middle one of these
        edges; -1 when each box fills it."""
        import numpy as np

        axis, inside = -1, np.empty(0, int)
        for d in range(len(self.edges)):
            begin, end = self.lows[chosen, d], self.highs[chosen, d]
            edges = np.concatenate([begin[begin > low[d]], end[end < high[d]]])
            if len(edges) > len(inside):
                axis, inside = d, edges
        return axis, int(np.partition(inside, len(inside) // 2)[len(inside) // 2]) if axis >= 0 else 0

    def _pairs_among(self, chosen: Numbers) -> Iterator[tuple[int, int]]:
        import numpy as np

        lows, highs = self.lows[chosen], self.highs[chosen]
        shared = (np.minimum(highs[:, None], highs[None]) > np.maximum(lows[:, None], lows[None])).all(axis=-1)
        for i, j in zip(*np.nonzero(np.triu(shared, 1)), strict=True):
            yield int(chosen[i]), int(chosen[j])

    def hole(self) -> Box:
        """A box that none of the boxes touches, when these are apart and do not fill the whole."""
        import numpy as np

        low, high = np.zeros(len(self.edges), int), np.array([len(e) - 1 for e in self.edges], int)
        chosen = np.arange(len(self.lows))
        while len(chosen):
            axis, at = self._cut(low, high, chosen)
            below = _with(high, axis, at)
            lower = chosen[self.lows[chosen, axis] < at]
            if self._held(low, below, lower) < prod(int(n) for n in below - low):
                high, chosen = below, lower
            else:
                low, chosen = _with(low, axis, at), chosen[self.highs[chosen, axis] > at]
        offsets = tuple(edges[i] for edges, i in zip(self.edges, low, strict=True))
        return Box(offsets, tuple(edges[i] - o for edges, i, o in zip(self.edges, high, offsets, strict=True)))

    def _held(self, low: Numbers, high: Numbers, chosen: Numbers) -> int:
        """Cells of a region that the chosen boxes hold, when they are apart."""
        import numpy as np

        sides = np.minimum(self.highs[chosen], high) - np.maximum(self.lows[chosen], low)
        is_small = prod(len(edges) for edges in self.edges) < 1 << 62
        return int((sides if is_small else sides.astype(object)).prod(axis=1).sum())


def _with(numbers: Numbers, axis: int, number: int) -> Numbers:
    changed: Numbers = numbers.copy()
    changed[axis] = number
    return changed


def _overlaps(whole: Box, boxes: Sequence[tuple[int, Box]]) -> Iterator[tuple[int, int]]:
    """Pairs of numbered boxes inside `whole` that share elements, each pair once: some pair whenever there is one."""
    seen: set[tuple[int, int]] = set()
    if len(boxes) < 2:
        return
    for one, other in _Cells([b for _, b in boxes], whole).pairs():
        i, j = boxes[one][0], boxes[other][0]
        pair = (min(i, j), max(i, j))
        if pair not in seen:
            seen.add(pair)
            yield pair


def _missing(whole: Box, boxes: Sequence[Box], *, are_disjoint: bool) -> tuple[int, Box | None]:
    """How many elements of `whole` no box holds (0 where too many overlap to count), and one box of such elements."""
    if not are_disjoint:
        return _count_missing(whole, boxes) if len(boxes) <= _MAX_COUNTED_BOXES else (0, None)
    missing = whole.volume - sum(b.volume for b in boxes)
    return missing, _Cells(boxes, whole).hole() if missing else None


def _count_missing(region: Box, boxes: Sequence[Box]) -> tuple[int, Box | None]:
    """As `_missing`, for boxes that may overlap: halves the region until one box fills a part, or none touches it."""
    shared = [part for b in boxes if (part := intersect(b, region)) is not None and part.volume]
    if any(part == region for part in shared):
        return 0, None
    if not shared:
        return region.volume, region
    axis, at = _middle_edge(region, shared)
    missing_below, hole_below = _count_missing(_with_range(region, axis, region.offsets[axis], at), shared)
    missing_above, hole_above = _count_missing(_with_range(region, axis, at, region.stops[axis]), shared)
    return missing_below + missing_above, hole_below if hole_below is not None else hole_above


def _middle_edge(region: Box, boxes: Sequence[Box]) -> tuple[int, int]:
    """Where to halve a region: the dimension in which most boxes begin or end inside it, and the middle one of these edges."""
    edges = [
        sorted({edge for b in boxes for edge in (b.offsets[axis], b.stops[axis]) if low < edge < high})
        for axis, (low, high) in enumerate(zip(region.offsets, region.stops, strict=True))
    ]
    axis = max(range(len(edges)), key=lambda a: len(edges[a]))
    return axis, edges[axis][len(edges[axis]) // 2]


def _grown(hole: Box, whole: Box, boxes: Sequence[Box]) -> Box:
    """`hole` made as large as it can be without touching a box, one dimension after the other."""
    for axis in range(len(hole.sizes)):
        low, high = whole.offsets[axis], whole.stops[axis]
        beam = _with_range(hole, axis, low, high)
        for box in boxes:
            shared = intersect(box, beam)
            if shared is not None and shared.volume:
                if shared.stops[axis] <= hole.offsets[axis]:
                    low = max(low, shared.stops[axis])
                else:
                    high = min(high, shared.offsets[axis])
        hole = _with_range(hole, axis, low, high)
    return hole


def _with_range(box: Box, axis: int, start: int, stop: int) -> Box:
    """`box` with [start, stop) along one dimension."""
    return Box(
        (*box.offsets[:axis], start, *box.offsets[axis + 1 :]),
        (*box.sizes[:axis], stop - start, *box.sizes[axis + 1 :]),
    )


class BoxIndex:
    """Finds the boxes of a list that share elements with a given box, without trying all of them."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        rank = len(boxes[0].sizes) if boxes else 0
        self._axis = max(range(rank), key=lambda d: len({b.offsets[d] for b in boxes})) if rank else -1
        axis = self._axis
        self._order = sorted(
            (i for i, b in enumerate(boxes) if b.volume), key=lambda i: boxes[i].offsets[axis] if axis >= 0 else 0
        )
        self._starts = [boxes[i].offsets[axis] for i in self._order] if axis >= 0 else []
        self._longest = max((boxes[i].sizes[axis] for i in self._order), default=0) if axis >= 0 else 0

    def overlapping(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(position, shared box) of every box in the list that shares elements with `box`, by offset."""
        candidates = self._order
        if self._axis >= 0:
            start, stop = box.offsets[self._axis], box.stops[self._axis]
            low = bisect_left(self._starts, start - self._longest)
            candidates = self._order[low : bisect_left(self._starts, stop)]
        for i in candidates:
            shared = intersect(self._boxes[i], box)
            if shared is not None and shared.volume:
                yield i, shared
