"""Hypothesis strategies for the values of the model: shapes, dtypes, boxes, partitions, meshes, names.

Ranks 0 to 4 and dimensions of size 0 are drawn everywhere, because that is where other tools go wrong. A new kind of
value enters here first, so that every law is tried on it.
"""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from ckpttools.dtypes import TABLE, DType
from ckpttools.geometry import split
from ckpttools.model import Box, Mesh, TensorSpec

MAX_RANK = 4


def shapes(
    *, min_rank: int = 0, max_rank: int = MAX_RANK, min_side: int = 0, max_side: int = 5
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of few elements."""
    return st.lists(st.integers(min_side, max_side), min_size=min_rank, max_size=max_rank).map(tuple)


def dtypes(*, sub_byte: bool = True) -> st.SearchStrategy[DType]:
    """Every row of the table; without the sub-byte rows where a tensor has to be cut."""
    return st.sampled_from([d for d in TABLE if sub_byte or not d.is_sub_byte])


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], *, min_side: int = 0) -> Box:
    """A box inside `shape`."""
    offsets, sizes = [], []
    for side in shape:
        size = draw(st.integers(min(min_side, side), side))
        offsets.append(draw(st.integers(0, side - size)))
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def boxes_near(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box that may lie partly or wholly outside `shape`, or have another rank or sides below 0."""
    rank = draw(st.sampled_from([len(shape)] * 9 + [len(shape) + 1, max(0, len(shape) - 1)]))
    offsets = draw(st.lists(st.integers(-1, 6), min_size=rank, max_size=rank))
    sizes = draw(st.lists(st.integers(-1, 6), min_size=rank, max_size=rank))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...], *, max_boxes: int = 12) -> list[Box]:
    """Boxes that tile `shape`, in any order: cut again and again, as stacks of parallelisms do; some may be empty."""
    boxes = [Box((0,) * len(shape), shape)]
    while shape and len(boxes) < max_boxes and draw(st.booleans()):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[axis]))
        for offset, size in ((0, at), (at, box.sizes[axis] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += offset
            sizes[axis] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return draw(st.permutations(boxes))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """The pieces of a tensor sharded by `torch.chunk`'s rule along each of its dimensions, as DTensor does."""
    boxes = [Box((), ())]
    for side in shape:
        cuts = split(side, draw(st.integers(1, 4)))
        boxes = [Box((*b.offsets, offset), (*b.sizes, size)) for b in boxes for offset, size in cuts]
    return boxes


@st.composite
def strided_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, strides) of views as torch makes them: dense, transposed, sliced, expanded."""
    sizes = draw(shapes(max_side=4))
    order = draw(st.permutations(range(len(sizes))))
    strides, step = [0] * len(sizes), 1
    for axis in reversed(order):
        strides[axis] = draw(st.sampled_from([step, step, step, step * 2, 0]))
        step = max(step, strides[axis]) * max(sizes[axis], 1)
    return sizes, tuple(strides)


axis_names = st.sampled_from(["tp", "pp", "dp", "ep", "cp", "fsdp", "dp_shard", "dp_replicate"])


def meshes() -> st.SearchStrategy[Mesh]:
    """Meshes of up to four axes; axes of size 1 are legal."""
    axes = st.lists(st.tuples(axis_names, st.integers(1, 16)), max_size=4, unique_by=lambda axis: axis[0])
    return axes.map(lambda pairs: Mesh(tuple(pairs)))


_KEYS = st.one_of(
    st.sampled_from(
        ["model", "layers", "0", "17", "weight", "bias", "_orig_mod", "exp_avg", "a/b", "..", "", "ключ", "重み", "é"]
    ),
    st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=8),
)


def tensor_names() -> st.SearchStrategy[str]:
    """Dotted names, with slashes, empty keys, non-ASCII letters and what people put into a state dict besides."""
    return st.lists(_KEYS, min_size=1, max_size=5).map(".".join)


def paths() -> st.SearchStrategy[tuple[str | int, ...]]:
    """Typed paths: the keys of nested dicts and lists."""
    return st.lists(st.one_of(_KEYS, st.integers(0, 100)), min_size=1, max_size=5).map(tuple)


@st.composite
def specs(draw: st.DrawFn, *, sub_byte: bool = True) -> TensorSpec:
    """What a writer needs to know of a tensor."""
    dtype = draw(dtypes(sub_byte=sub_byte))
    shape = draw(shapes())
    if (prod(shape) * dtype.bits) % 8:
        shape = (*shape, 8)
    return TensorSpec(draw(tensor_names()), dtype, shape)
