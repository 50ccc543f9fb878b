"""Parts of stored tensors: where a box, or another view of the same bytes, lies; held against numpy's own views."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttools.containers.parts import StoredTensor
from ckpttools.dtypes import BY_NAME
from ckpttools.model import Box, Extent

INT32 = BY_NAME["int32"]


def stored(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, offset: int = 8) -> StoredTensor:
    span = int(np.prod(shape)) if strides is None else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return StoredTensor(INT32, shape, Extent("f", offset, 4 * span, strides))


def elements(extent: Extent, sizes: tuple[int, ...]) -> np.ndarray:
    """The places of a box's elements, counted in elements from the start of the file."""
    strides = extent.strides
    if strides is None:
        return extent.offset // 4 + np.arange(int(np.prod(sizes))).reshape(sizes)
    return extent.offset // 4 + sum(
        (
            np.arange(n).reshape([-1 if i == d else 1 for i in range(len(sizes))]) * s
            for d, (n, s) in enumerate(zip(sizes, strides, strict=True))
        ),
        np.zeros(sizes, int),
    )


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return shape, Box(offsets, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))


@given(boxes())
def test_a_part_is_numpy_s_slice(given_box: tuple[tuple[int, ...], Box]) -> None:
    shape, box = given_box
    whole = 2 + np.arange(int(np.prod(shape))).reshape(shape)
    wanted = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
    extent = stored(shape).part(box)
    assert (elements(extent, box.sizes) == wanted).all()
    assert extent.length == 4 * (int(wanted.max()) - int(wanted.min()) + 1)


@given(boxes())
def test_a_part_of_a_transposed_tensor_is_a_slice_of_the_transpose(given_box: tuple[tuple[int, ...], Box]) -> None:
    shape, box = given_box
    whole = (2 + np.arange(int(np.prod(shape))).reshape(shape[::-1])).T
    strides = tuple(s // 8 for s in whole.strides)
    wanted = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
    assert (elements(stored(shape, strides).part(box), box.sizes) == wanted).all()


def test_a_view_of_a_flat_tensor_begins_where_it_is_told() -> None:
    view = stored((100,)).view((3, 4), offset=10)
    assert (view.shape, view.extent) == ((3, 4), Extent("f", 48, 48))


def test_a_transposed_view_has_strides() -> None:
    view = stored((2, 12)).view((4, 3), (1, 4), 12)
    assert (view.extent.offset, view.extent.length, view.extent.strides) == (56, 48, (1, 4))


@pytest.mark.parametrize(("shape", "strides", "offset"), [((3, 4), None, 89), ((3, 4), (40, 1), 20), ((2,), None, -1)])
def test_a_view_outside_the_tensor_is_refused(shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int) -> None:
    with pytest.raises(ValueError, match="no view"):
        stored((100,)).view(shape, strides, offset)


def test_a_strided_tensor_has_no_other_views() -> None:
    with pytest.raises(ValueError, match="no view"):
        stored((4, 4), (1, 4)).view((16,))


def test_a_part_without_elements_lies_at_the_start() -> None:
    assert stored((4, 4)).part(Box((4, 0), (0, 4))) == Extent("f", 8, 0)
